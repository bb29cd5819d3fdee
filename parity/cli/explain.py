"""`parity explain`: which choice of arithmetic costs the recall."""

from __future__ import annotations

import argparse
from typing import Any

from parity.cli import options as shared
from parity.command import blame, say, write_json
from parity.vocabulary import PASSED


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--preset", metavar="NAME", help="the configuration in question (--list)")
    parser.add_argument("--set", metavar="CHOICE=VALUE", action="append", default=[], help="change a choice (--list)")
    parser.add_argument("--against", default="published", metavar="NAME[+CHOICE=VALUE...]", help="the reference")
    parser.add_argument("--impl", metavar="NAME|MODULE:FUNCTION", help="add a real implementation of the scores")
    parser.add_argument("--layout", metavar="NAME", help="page layout that a function of your own reads")
    parser.add_argument("--orders", type=int, default=2, help="pairs of orders drawn per context beyond 8 choices")
    parser.add_argument("--contexts", type=int, nargs="*", help="tokens of further contexts, for the totals only")
    parser.add_argument("--list", action="store_true", help="print choices, values and presets")
    add_measurement(parser, rows=8, cases=10)
    parser.add_argument("--tokens", type=int, default=22000, help="tokens of context (default: %(default)s)")
    parser.add_argument("--data", default="gaussian", help="data model (default: %(default)s)")


def add_measurement(parser: argparse.ArgumentParser, rows: int, cases: int) -> None:
    """What `explain` and `sweep recall` are measured on."""
    group = parser.add_argument_group("what it is measured on")
    size = shared.one_or_more
    group.add_argument("--heads", type=size, default=64, help="default: %(default)s")
    group.add_argument("--topk", type=size, default=512, help="keys that the reference selects (default: %(default)s)")
    group.add_argument("--cases", type=size, default=cases, help="contexts drawn (default: %(default)s)")
    group.add_argument("--rows", type=size, default=rows, help="queries per context (default: %(default)s)")
    group.add_argument("--seed", type=shared.count, default=0, help="draw other data (default: %(default)s)")
    group.add_argument("--captured", metavar="FILE", action="append", default=[], help="safetensors of a model instead")
    shared.add_device(parser)
    shared.add_json(parser)


def measurement_of(options: argparse.Namespace, device: Any, **more: Any) -> Any:
    """The settings of a measurement."""
    from parity.explain.explain import Settings

    named = {name: getattr(options, name) for name in ("heads", "topk", "cases", "rows", "seed")}
    return Settings(**named, **more, device=str(device))


def captured_of(options: argparse.Namespace, device: Any) -> list[Any]:
    """The samples of the files that `--captured` names."""
    from parity.explain import samples

    return [samples.captured(path, options.topk, device) for path in options.captured]


def run(options: argparse.Namespace) -> int:
    from parity.explain import explain, live, sweep_recall, text
    from parity.explain.choices import DEFAULT_PRESETS, settings
    from parity.run import operation, registry
    from parity.run.device import provenance

    if options.list:
        print("\n".join(text.listing()))
        return PASSED
    with blame("cannot explain"):
        device, impl = shared.device_of(options), None
        if options.impl:
            impl = registry.load(options.impl, options.layout, operation.DEFAULT, None, device)
            if impl.absent:
                raise ValueError(f"impl: {impl.name} cannot run here: {impl.absent}")
        preset = options.preset or DEFAULT_PRESETS.get(impl.layout if impl else "fp8", "seed-before")
        target = sweep_recall.configuration(preset).having(**settings(options.set))
        if impl is not None:
            live.layout_of(target)
        contexts = explain.CONTEXTS if options.contexts is None else tuple(options.contexts)
        more = {"tokens": options.tokens, "data": options.data, "pairs": options.orders, "contexts": contexts}
        report = explain.explain(
            sweep_recall.configuration(options.against),
            target,
            measurement_of(options, device, **more),
            captured=captured_of(options, device),
            impl=impl,
            say=say,
        )
    print("\n".join(text.table(report, preset, options.against)))
    head = {"preset": preset, "against": options.against}
    write_json(options.json, {**head, **report, "provenance": provenance(device)})
    return PASSED

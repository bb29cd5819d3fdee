"""Options of `parity explain`, `parity sweep` and `parity story`, and how their results read on a terminal."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from parity.command import FAILED, PASSED, blame, check_writable, say, write_json


def explain_main(words: Sequence[str]) -> int:
    """`parity explain`; the exit code."""
    from parity.explain.choices import NAMES, PRESETS

    parser = _parser("explain", "measure which choice of arithmetic costs the recall")
    parser.add_argument("--preset", metavar="NAME", help=f"the configuration in question: {', '.join(PRESETS)}")
    parser.add_argument(
        "--set", metavar="CHOICE=VALUE", action="append", default=[], help=f"change a choice: {', '.join(NAMES)}"
    )
    parser.add_argument("--against", default="published", metavar="NAME[+CHOICE=VALUE...]", help="the reference")
    parser.add_argument("--impl", metavar="NAME|MODULE:FUNCTION", help="add a real implementation of the scores")
    parser.add_argument("--layout", choices=("bf16", "fp8"), help="page layout that a function of your own reads")
    parser.add_argument("--orders", type=int, default=2, help="pairs of orders drawn a context beyond 8 choices")
    parser.add_argument("--contexts", type=int, nargs="*", help="tokens of further contexts, for the totals alone")
    parser.add_argument("--list", action="store_true", help="print choices, values and presets")
    _measured(parser, rows=8, cases=10)
    parser.add_argument("--tokens", type=int, default=22000, help="tokens of context (default: %(default)s)")
    parser.add_argument("--data", default="gaussian", help="data model (default: %(default)s)")
    options = parser.parse_args(list(words))
    if options.list:
        print("\n".join(listing()))
        return PASSED
    check_writable(options.json)
    from parity.explain import explain

    with blame("cannot explain"):
        return _explain(options, explain)


def _explain(options: argparse.Namespace, explain: Any) -> int:
    from parity.explain import live, sweep_recall
    from parity.explain.choices import DEFAULT_PRESETS, settings

    device = _device(options)
    impl = None
    if options.impl:
        from parity.run import interpreter, registry

        interpreter.prepare(device.type)
        impl = registry.load(options.impl, options.layout, "logits", None, device)
        if impl.absent:
            raise ValueError(f"impl: {impl.name} cannot run here: {impl.absent}")
    preset = options.preset or DEFAULT_PRESETS.get(impl.layout if impl else "fp8", "seed-before")
    target = sweep_recall.configuration(preset).having(**settings(options.set))
    if impl is not None:
        live.layout_of(target)
    more = explain.CONTEXTS if options.contexts is None else tuple(options.contexts)
    named = {"tokens": options.tokens, "data": options.data, "pairs": options.orders, "contexts": more}
    wanted = _settings(options, explain.Settings, **named)
    report = explain.explain(
        sweep_recall.configuration(options.against),
        target,
        wanted,
        captured=_captured(options, device),
        impl=impl,
        say=say,
    )
    write_json(options.json, {"preset": preset, "against": options.against, **report, "provenance": _where(device)})
    print("\n".join(table(report, preset, options.against)))
    return PASSED


def listing() -> list[str]:
    """Choices with their values, the published one first, and the presets with what they change."""
    from parity.explain.choices import CHOICES, PRESETS

    lines = ["choices (the published value first):"]
    for choice in CHOICES:
        values = ", ".join(choice.values) + (", or a number" if choice.number else "")
        lines.append(f"  {choice.name:16s} {values:42s} {choice.about}")
    lines.append("presets:")
    for name, (about, c) in PRESETS.items():
        lines.append(f"  {name:18s} {about}")
        changes = " ".join(f"{key}={value}" for key, value in c.departures().items())
        lines += [f"  {'':18s} {changes}"] if changes else []
    return lines


def table(report: dict[str, Any], name: str, against: str) -> list[str]:
    """The report as lines: totals, choices worst first, other contexts, and the sentence."""
    settings, total = report["settings"], report["total"]
    needles = _number(report["reference_needles"]["needles_lost"]["mean"], ".3f")
    lost = _number(total["needles_lost"]["mean"], ".3f")
    lines = [
        f"{name} against {against}: {settings['data']}, {settings['keys']:,} keys, top {settings['topk']}, "
        f"{settings['heads']} heads, {settings['cases']} contexts x {settings['rows']} rows",
        f"recall {1 - total['loss']['mean']:.4f} ± {_number(total['loss']['half'], '.4f')}, regret "
        f"{total['regret']['mean']:.5f}, logits error {total['error']['mean']:.4f}, needles lost {lost} "
        f"(by the reference {needles})",
        "",
        f"{'choice':16s} {'value':10s} {'share of loss':>16s} {'alone':>8s} {'removed':>8s} {'path':>8s} "
        f"{'regret':>8s} {'needle rank':>11s} {'error':>7s}",
    ]
    for entry in report["choices"]:
        share = entry["share"]
        lines.append(
            f"{entry['choice']:16s} {entry['to']:10s} {_points(share['loss']):>16s} "
            f"{100 * entry['alone']['loss']['mean']:7.2f}% {100 * entry['removed']['loss']['mean']:7.2f}% "
            f"{100 * entry['path']['loss']['mean']:7.2f}% {100 * share['regret']['mean']:7.3f}% "
            f"{_number(entry['alone']['needle_rank']['mean'], '.0f'):>11s} {entry['alone']['error']['mean']:7.4f}"
        )
    if "kernel" in report:
        kernel = report["kernel"]
        lines.append(f"{kernel['implementation'][:27]:27s} {_points(kernel['share']['loss']):>16s}")
    how = "exact over all orders" if report["exact"] else "over drawn orders, whose error the intervals contain"
    lines += ["", f"shares: percentage points of the selection, {how}; ± is a 95 % interval over contexts"]
    if report.get("contexts"):
        lines.append("recall by context: " + ", ".join(_context(entry) for entry in report["contexts"]))
    return [*lines, "", report["sentence"], f"({report['seconds']:.0f} s)"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _points(value: dict[str, Any]) -> str:
    half = None if value["half"] is None else 100 * value["half"]
    return f"{100 * value['mean']:.2f} ± {_number(half, '.2f')}"


def _context(entry: dict[str, Any]) -> str:
    return f"{1 - entry['total']['loss']['mean']:.3f} at {entry['tokens']:,} tokens"


def sweep_main(words: Sequence[str]) -> int:
    """`parity sweep recall` and `parity sweep memory`; the exit code."""
    parser = _parser("sweep", "curves of recall or of memory against context length")
    actions = parser.add_subparsers(dest="action", metavar="recall|memory", required=True)
    recall = actions.add_parser("recall", help="recall, regret and needles against context, per configuration and data")
    _measured(recall, rows=8, cases=2)
    recall.add_argument("--tokens", type=int, nargs="+", help="context lengths (default: 1K to 1M tokens)")
    recall.add_argument("--config", action="append", metavar="NAME[+CHOICE=VALUE...]", help="repeatable")
    recall.add_argument("--data", action="append", metavar="MODEL", help="data model, repeatable (default: all)")
    recall.add_argument("--against", default="published", metavar="NAME[+CHOICE=VALUE...]", help="the reference")
    recall.add_argument("--margins", type=float, nargs="+", help="needle margins in standard deviations")
    bytes_ = actions.add_parser("memory", help="peak bytes and time of every path against rows x context")
    bytes_.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    bytes_.add_argument("--json", metavar="FILE", help="write the result as JSON too")
    options = parser.parse_args(list(words))
    check_writable(options.json)
    with blame(options.action):
        return _sweep_recall(options) if options.action == "recall" else _sweep_memory(options)


def _sweep_recall(options: argparse.Namespace) -> int:
    from parity.explain import samples, sweep_recall
    from parity.explain.explain import Settings

    device = _device(options)
    report = sweep_recall.sweep(
        options.tokens or sweep_recall.TOKENS,
        options.config or sweep_recall.CONFIGURATIONS,
        options.data or list(samples.MODELS),
        _settings(options, Settings, margins=tuple(options.margins or sweep_recall.MARGINS)),
        against=options.against,
        captured=_captured(options, device),
        say=say,
    )
    write_json(options.json, report | {"provenance": _where(device)})
    print(
        f"{'data':16s} {'tokens':>9s} {'configuration':28s} {'bytes':>5s} {'recall':>7s} {'regret':>8s}  needles kept"
    )
    for row in report["rows"]:
        metrics = row["metrics"]
        recall = f"{1 - metrics['loss']['mean']:7.4f} {metrics['regret']['mean']:8.5f}" if metrics else f"{'':16s}"
        kept = " ".join(_number(each["mean"], ".2f") for each in row["needles"] or ())
        name = options.against if row["configuration"] == "reference" else row["configuration"]
        print(f"{row['data']:16s} {row['tokens']:9,d} {name:28s} {row['store_bytes']:5d} {recall}  {kept}")
    margins = ", ".join(f"{margin:g}" for margin in report["margins"])
    print(f"recall and regret against {options.against}; needles at margins {margins} standard deviations")
    if report["caveat"]:
        print(report["caveat"])
    return PASSED


def _sweep_memory(options: argparse.Namespace) -> int:
    from parity.explain import sweep_memory

    device = _device(options)
    report = sweep_memory.sweep(device, say=say)
    write_json(options.json, report | {"provenance": _where(device)})
    print("\n".join(sweep_memory.table(report)))
    return PASSED


def story_main(words: Sequence[str]) -> int:
    """`parity story`; 0 if every step's sentence is true, 1 at the first that is not."""
    parser = _parser("story", "the memory incident step by step; each step asserts what it says")
    parser.add_argument("--seed", type=int, default=0, help="draw other data (default: %(default)s)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON too")
    options = parser.parse_args(list(words))
    check_writable(options.json)
    from parity.run import interpreter

    with blame("--device"):
        device = _device(options)
    interpreter.prepare(device.type)
    from parity.explain import story, story_paths
    from parity.explain.explain import Settings

    stage = story.Stage(Settings(cases=4, rows=8, seed=options.seed, device=str(device)), device)
    steps = (story.short_prompts, story.recall_alone, story.needle_band)
    more = (story_paths.real_kernels, story_paths.gather, story_paths.flag, story_paths.no_fallback)
    print(
        f"The story on {device}, seed {options.seed}. Data is drawn, not a model's: real keys may behave differently."
    )
    report = story.tell(stage, (*steps, *more), show=lambda text: print(text, flush=True))
    write_json(options.json, report | {"provenance": _where(device)})
    count = len(report["steps"])
    skipped = sum(step["not_run"] is not None for step in report["steps"])
    end = f"{count - skipped} steps told and true" + (f", {skipped} not run" if skipped else "")
    print(f"\n{end}." if report["passed"] else "\nThe story is not true here.")
    return PASSED if report["passed"] else FAILED


def _parser(name: str, text: str) -> argparse.ArgumentParser:
    from parity.cli.main import Parser

    return Parser(prog=f"parity {name}", description=text[:1].upper() + text[1:] + ".")


def _measured(parser: argparse.ArgumentParser, rows: int, cases: int) -> None:
    group = parser.add_argument_group("what it is measured on")
    group.add_argument("--heads", type=int, default=64, help="default: %(default)s")
    group.add_argument("--topk", type=int, default=512, help="keys that the reference selects (default: %(default)s)")
    group.add_argument("--cases", type=int, default=cases, help="contexts drawn (default: %(default)s)")
    group.add_argument("--rows", type=int, default=rows, help="queries of a context (default: %(default)s)")
    group.add_argument("--seed", type=int, default=0, help="draw other data (default: %(default)s)")
    group.add_argument("--captured", metavar="FILE", action="append", default=[], help="safetensors of a model instead")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    group.add_argument("--json", metavar="FILE", help="write the result as JSON too")


def _settings(options: argparse.Namespace, kind: Any, **more: Any) -> Any:
    names = {field.name for field in dataclasses.fields(kind)} - {"device", "tokens", "data", "margins", "contexts"}
    given = {name: getattr(options, name) for name in names if hasattr(options, name)}
    for name in ("heads", "topk", "cases", "rows"):
        if given.get(name, 1) < 1:
            raise ValueError(f"--{name}: must be at least 1, got {given[name]}")
    return kind(**given, **more, device=str(_device(options)))


def _captured(options: argparse.Namespace, device: Any) -> list[Any]:
    from parity.explain import samples

    return [samples.captured(path, options.topk, device) for path in options.captured]


def _device(options: argparse.Namespace) -> Any:
    from parity.run.device import resolve

    return resolve(options.device)


def _where(device: Any) -> dict[str, Any]:
    from parity.run.device import provenance

    return provenance(device)

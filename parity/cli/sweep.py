"""`parity sweep`: curves against context length."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.cli.explain import add_measurement, captured_of, measurement_of
from parity.command import blame, say, write_json
from parity.vocabulary import PASSED


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="recall|memory", required=True, parser_class=shared.Parser)
    recall = actions.add_parser("recall", help="recall, regret and needles against context, per configuration and data")
    add_measurement(recall, rows=8, cases=2)
    recall.add_argument("--tokens", type=int, nargs="+", help="context lengths (default: 1K to 1M tokens)")
    recall.add_argument("--config", action="append", metavar="NAME[+CHOICE=VALUE...]", help="repeatable")
    recall.add_argument("--data", action="append", metavar="MODEL", help="data model, repeatable (default: all)")
    recall.add_argument("--against", default="published", metavar="NAME[+CHOICE=VALUE...]", help="the reference")
    recall.add_argument("--margins", type=float, nargs="+", help="needle margins in standard deviations")
    memory = actions.add_parser("memory", help="peak bytes and time of every path against rows x context")
    shared.add_device(memory)
    shared.add_json(memory)


def run(options: argparse.Namespace) -> int:
    from parity.explain import samples, sweep_memory, sweep_recall, text
    from parity.run.device import provenance

    with blame(options.action):
        device = shared.device_of(options)
        if options.action == "memory":
            report = sweep_memory.sweep(device, say=say)
            lines = sweep_memory.table(report)
        else:
            report = sweep_recall.sweep(
                options.tokens or sweep_recall.TOKENS,
                options.config or sweep_recall.CONFIGURATIONS,
                options.data or list(samples.MODELS),
                measurement_of(options, device, margins=tuple(options.margins or sweep_recall.MARGINS)),
                against=options.against,
                captured=captured_of(options, device),
                say=say,
            )
            lines = text.recall_table(report, options.against)
    print("\n".join(lines))
    write_json(options.json, report | {"provenance": provenance(device)})
    return PASSED

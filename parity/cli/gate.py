"""`parity gate`."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.vocabulary import LEVELS


def add(parser: argparse.ArgumentParser) -> None:
    shared.add_implementation(parser)
    shared.add_arithmetic(parser)
    shared.add_device(parser)
    shared.add_amount(parser)
    parser.add_argument("--level", choices=LEVELS, action="append", default=[], help="only this level (repeatable)")
    shared.add_workers(parser, "2 on a CPU; on a GPU one for 16 GB, at most 8")
    parser.add_argument("--no-golden", dest="golden", action="store_false", help="leave the goldens out")
    parser.add_argument(
        "--no-faults", dest="faults", action="store_false", help="leave fault models and the diagnosis out"
    )
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="leave the compile gate out (as --impl does)"
    )
    shared.add_fixtures(parser)
    shared.add_json(parser)
    parser.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    shared.add_markdown(parser, "a Markdown summary (in a GitHub job also its summary)")


def run(options: argparse.Namespace) -> int:
    from parity.gate import gate

    names = gate.Options.__dataclass_fields__.keys() - {"device", "level"}
    named = {name: getattr(options, name) for name in names}
    return gate.gate(gate.Options(device=shared.device_of(options), level=tuple(options.level), **named))

"""`parity report`: one page from the JSON of the other commands."""

from __future__ import annotations

import argparse

from parity.vocabulary import PASSED


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="JSON of gate, explain, sweep, story, compile, bench or mutants"
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="parity-report.html", help="default: %(default)s")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="show NEW and mark what changed")
    parser.add_argument("--pictures", metavar="DIR", help="write every figure as an SVG file of its own too")


def run(options: argparse.Namespace) -> int:
    from parity.report.write import write_report

    print("\n".join(write_report(options.files, options.output, compare=options.compare, pictures=options.pictures)))
    return PASSED

"""`parity merge`."""

from __future__ import annotations

import argparse

from parity import tables
from parity.cli import options as shared
from parity.command import blame, read_json, write_json, write_text
from parity.results import Report, add_up


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="files that `parity gate --json` wrote")
    shared.add_json(parser)
    shared.add_markdown(parser)


def run(options: argparse.Namespace) -> int:
    report = add_up([read(file) for file in options.files])
    print(f"{tables.text(report)}\n\n{report.sentence}")
    write_json(options.json, report.to_json())
    if options.markdown:
        write_text(options.markdown, tables.markdown(report))
    return report.exit


def read(file: str) -> Report:
    """The gate report in a file."""
    given = read_json(file)
    with blame(file):
        return Report.from_json(given)

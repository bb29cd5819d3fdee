"""`parity report FILE... -o PAGE.html`: options and exit codes."""

from __future__ import annotations

from collections.abc import Sequence

from parity.command import PASSED


def main(words: Sequence[str]) -> int:
    """0 when the page was written; CommandError for a file that cannot be read or a missing package."""
    from parity.cli.main import Parser
    from parity.report.write import write_report

    parser = Parser(prog="parity report", description="One self-contained HTML page from the JSON of other commands.")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="JSON of gate, explain, sweep, story, compile, bench or faults"
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="parity-report.html", help="default: %(default)s")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="show NEW and mark what changed")
    parser.add_argument("--pictures", metavar="DIR", help="write every figure as an SVG file of its own too")
    options = parser.parse_args(list(words))
    print("\n".join(write_report(options.files, options.output, compare=options.compare, pictures=options.pictures)))
    return PASSED

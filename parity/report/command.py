"""`parity report FILE... -o PAGE.html`: options and exit codes."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from parity.command import PASSED, CommandError, check_writable, write_text

MOST = 2_000_000  # bytes: a page that a mail still carries


def main(words: Sequence[str]) -> int:
    """0 when the page was written; CommandError for a file that cannot be read or a missing package."""
    from parity.cli.main import Parser

    parser = Parser(prog="parity report", description="One self-contained HTML page from the JSON of other commands.")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="JSON of gate, explain, sweep, story, compile, bench or faults"
    )
    parser.add_argument("-o", "--output", metavar="FILE", default="parity-report.html", help="default: %(default)s")
    parser.add_argument("--compare", nargs=2, metavar=("OLD", "NEW"), help="show NEW and mark what changed")
    parser.add_argument("--pictures", metavar="DIR", help="write every figure as an SVG file of its own too")
    options = parser.parse_args(list(words))
    if not options.files and not options.compare:
        raise CommandError("expected at least one JSON file, or --compare OLD NEW")
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"the report needs {' and '.join(missing)}: pip install 'indexer-parity[report]'")
    check_writable(options.output)
    if options.pictures and not Path(options.pictures).is_dir():
        raise CommandError(f"--pictures: {options.pictures} is no folder")
    from parity.report import figures, inputs, page

    files = list(options.files)
    old = None
    if options.compare:
        earlier = inputs.read([options.compare[0]])
        if earlier.gate is None:
            raise CommandError(f"{options.compare[0]}: --compare wants a gate report")
        old = earlier.gate
        files.insert(0, options.compare[1])
    given = inputs.read(files)
    if old is not None and given.gate is None:
        raise CommandError(f"{files[0]}: --compare wants a gate report")
    text = page.render(given, old)
    size = len(text.encode())
    if size > MOST:
        raise CommandError(f"the page would have {size:,} bytes, more than {MOST:,}: give fewer files")
    write_text(options.output, text)
    if options.pictures:
        found = [picture for section in page.sections(given, old) for picture in section.pictures]
        for picture in found:
            write_text(Path(options.pictures) / f"{picture.name}.svg", figures.standalone(picture))
        print(f"{options.pictures}: {len(found)} pictures")
    print(f"{options.output}: {size:,} bytes")
    return PASSED

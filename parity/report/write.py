"""Writing a report: the files read, the page rendered and written, its figures as files of their own."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from parity.command import CommandError, check_writable, write_text

MOST = 2_000_000  # bytes: a page that a mail still carries


def write_report(
    files: Sequence[str], out: str, *, compare: tuple[str, str] | None = None, pictures: str | None = None
) -> list[str]:
    """Write the HTML page of some JSON files to `out`; the lines to print, which name what was written.

    compare: (old, new), two gate reports: the new one is shown and what changed is marked. pictures: a folder that gets
    every figure as an SVG file too. CommandError for a file that cannot be read or written, or a missing package.
    """
    if not files and not compare:
        raise CommandError("expected at least one JSON file, or --compare OLD NEW")
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise CommandError(f"the report needs {' and '.join(missing)}: pip install 'indexer-parity[report]'")
    check_writable(out)
    if pictures and not Path(pictures).is_dir():
        raise CommandError(f"--pictures: {pictures} is no folder")
    from parity.report import figures, inputs, page

    old, given = inputs.read_compared(*compare, files) if compare else (None, inputs.read(files))
    sections = page.sections(given, old)
    text = page.render(given, sections, old)
    size = len(text.encode())
    if size > MOST:
        raise CommandError(f"the page would have {size:,} bytes, more than {MOST:,}: give fewer files")
    write_text(out, text)
    lines = []
    if pictures:
        found = [picture for section in sections for picture in section.pictures]
        for picture in found:
            write_text(Path(pictures) / f"{picture.name}.svg", figures.standalone(picture))
        lines.append(f"{pictures}: {len(found)} pictures")
    return [*lines, f"{out}: {size:,} bytes"]

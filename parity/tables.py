"""Rows as text: the verdict table, the compile table, rejections, reasons and the Markdown summary.

Reads rows and nothing else: it imports neither torch nor a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.results import Report, Row, plural, worst
from parity.vocabulary import PRECEDENCE, REPORTED, SEVERITY, Status

SAID_LINES = 10
SHOWN = 8  # rejections printed in full; the JSON file has all of them
SUMMARY_BYTES = 1_000_000  # a GitHub step summary holds 1 MiB
COLUMNS = ("implementation", "level", "status", "examples", "error/bound", "resolution")


@dataclass
class Cell:
    """All rows of one implementation at one level, or any other group of rows, added up."""

    rows: list[Row] = field(default_factory=list)

    @property
    def examples(self) -> int:
        return sum(row.examples for row in self.rows)

    @property
    def ratio(self) -> float | None:
        return worst(row.ratio for row in self.rows)

    @property
    def resolution(self) -> float | None:
        return worst(row.resolution for row in self.rows)

    @property
    def status(self) -> Status:
        """The one that stands for all: a rejection wins, then what was judged over what was not."""
        return min((row.status for row in self.rows), key=PRECEDENCE.index, default=Status.NOT_RUN)


def cells(rows: Sequence[Row]) -> dict[tuple[str, str], Cell]:
    """Rows by (implementation, level), implementations as first seen, levels in the order of a report."""
    names = list(dict.fromkeys(row.implementation for row in rows))
    table: dict[tuple[str, str], Cell] = {}
    for row in sorted(rows, key=lambda row: (names.index(row.implementation), rank(row.level))):
        table.setdefault((row.implementation, row.level), Cell()).rows.append(row)
    return table


def rank(level: str) -> int:
    """A level's place in the order of the questions; an unknown one comes last."""
    return REPORTED.index(level) if level in REPORTED else len(REPORTED)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def table_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The verdict table as text cells, one line per implementation and level."""
    return [
        (name, level, str(cell.status), f"{cell.examples:,}", number(cell.ratio), number(cell.resolution))
        for (name, level), cell in cells(rows).items()
    ]


def aligned(lines: Sequence[Sequence[str]], left: int) -> str:
    """Text cells in columns, the first `left` of them aligned to the left and the others, numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(t.ljust(w) if i < left else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def table(rows: Sequence[Row]) -> str:
    """The verdict table for a terminal."""
    return aligned([COLUMNS, *table_rows(rows)], 3)


def compile_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The compile gate as text cells: a line of architectures, then the statuses of each implementation; [] without."""
    found = {(row.implementation, row.arch): str(row.status) for row in rows if row.arch}
    names, arches = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    arches.sort(key=lambda arch: (len(arch), arch))
    lines = [(name, *(found.get((name, arch), "-") for arch in arches)) for name in names]
    return [("compiled for", *arches), *lines] if found else []


def compile_table(rows: Sequence[Row]) -> str:
    """The same for a terminal; empty where nothing was compiled."""
    lines = compile_cells(rows)
    return "\n".join(line.rstrip() for line in aligned(lines, len(lines[0])).splitlines()) if lines else ""


def rejections(rows: Sequence[Row]) -> list[Row]:
    """The rows that reject an implementation, worst kind first."""
    return sorted((row for row in rows if row.status.counts_against), key=lambda row: SEVERITY.index(row.status))


def reasons(rows: Sequence[Row]) -> list[str]:
    """One line per reason why something was not judged: the checks and the implementations that it concerns."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.status in (Status.NOT_RUN, Status.UNSUPPORTED):
            grouped.setdefault((row.status, row.text or "no reason given"), []).append(row)
    lines = []
    for (status, why), found in grouped.items():
        checks = dict.fromkeys(f"{row.level}/{row.check}" for row in found)
        names = dict.fromkeys(row.implementation for row in found)
        lines.append(f"{status}: {', '.join(checks)} of {', '.join(names)}: {why}")
    return lines


def coverage(report: Report) -> list[str]:
    """What was judged of each operation's domain and what was not; implementations with the same answer share lines."""
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, found in (report.head.get("coverage") or {}).items():
        (reached, every), (met, pairs) = found["buckets"], found["pairs_met"]
        judged = "; ".join(f"{dimension} {text}" for dimension, text in found["judged"].items())
        judged += f" ({reached} of {every} buckets, {met} of {pairs} pairs)"
        left = "; ".join(f"{dimension} {text}" for dimension, text in found["not_judged"].items())
        left += f" ({found['why']})" if found["why"] and left else ""
        alike.setdefault((found["op"], judged, left), []).append(name)
    lines = []
    restricted: dict[tuple[str, ...], list[str]] = {}
    for name, found in (report.head.get("implementations") or {}).items():
        restricted.setdefault(tuple(found.get("restrictions") or ()), []).append(name)
    lines += [
        f"restricted by contract, for {', '.join(names)}: {', '.join(words)}"
        for words, names in restricted.items()
        if words
    ]
    for (op, judged, left), names in alike.items():
        lines.append(f"judged of {op}, for {', '.join(names)}: {judged}")
        lines += [f"not judged: {left}"] if left else []
    return lines


def rejection(row: Row) -> str:
    """A rejection in a few lines: which check, what it saw, how to repeat it."""
    said = row.text.strip().splitlines()
    # Only a broken process leaves more than a few lines, and a traceback says the most in the last ones.
    said = ["...", *said[-SAID_LINES:]] if len(said) > SAID_LINES else said
    lines = [f"{row.status}: {row.implementation} {row.level}/{row.check}", *("  " + line for line in said)]
    if row.repro and row.repro not in row.text:
        lines.append(f"  repeat: {row.repro}")
    return "\n".join(lines)


def progress(row: Row) -> str:
    """What a row says, on one line."""
    head = f"{row.status:<12}{row.implementation} {row.level}/{row.check}"
    if row.status in (Status.NOT_RUN, Status.UNSUPPORTED):
        return f"{head}: {row.text}"
    parts = [plural(row.examples, "example")]
    parts += [f"error/bound {number(row.ratio)}"] if row.ratio is not None else []
    return f"{head:<50} {', '.join(parts)}, {row.seconds or 0:.1f} s"


def text(report: Report) -> str:
    """Tables, rejections, what was not judged and why, and the verdict as the last line."""
    parts = [table(report.rows), compile_table(report.rows)]
    found = rejections(report.rows)
    parts += [rejection(row) for row in found[:SHOWN]]
    parts += [f"... and {plural(len(found) - SHOWN, 'more rejection')}, see --json"] if len(found) > SHOWN else []
    parts.append("\n".join(reasons(report.rows)))
    parts.append("\n".join(coverage(report)))
    return "\n\n".join(filter(None, parts))


def markdown(report: Report) -> str:
    """A step summary: verdict first, then the table, rejections, what was not judged, and where it ran."""
    rows = report.rows
    mark = {"passed": "✅", "failed": "❌"}.get(report.verdict, "⚠️")
    head = [
        f"## {mark} {report.sentence}",
        "",
        *markdown_table([COLUMNS, *table_rows(rows)], "|---|---|---|--:|--:|--:|"),
    ]
    head += [""] + ([*markdown_table(compiled), ""] if (compiled := compile_cells(rows)) else [])
    tail = ["<details><summary>Where it ran</summary>", "", "```"]
    tail += [f"{key}: {value}" for key, value in flat(report.head.get("provenance") or {})]
    tail += ["```", "", "</details>", ""]
    body: list[str] = []
    room = SUMMARY_BYTES - _size([*head, *tail])
    notes = [f"```\n{rejection(row)}\n```" for row in rejections(rows)] + [f"- {line}" for line in reasons(rows)]
    for index, note in enumerate(notes):
        room -= _size([note])
        if room < 200:
            body.append(f"\n({plural(len(notes) - index, 'more note')} left out: see the JSON file)")
            break
        body.append(note)
    return "\n".join([*head, *body, "", *tail])


def markdown_table(lines: Iterable[Sequence[str]], rule: str = "") -> list[str]:
    """Lines of a Markdown table, the first of `lines` its head; `rule` aligns its columns."""
    first, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return [first, rule or "|---" * (first.count("|") - 1) + "|", *rest]


def _size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested provenance as dotted names, in order."""
    lines: list[tuple[str, Any]] = []
    for key, item in value.items():
        lines += flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else [(f"{prefix}{key}", item)]
    return lines

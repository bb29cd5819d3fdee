"""From the rows of a run to its verdict: table, verdict line, Markdown summary, and the sum of several runs.

A row says what one check found out about one implementation; see docs/gate.md for its fields. This module reads
rows and nothing else: it imports neither torch nor a kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.command import FAILED, PASSED, USAGE, CommandError

KIND = "indexer-parity/gate"
FORMAT = 1
LEVELS = ("layout", "rounding", "bits", "selection", "invariance", "semantics", "resources", "golden", "faults")
# Worst first: several rows together are as bad as their worst.
SEVERITY = ("error", "failed", "vacuous", "not run", "unsupported", "passed")
REJECTING = frozenset({"error", "failed", "vacuous"})
REFERENCE = "reference"  # who a golden's own rows belong to
SAID_LINES = 10
SUMMARY_BYTES = 1_000_000  # a GitHub step summary holds 1 MiB

Row = Mapping[str, Any]


@dataclass
class Cell:
    """All rows of one implementation at one level, or any other group of rows, added up."""

    rows: list[Row] = field(default_factory=list)

    @property
    def examples(self) -> int:
        return sum(int(row.get("examples") or 0) for row in self.rows)

    @property
    def worst_ratio(self) -> float | None:
        return worst(row.get("worst_ratio") for row in self.rows)

    @property
    def resolution(self) -> float | None:
        return worst(row.get("resolution") for row in self.rows)

    @property
    def status(self) -> str:
        """A rejecting status wins; then what was judged wins over what was not, which the verdict line counts."""
        found = {str(row["status"]) for row in self.rows}
        for status in ("error", "failed", "vacuous", "passed", "not run", "unsupported"):
            if status in found:
                return status
        return "not run"


def worst(values: Iterable[Any]) -> float | None:
    """The largest of the numbers that are there; NaN, which no comparison would find, counts as infinite."""
    found = [float(value) for value in values if value is not None]
    return max((float("inf") if value != value else value for value in found), default=None)


def cells(rows: Sequence[Row]) -> dict[tuple[str, str], Cell]:
    """Rows by (implementation, level), implementations as first seen, levels in the order of `LEVELS`."""
    table: dict[tuple[str, str], Cell] = {}
    names = list(dict.fromkeys(str(row["implementation"]) for row in rows))
    ranked = sorted(rows, key=lambda row: (names.index(str(row["implementation"])), rank(str(row["level"]))))
    for row in ranked:
        table.setdefault((str(row["implementation"]), str(row["level"])), Cell()).rows.append(row)
    return table


def rank(level: str) -> int:
    """A level's place in the order in which the questions are asked; an unknown one comes last."""
    return LEVELS.index(level) if level in LEVELS else len(LEVELS)


def verdict(rows: Sequence[Row]) -> tuple[str, int, str]:
    """(status, exit code, one line) of a whole run.

    passed 0; failed 1 where any row failed, was vacuous or ended in an error; `nothing judged` 2. A passing row of the
    reference, which goldens have too, judges no implementation, and neither does a kernel that merely compiles.
    """
    counts = {status: sum(row["status"] == status for row in rows) for status in SEVERITY}
    passed = [row for row in rows if row["status"] == "passed" and row["implementation"] != REFERENCE]
    compiled = sum(bool(compiled_for(row)) for row in passed)
    judged = [row for row in rows if row["status"] in REJECTING] + [row for row in passed if not compiled_for(row)]
    names = len({row["implementation"] for row in judged})
    examples = sum(int(row.get("examples") or 0) for row in judged)
    parts = [f"{plural(len(judged), 'check')} of {plural(names, 'implementation')}", plural(examples, "example")]
    parts += [f"{compiled} compiled"] if compiled else []
    parts += [f"{counts[status]} {status}" for status in SEVERITY if counts[status] and status != "passed"]
    if any(counts[status] for status in REJECTING):
        status, code = "failed", FAILED
    elif not judged:
        status, code = "nothing judged", USAGE
    else:
        status, code = "passed", PASSED
    return status, code, f"parity {status}: " + ", ".join(parts)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


COLUMNS = ("implementation", "level", "status", "examples", "worst/bound", "resolution")


def table_rows(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The verdict table as text cells, one line for an implementation at a level."""
    return [
        (name, level, cell.status, f"{cell.examples:,}", number(cell.worst_ratio), number(cell.resolution))
        for (name, level), cell in cells(rows).items()
    ]


def table(rows: Sequence[Row]) -> str:
    """The verdict table for a terminal: names to the left, numbers to the right."""
    lines = [COLUMNS, *table_rows(rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(aligned(line, widths)) for line in lines)


def aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [t.ljust(w) if i < 3 else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths, strict=True))]


def compiled_for(row: Row) -> str:
    """The architecture whose compiler a row speaks of (`sm_90`), empty for a row that speaks of results."""
    what, _, arch = str(row["check"]).partition(" ")
    return arch if what == "compile" else ""


def compile_cells(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """The compile gate as text cells: a line of architectures, then one for each implementation with its statuses."""
    found = {(str(row["implementation"]), compiled_for(row)): str(row["status"]) for row in rows if compiled_for(row)}
    names, arches = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    arches.sort(key=lambda arch: (len(arch), arch))
    lines = [tuple(found.get((name, arch), "-") for arch in arches) for name in names]
    return (
        [("compiled for", *arches), *((name, *line) for name, line in zip(names, lines, strict=True))] if found else []
    )


def compile_table(rows: Sequence[Row]) -> str:
    """The same for a terminal; empty where nothing was compiled."""
    lines = compile_cells(rows)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
    return "\n".join("  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def complaints(rows: Sequence[Row]) -> list[Row]:
    """The rows that reject an implementation, worst kind first."""
    return sorted((row for row in rows if row["status"] in REJECTING), key=lambda row: SEVERITY.index(row["status"]))


def reasons(rows: Sequence[Row]) -> list[str]:
    """One line for each reason why something was not judged: the checks and the implementations that it concerns."""
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] in ("not run", "unsupported"):
            grouped.setdefault((str(row["status"]), str(row.get("message") or "no reason given")), []).append(row)
    lines = []
    for (status, why), found in grouped.items():
        checks = dict.fromkeys(f"{row['level']}/{row['check']}" for row in found)
        names = dict.fromkeys(str(row["implementation"]) for row in found)
        lines.append(f"{status}: {', '.join(checks)} of {', '.join(names)}: {why}")
    return lines


def complaint(row: Row) -> str:
    """A rejection in a few lines: which check, what it saw, how to repeat it."""
    lines = [f"{row['status']}: {row['implementation']} {row['level']}/{row['check']}"]
    said = str(row.get("message") or "").strip().splitlines()
    # Only a broken process leaves more than a few lines, and the end of a traceback is what tells.
    lines += ["  " + line for line in (["...", *said[-SAID_LINES:]] if len(said) > SAID_LINES else said)]
    if row.get("repro") and str(row["repro"]) not in str(row.get("message") or ""):
        lines.append(f"  repeat: {row['repro']}")
    return "\n".join(lines)


def markdown(report: Mapping[str, Any]) -> str:
    """A step summary: verdict first, then the table, rejections, what was not judged, and where it ran."""
    rows = report["rows"]
    mark = {"passed": "✅", "failed": "❌"}.get(report["verdict"], "⚠️")
    head = [f"## {mark} {report['sentence']}", "", "| " + " | ".join(COLUMNS) + " |", "|---|---|---|--:|--:|--:|"]
    head += ["| " + " | ".join(line) + " |" for line in table_rows(rows)] + [""]
    compiled = ["| " + " | ".join(line) + " |" for line in compile_cells(rows)]
    if compiled:
        head += [compiled[0], "|---" * (compiled[0].count("|") - 1) + "|", *compiled[1:], ""]
    tail = ["<details><summary>Where it ran</summary>", "", "```"]
    tail += [f"{key}: {value}" for key, value in flat(report.get("provenance", {}))] + ["```", "", "</details>", ""]
    body: list[str] = []
    room = SUMMARY_BYTES - size([*head, *tail])
    notes = [f"```\n{complaint(row)}\n```" for row in complaints(rows)] + [f"- {line}" for line in reasons(rows)]
    for index, note in enumerate(notes):
        room -= size([note])
        if room < 200:
            body.append(f"\n({plural(len(notes) - index, 'more note')} left out: see the JSON file)")
            break
        body.append(note)
    return "\n".join([*head, *body, "", *tail])


def size(lines: Sequence[str]) -> int:
    return sum(len(line.encode()) + 1 for line in lines)


def flat(value: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Nested provenance as dotted names, in order."""
    lines: list[tuple[str, Any]] = []
    for key, item in value.items():
        lines += flat(item, f"{prefix}{key}.") if isinstance(item, Mapping) else [(f"{prefix}{key}", item)]
    return lines


def merge(reports: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any]:
    """Several runs as one: examples and seconds add up, the worst status, ratio and resolution stand.

    The message and the case of a check are those of its worst run. Each run keeps its own provenance under `runs`.
    """
    merged: dict[tuple[str, ...], dict[str, Any]] = {}
    runs: list[dict[str, Any]] = []
    for report, name in zip(reports, names, strict=True):
        check_report(report, name)
        runs += report.get("runs") or [{key: report.get(key) for key in report if key not in ("rows", "runs")}]
        for row in report["rows"]:
            key = tuple(str(row.get(part)) for part in ("implementation", "stage", "layout", "level", "check"))
            merged[key] = add(merged[key], row) if key in merged else dict(row)
    rows = list(merged.values())
    status, code, line = verdict(rows)
    return {
        "kind": KIND,
        "format": FORMAT,
        "verdict": status,
        "exit": code,
        "sentence": line,
        "provenance": {"merged": plural(len(runs), "run")},
        "runs": runs,
        "rows": rows,
    }


def add(left: Row, right: Row) -> dict[str, Any]:
    """Two rows of the same check as one."""
    # A check that one run judged and the other could not has been judged.
    order = ("error", "failed", "vacuous", "passed", "not run", "unsupported")
    first, second = sorted((left, right), key=lambda row: order.index(row["status"]))
    total = {**second, **first}
    total["examples"] = int(left.get("examples") or 0) + int(right.get("examples") or 0)
    for key in ("worst_ratio", "resolution"):
        total[key] = worst((left.get(key), right.get(key)))
    if left.get("seconds") is not None or right.get("seconds") is not None:
        total["seconds"] = float(left.get("seconds") or 0) + float(right.get("seconds") or 0)
    return total


def check_report(report: Any, name: str) -> None:
    """CommandError unless `report` is what `parity gate --json` writes."""
    if not isinstance(report, Mapping) or report.get("kind") != KIND:
        raise CommandError(f"{name}: not a report of `parity gate --json` (its `kind` is not {KIND!r})")
    if report.get("format") != FORMAT:
        raise CommandError(f"{name}: report format {report.get('format')!r}, this version reads {FORMAT}")
    for row in report.get("rows") or []:
        missing = [key for key in ("implementation", "level", "check", "status") if key not in row]
        if missing:
            raise CommandError(f"{name}: a row lacks {', '.join(missing)}")
        if row["status"] not in SEVERITY:
            raise CommandError(f"{name}: a row has the unknown status {row['status']!r}")

"""The JSON files that a report is made from: what kind each is, and one clear sentence for a file that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.command import CommandError, blame, read_json
from parity.results import GATE, MUTANTS, Report

Measured = Mapping[str, Any]
"""The report of a measurement, which has no verdict."""
EXPLAIN, RECALL = "indexer-parity/explain", "indexer-parity/sweep-recall"
MEMORY, STORY = "indexer-parity/sweep-memory", "indexer-parity/story"
NAMES = {
    GATE: "gate",
    MUTANTS: "faults",
    EXPLAIN: "explain",
    RECALL: "recall",
    MEMORY: "memory",
    STORY: "story",
    "bench store": "store_bench",
}


@dataclass
class Inputs:
    """All files by kind: one gate report at most, any number of the others."""

    gate: Report | None = None
    faults: list[Report] = field(default_factory=list)
    measured: dict[str, list[Measured]] = field(default_factory=dict)
    sources: list[tuple[str, str]] = field(default_factory=list)  # (file name, kind)

    def all(self, kind: str) -> list[Measured]:
        """The measurements of a kind, in the order in which they were given."""
        return self.measured.get(kind, [])


def read(paths: Sequence[str]) -> Inputs:
    """Read the files; CommandError for one that no command of ours has written, or for two gate reports."""
    found = Inputs()
    for path in paths:
        given = read_json(path)
        kind = kind_of(given)
        if kind is None:
            raise CommandError(f"{path}: not a JSON file of gate, explain, sweep, story, compile, bench or faults")
        with blame(path):
            if kind == "gate":
                if found.gate is not None:
                    raise ValueError("a second gate report; `parity merge` adds several up to one")
                found.gate = Report.from_json(given)
            elif kind == "faults":
                found.faults.append(Report.from_json(given, MUTANTS))
            else:
                check_format(given)
                found.measured.setdefault(kind, []).append(given)
        found.sources.append((path.rsplit("/", 1)[-1], kind))
    return found


def read_compared(old: str, new: str, files: Sequence[str]) -> tuple[Report, Inputs]:
    """The old gate report, and the inputs `new` and `files`; CommandError unless old and new are gate reports."""
    earlier, given = read([old]).gate, read([new, *files])
    for path, report in ((old, earlier), (new, given.gate)):
        if report is None:
            raise CommandError(f"{path}: --compare wants a gate report")
    assert earlier is not None
    return earlier, given


def check_format(report: Measured) -> None:
    """ValueError for a later format than this version reads."""
    if str(report.get("kind", "")).startswith("indexer-parity/") and report.get("format") != 1:
        raise ValueError(f"report format {report.get('format')!r}, this version reads 1")


def kind_of(report: Any) -> str | None:
    """gate, explain, recall, memory, story, store_bench, compile, bench or faults; None for anything else.

    Those of compilers and benchmarks carry no name, so they are known by their fields.
    """
    if not isinstance(report, Mapping):
        return None
    kind = report.get("kind")
    if kind is not None:
        return NAMES.get(str(kind))
    rows = report.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        return None
    if rows and all({"arch", "status"} <= row.keys() for row in rows):
        return "compile"
    return "bench" if "rounds" in report else None

"""The JSON files that a report is made from: what kind each is, and one clear sentence for a file that is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.command import CommandError, read_json
from parity.gate import summary

Report = Mapping[str, Any]
EXPLAIN, RECALL = "indexer-parity/explain", "indexer-parity/sweep-recall"
MEMORY, STORY = "indexer-parity/sweep-memory", "indexer-parity/story"
NAMES = {
    summary.KIND: "gate",
    EXPLAIN: "explain",
    RECALL: "recall",
    MEMORY: "memory",
    STORY: "story",
    "indexer-parity/mutants": "faults",
    "bench store": "store_bench",
}


@dataclass
class Inputs:
    """All files by kind: one gate report at most, any number of the others."""

    reports: dict[str, list[Report]] = field(default_factory=lambda: {"gate": []})
    sources: list[tuple[str, str]] = field(default_factory=list)  # (file name, kind)

    @property
    def gate(self) -> Report | None:
        """The gate report, if one was given."""
        return next(iter(self.reports["gate"]), None)

    def all(self, kind: str) -> list[Report]:
        """The files of a kind, in the order in which they were given."""
        return self.reports.get(kind, [])


def read(paths: Sequence[str]) -> Inputs:
    """Read the files; CommandError for one that no command of ours has written, or for two gate reports."""
    found = Inputs()
    for path in paths:
        report = read_json(path)
        kind = kind_of(report)
        if kind is None:
            raise CommandError(f"{path}: not a JSON file of gate, explain, sweep, story, compile, bench or faults")
        if kind == "gate":
            summary.check_report(report, path)
            if found.gate is not None:
                raise CommandError(f"{path}: a second gate report; `parity merge` adds several up to one")
        else:
            check_format(report, path)
        found.sources.append((path.rsplit("/", 1)[-1], kind))
        found.reports.setdefault(kind, []).append(report)
    return found


def read_compared(old: str, new: str, files: Sequence[str]) -> tuple[Report, Inputs]:
    """The old gate report, and the inputs `new` and `files`; CommandError unless old and new are gate reports."""
    earlier, given = read([old]).gate, read([new, *files])
    for path, report in ((old, earlier), (new, given.gate)):
        if report is None:
            raise CommandError(f"{path}: --compare wants a gate report")
    assert earlier is not None
    return earlier, given


def check_format(report: Report, path: str) -> None:
    """CommandError for a later format than this version reads."""
    if str(report.get("kind", "")).startswith("indexer-parity/") and report.get("format") != 1:
        raise CommandError(f"{path}: report format {report.get('format')!r}, this version reads 1")


def kind_of(report: Any) -> str | None:
    """gate, explain, recall, memory, story, store_bench, compile, bench or faults; None for anything else.

    The last three carry no name, so they are known by their fields.
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
    if rows and all({"outcome", "sentence"} <= row.keys() for row in rows):
        return "faults"
    return "bench" if "rounds" in report else None

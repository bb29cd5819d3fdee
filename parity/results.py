"""What was found, in three steps: a `Verdict` on one example, a `Row` for each check, a `Report` of a whole run.

Comparators make verdicts, `merge` adds up those of a check, rows and reports read and write JSON. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from parity.vocabulary import FAILED, PASSED, PRECEDENCE, REFERENCE, SEVERITY, USAGE, Grounds, Status

RESOLUTION_LIMIT = 2.0**-7
"""Median bound over median |value| above which a bounded comparison shows nothing: bf16's own spacing."""
UNDECIDED_LIMIT = 0.25
"""Share of the places open under the bound above which a selection verdict shows nothing: a quarter of it could be
anything."""
GATE, GOLDENS, MUTANTS, RUN = (f"indexer-parity/{name}" for name in ("gate", "golden", "mutants", "run"))
FORMAT = 2
FORMATS = (1, FORMAT)  # format 1 said `stage` for `op` and `worst_ratio` for `ratio`
RENAMED = {"stage": "op", "worst_ratio": "ratio"}
OLD_OPERATIONS = {"logits": "paged_logits"}

Number = float | int | str


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One judgement of one example.

    message     one line: coordinates, got, wanted, bound, ratio, note, repro, in this order; empty when passed
    ratio       worst |error| / bound (inf where the bound is zero and the error is not; None: no bound was used)
    resolution  median bound / median |value| of what was judged (None: no bound was used)
    undecided   share of the selected places that the bound leaves open (None: no selection was judged)
    cells       elements judged (0: the example was empty)
    where       request, row (of the whole case), draft (row within the request), key, logical_page, physical_page, slot
    note        a reservation that a reader must see, such as a dot judged by a coarse bound
    grounds     what a rejection rests on; without meaning for other verdicts
    """

    status: Status
    level: str = ""
    check: str = ""
    message: str = ""
    ratio: float | None = None
    resolution: float | None = None
    undecided: float | None = None
    cells: int = 0
    where: Mapping[str, int] = dataclasses.field(default_factory=dict)
    got: Number | None = None
    wanted: Number | None = None
    bound: float | None = None
    case: str = ""
    repro: str = ""
    note: str = ""
    grounds: Grounds = Grounds.VALUES

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED


@dataclasses.dataclass(frozen=True)
class Labels:
    """What a comparator writes on its verdict besides its findings."""

    level: str = ""
    check: str = ""
    case: str = ""
    impl: str = "NAME"

    @property
    def repro(self) -> str:
        """The one command that repeats the case."""
        return f"parity run --case '{self.case}' --impl {self.impl}" if self.case else ""

    def verdict(self, status: Status, **fields: Any) -> Verdict:
        return Verdict(status, self.level, self.check, case=self.case, repro=self.repro, **fields)

    def failed(self, **fields: Any) -> Verdict:
        """A failure, its message composed from the fields; ``note`` may say what coordinates and numbers cannot."""
        verdict = self.verdict(Status.FAILED, **fields)
        return dataclasses.replace(verdict, message=_message(verdict))


def _message(verdict: Verdict) -> str:
    where = verdict.where
    parts = []
    if where:
        place = f"request {where['request']}, row {where['row']}"
        if "key" in where:
            place += f", key {where['key']}"
        if "slot" in where:
            place += f", page {where['logical_page']} at {where['physical_page']}, slot {where['slot']}"
        parts.append(place)
    for name in ("got", "wanted", "bound", "ratio"):
        value = getattr(verdict, name)
        if value is not None:
            digits = 9 if name in ("got", "wanted") else 3
            parts.append(f"{name} {value:.{digits}g}" if isinstance(value, float) else f"{name} {value}")
    return "; ".join(filter(None, [*parts, verdict.note, verdict.repro]))


def merge(verdicts: Iterable[Verdict], coarse: str | None = None) -> Verdict:
    """One verdict for all examples of a check; NOT_RUN when there are none.

    The first failure or error decides. Otherwise the check is vacuous if, over all examples together, no element was
    judged, or the median resolution or the median undecided share is past its limit. A resolution past it is forgiven,
    and noted, only where `coarse` says which dot has no finer bound (a grouped arithmetic without a verified model) and
    the check also passed on exact data (examples with elements but without a bound)."""
    examples = list(verdicts)
    if not examples:
        return Verdict(Status.NOT_RUN, message="no example was drawn")
    judged = [verdict for verdict in examples if verdict.status.judged]
    resolutions = [v.resolution for v in judged if v.resolution is not None and v.cells]
    shares = [v.undecided for v in judged if v.undecided is not None and v.cells]
    summary: dict[str, Any] = {
        "ratio": max((v.ratio for v in judged if v.ratio is not None), default=None),
        "resolution": statistics.median(resolutions) if resolutions else None,
        "undecided": statistics.median(shares) if shares else None,
        "cells": sum(verdict.cells for verdict in judged),
    }
    for status in (Status.FAILED, Status.ERROR):
        for verdict in examples:
            if verdict.status is status:
                return dataclasses.replace(verdict, **summary)
    if not judged:
        return examples[0]
    first = judged[0]
    base = dataclasses.replace(first, status=Status.PASSED, message="", note="", where={}, case="", repro="", **summary)
    reason, note = _vacuous(base, any(v.resolution is None and v.cells for v in judged), coarse)
    if left := [verdict for verdict in examples if verdict.status is Status.NOT_RUN]:
        note = "; ".join(filter(None, [note, f"{len(left)} of {len(examples)} examples not run: {left[0].message}"]))
    if reason:
        return dataclasses.replace(base, status=Status.VACUOUS, message=f"{reason}, over {len(judged)} examples")
    return dataclasses.replace(base, note=note)


def _vacuous(check: Verdict, saw_exact: bool, coarse: str | None) -> tuple[str, str]:
    """(why the check shows nothing, or "" ; a note if it shows less than usual)."""
    if not check.cells:
        return "no element was judged", ""
    if check.resolution is not None and check.resolution > RESOLUTION_LIMIT:
        text = f"resolution {check.resolution:.2g} is coarser than {RESOLUTION_LIMIT:.2g}"
        if coarse is None or not saw_exact:
            return text, ""
        return "", f"{text} ({coarse}): judged by that bound together with exact data"
    if check.undecided is not None and check.undecided > UNDECIDED_LIMIT:
        return f"{check.undecided:.0%} of the places are open under the bound (limit {UNDECIDED_LIMIT:.0%})", ""
    return "", ""


# --------------------------------------------------------------------------------------------------------------- rows


@dataclasses.dataclass(frozen=True)
class Row:
    """What one check found out about one implementation; `docs/gate.md` explains the fields to readers of the JSON.

    A golden, a compiled kernel, a fault model and a process that died are rows too. Fields that mean nothing for a row
    keep their default, and the JSON leaves them out. Besides the fields of a `Verdict`, which are those of the example
    that decided:

    examples    cases that were judged
    op, layout  operation and page layout of the implementation (None: it has none)
    dot         how its dots are judged, where it has dots
    first_case  the failing case as it was drawn, before it was shrunk
    worst_case  the case with the largest ratio
    arch        the architecture that a kernel was compiled for: the row then judges no results
    kills       of a fault model: rows of the checks that rejected it by evidence
    crashes     of a fault model: sentences on calls that broke down, which reject nothing
    coverage    what `parity.domain.dimensions.Coverage` counted; a report adds it up by implementation
    facts       further figures of this kind of row, by name
    """

    implementation: str
    level: str
    check: str
    status: Status
    examples: int = 0
    op: str | None = None
    layout: str | None = None
    dot: str | None = None
    cells: int = 0
    ratio: float | None = None
    resolution: float | None = None
    undecided: float | None = None
    seconds: float | None = None
    message: str = ""
    note: str = ""
    grounds: Grounds = Grounds.VALUES
    case: str = ""
    repro: str = ""
    first_case: str = ""
    worst_case: str = ""
    where: Mapping[str, int] = dataclasses.field(default_factory=dict)
    got: Number | None = None
    wanted: Number | None = None
    bound: float | None = None
    arch: str = ""
    kills: tuple[Row, ...] = ()
    crashes: tuple[str, ...] = ()
    coverage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, verdict: Verdict, implementation: str, **fields: Any) -> Self:
        """The row of a verdict; `fields` are what a verdict does not know, or replace what it says."""
        found = {field.name: getattr(verdict, field.name) for field in dataclasses.fields(verdict)}
        return cls(**{"implementation": implementation, **found, **fields})

    @property
    def text(self) -> str:
        """What it has to say in words: its message, or a note on what was judged all the same."""
        return self.message or self.note

    def to_json(self) -> dict[str, Any]:
        """JSON types by field name; what has its default is left out."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "examples" or (value != field.default and value != {}):
                found[field.name] = str(value) if isinstance(value, Status | Grounds) else value
        if self.kills:
            found["kills"] = [row.to_json() for row in self.kills]
        return found

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Self:
        """The row that was written so, also in the names of format 1; ValueError, in one sentence, for others."""
        named = {RENAMED.get(name, name): value for name, value in given.items() if value is not None}
        missing = [name for name in ("implementation", "level", "check", "status") if name not in named]
        if missing:
            raise ValueError(f"a row lacks {', '.join(missing)}")
        if named["status"] not in set(Status):
            raise ValueError(f"a row has the unknown status {named['status']!r}")
        named["status"], named["grounds"] = Status(named["status"]), Grounds(named.get("grounds", Grounds.VALUES))
        for name in ("ratio", "resolution", "undecided", "bound"):
            if name in named:
                named[name] = float(named[name])  # "inf" and "nan" are strings there
        named["op"] = OLD_OPERATIONS.get(named.get("op", ""), named.get("op"))
        what, _, arch = str(named["check"]).partition(" ")
        named.setdefault("arch", arch if what == "compile" else "")
        named["kills"] = tuple(cls.from_json(kill) for kill in named.get("kills", ()))
        named["crashes"] = tuple(named.get("crashes", ()))
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in named.items() if name in known})


def worst(values: Iterable[float | None]) -> float | None:
    """The largest of the numbers that are there; NaN, which no comparison would find, counts as infinite."""
    found = [value for value in values if value is not None]
    return max((float("inf") if value != value else value for value in found), default=None)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


# ------------------------------------------------------------------------------------------------------------- reports


@dataclasses.dataclass(frozen=True)
class Report:
    """The rows of a run under one verdict, and its head: what was run, when, where.

    partial  why the run ended before everything was judged, "" for a whole one
    runs     heads of the runs that were added up
    words    the verdict in a sentence of the command's own; "" composes it from the rows
    """

    rows: tuple[Row, ...]
    kind: str = GATE
    head: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    partial: str = ""
    runs: tuple[Mapping[str, Any], ...] = ()
    words: str = ""

    @property
    def judged(self) -> list[Row]:
        """Rows that judge an implementation. A passing reference, which goldens have too, judges none, and neither does
        a kernel that merely compiles."""
        passed = [row for row in self.rows if row.status is Status.PASSED and row.implementation != REFERENCE]
        return [row for row in self.rows if row.status.counts_against] + [row for row in passed if not row.arch]

    @property
    def verdict(self) -> str:
        """passed; failed where any row failed, was vacuous or ended in an error; nothing judged; or incomplete."""
        if self.partial:
            return "incomplete"
        if any(row.status.counts_against for row in self.rows):
            return "failed"
        return "passed" if self.judged else "nothing judged"

    @property
    def exit(self) -> int:
        """The exit code of a command that ends with this report."""
        return {"passed": PASSED, "failed": FAILED}.get(self.verdict, USAGE)

    def _heads(self) -> Iterable[Mapping[str, Any]]:
        """What the head says of each implementation."""
        return (self.head.get("implementations") or {}).values()

    @property
    def sentence(self) -> str:
        """The verdict in one line, with counts."""
        if self.words:
            return self.words
        judged, counts = self.judged, {status: sum(row.status is status for row in self.rows) for status in SEVERITY}
        names = len({row.implementation for row in judged})
        compiled = sum(bool(row.arch) and row.status is Status.PASSED for row in self.rows)
        parts = [f"{plural(len(judged), 'check')} of {plural(names, 'implementation')}"]
        parts += [plural(sum(row.examples for row in judged), "example")]
        parts += [f"{compiled} compiled"] if compiled else []
        parts += [f"{count} {status}" for status, count in counts.items() if count and status is not Status.PASSED]
        parts += [self.partial] if self.partial else []
        within = [words for found in self._heads() if (words := found.get("restrictions"))]
        if len(within) == 1:
            parts += [f"within {plural(len(within[0]), 'restriction')} of its contract"]
        elif within:
            parts += [f"within the restrictions of {len(within)} contracts"]
        return f"parity {self.verdict}: " + ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """JSON types: kind, format, verdict, head and rows."""
        found: dict[str, Any] = {"kind": self.kind, "format": FORMAT, "verdict": self.verdict, "exit": self.exit}
        found |= {"sentence": self.sentence, **self.head}
        found |= {"partial": self.partial} if self.partial else {}
        found |= {"runs": list(self.runs)} if self.runs else {}
        return found | {"rows": [dataclasses.replace(row, coverage={}).to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, given: Any, kind: str = GATE) -> Self:
        """The report that a command wrote, of this format or an older one; ValueError, in one sentence, for others."""
        if not isinstance(given, Mapping) or given.get("kind") != kind:
            raise ValueError(f"not a report of `parity {kind.rpartition('/')[2]} --json` (its `kind` is not {kind!r})")
        if given.get("format") not in FORMATS:
            raise ValueError(f"report format {given.get('format')!r}, this version reads {FORMAT}")
        own = ("kind", "format", "verdict", "exit", "sentence", "partial", "runs", "rows")
        return cls(
            rows=tuple(Row.from_json(row) for row in given.get("rows") or ()),
            kind=kind,
            head={name: value for name, value in given.items() if name not in own},
            partial=given.get("partial", ""),
            runs=tuple(given.get("runs") or ()),
        )


def add_up(reports: Sequence[Report]) -> Report:
    """Several runs as one: examples and seconds add up, the worst status, ratio and resolution stand.

    Message and case of a check are those of its worst run; every run keeps its head under `runs`."""
    merged: dict[tuple[str | None, ...], Row] = {}
    runs: list[Mapping[str, Any]] = []
    for report in reports:
        runs += report.runs or [{**report.head, "sentence": report.sentence}]
        for row in report.rows:
            key = (row.implementation, row.op, row.layout, row.level, row.check)
            merged[key] = _both(merged[key], row) if key in merged else row
    partial = "; ".join(dict.fromkeys(report.partial for report in reports if report.partial))
    head = {"provenance": {"merged": plural(len(runs), "run")}}
    return Report(tuple(merged.values()), head=head, partial=partial, runs=tuple(runs))


def _both(left: Row, right: Row) -> Row:
    """Two rows of the same check as one. A check that one run judged and the other could not has been judged."""
    first, second = sorted((left, right), key=lambda row: PRECEDENCE.index(row.status))
    seconds = [row.seconds for row in (left, right) if row.seconds is not None]
    ratio = worst((left.ratio, right.ratio))
    return dataclasses.replace(
        first,
        examples=left.examples + right.examples,
        cells=left.cells + right.cells,
        ratio=ratio,
        resolution=worst((left.resolution, right.resolution)),
        seconds=sum(seconds) if seconds else None,
        worst_case=(second if second.ratio == ratio else first).worst_case,
    )

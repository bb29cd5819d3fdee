"""The mutation score as a matrix of models and levels: fault models scored in a pool of processes, and the table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from parity.command import say
from parity.domain.profiles import profile as named_profile
from parity.faults.catalogue import BY_ID, MODELS, smoke
from parity.faults.score import CORRECT, lost, quick, summary
from parity.ops.fault import KINDS
from parity.results import Row, plural
from parity.suite.pool import Job, Lost, Part
from parity.tables import markdown_table
from parity.vocabulary import Status

LEVELS = ("layout", "rounding", "selection", "invariance", "resources")
"""Levels that fault models are run through: the columns of the matrix."""
SLOW = ("memory", "integers", "launch", "race")
"""Kinds of models that take longest. They are run first, so that the processes end together."""


def chosen(kinds: Sequence[str] = (), half: str | None = None, small: bool = False) -> list[str]:
    """Ids of all models, of those of some kinds or of a half, or of one per kind; without a choice also of the correct
    implementations."""
    models = [m for m in (smoke() if small else MODELS) if (not kinds or m.kind in kinds) and half in (None, m.half)]
    slow = [m.id for m in models if m.equivalent or m.kind in SLOW]
    return ([] if kinds or half or small else list(CORRECT)) + slow + [m.id for m in models if m.id not in slow]


def part(ids: Sequence[str], profile: str, full: bool, workers: int | None) -> Part:
    """The jobs that score these models, in processes that interpret kernels wherever they run."""
    how = quick(named_profile(profile))
    done: list[str] = []

    def read(index: int, result: Any) -> list[Row]:
        return [lost(ids[index], result.message) if isinstance(result, Lost) else result]

    def show(rows: list[Row]) -> None:
        for row in rows:
            done.append(row.implementation)
            by = f" by {row.kills[0].level}/{row.kills[0].check} after {row.kills[0].examples}" if row.kills else ""
            say(f"[{len(done):>3}/{len(ids)}] {row.implementation}: {row.facts['outcome']}{by}")

    jobs = [Job("parity.faults.score:score", (id, how, full)) for id in ids]
    count = workers or min(8, os.cpu_count() or 1)
    return Part(jobs, read, show, count, environment={"TRITON_INTERPRET": "1"})


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Rows in the order of the catalogue, correct implementations last."""
    place = {id: at for at, id in enumerate([*BY_ID, *CORRECT])}
    return sorted(rows, key=lambda row: place[row.implementation])


def cell(row: Row, level: str) -> str:
    """What stands in the matrix: the check that killed it and the examples it took, or nothing."""
    return next((f"{kill.check} {kill.examples}" for kill in row.kills if kill.level == level), "")


def minimal(row: Row) -> str:
    """The minimal case of the first kill, or how it came out."""
    return row.kills[0].case if row.kills else str(row.facts["outcome"])


def text(rows: Sequence[Row]) -> str:
    """The matrix, aligned."""
    width = max((len(row.implementation) for row in rows), default=2) + 2
    lines = [f"{'model':<{width}}{'kind':<11}" + "".join(f"{level:<18}" for level in LEVELS) + "minimal case"]
    for row in rows:
        cells = "".join(f"{cell(row, level):<18}" for level in LEVELS)
        lines.append(f"{row.implementation:<{width}}{row.check:<11}{cells}{minimal(row)}")
        lines += [f"{'':<{width}}  {crash}" for crash in row.crashes] if not row.kills else []
    return "\n".join(lines)


def sentence(rows: Sequence[Row]) -> str:
    """The score in words."""
    found = summary(rows)
    halves = ", ".join(f"half {h}: {found[f'half_{h}']['killed']} of {found[f'half_{h}']['models']}" for h in "AB")
    return (
        f"mutation score: {found['killed']} of {found['models']} models killed ({halves}); {found['equivalent']} "
        f"equivalent, {found['correct']} correct implementations, {found['examples_of_correct']} examples of both"
    )


def problems(rows: Sequence[Row]) -> list[str]:
    """One line per model that is not as it should be."""
    bad = (row for row in rows if row.status.counts_against)
    return [f"not as it should be: {row.implementation} {row.facts['outcome']}" for row in bad] + [
        row.message for row in rows if row.status is Status.ERROR
    ]


def markdown(rows: Sequence[Row]) -> str:
    """The matrix, the kinds and the equivalent models as Markdown."""
    models = [row for row in rows if row.check in KINDS]
    real = [row for row in models if not row.facts["equivalent"]]
    kinds = [("kind", "models", "killed")]
    for kind, words in KINDS.items():
        mine = [row for row in real if row.check == kind]
        kinds.append((words, str(len(mine)), str(sum(row.facts["outcome"] == "killed" for row in mine))))
    matrix = [("model", "half", "kind", *LEVELS, "minimal case")]
    for row in real:
        case = minimal(row)
        short = case if len(case) <= 90 else case[:87] + "..."
        cells = (cell(row, level) for level in LEVELS)
        matrix.append((row.implementation, row.facts["half"], row.check, *cells, f"`{short}`"))
    correct = [("implementation", "examples", "outcome")]
    correct += [(row.implementation, str(row.examples), row.facts["outcome"]) for row in rows if row.check not in KINDS]
    equivalent = [
        f"- **{row.implementation}** ({row.facts['outcome']}): {row.facts['sentence']}. {row.facts['equivalent']}"
        for row in models
        if row.facts["equivalent"]
    ]
    lines = ["# Mutation score", "", sentence(rows) + ".", "", *markdown_table(kinds, "|---|--:|--:|")]
    lines += ["", "Check, and examples until it failed:", "", *markdown_table(matrix)]
    lines += ["", "## Equivalent models", "", "No input tells them from a correct implementation.", "", *equivalent]
    lines += ["", "## Correct implementations", "", *markdown_table(correct, "|---|--:|---|")]
    return "\n".join(lines) + "\n"


def catalogue() -> str:
    """Every model in a line."""
    lines = []
    for fault in MODELS:
        report = f" ({fault.report})" if fault.report else ""
        mark = " [equivalent]" if fault.equivalent else ""
        lines.append(f"{fault.id:<32}{fault.op:<13}{fault.kind:<11}{fault.half}  {fault.sentence}{report}{mark}")
    return "\n".join([*lines, "", plural(len(MODELS), "model")])

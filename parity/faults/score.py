"""The mutation score: each fault model through the suite until a check rejects it by a value."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from parity.domain.profiles import Profile
from parity.domain.profiles import profile as named_profile
from parity.faults.building import CPU, correct_implementation, implementation
from parity.faults.catalogue import BY_ID
from parity.faults.launches import compiled
from parity.ops.check import Check, checks_of
from parity.results import Row, Verdict
from parity.run.implementation import Implementation
from parity.run.operation import Operation
from parity.run.runner import InProcess
from parity.suite.search import run_check
from parity.vocabulary import FAULTS, Grounds, Status

PUBLISHED = {"schedule": "published"}
CORRECT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "correct-logits-bf16": ("paged_logits", "bf16", {}),
    "correct-logits-fp8": ("paged_logits", "fp8", {}),
    "correct-topk": ("topk", "bf16", {}),
    "correct-compressor": ("compressor", "bf16", {}),
    "correct-store-bf16": ("store", "bf16", {}),
    "correct-store-fp8": ("store", "fp8", {}),
    "correct-store-fp8-pow2": ("store", "fp8", {"scale": "pow2"}),
    "correct-store-fp4": ("store", "fp4", {}),
    "correct-store-bf16-published": ("store", "bf16", PUBLISHED),
    "correct-store-bf16-published-fake-fp4": ("store", "bf16", PUBLISHED | {"fake_fp4": True}),
    "correct-store-fp8-pow2-published": ("store", "fp8", PUBLISHED | {"scale": "pow2"}),
    "correct-store-fp4-published": ("store", "fp4", PUBLISHED),
}
"""Correct implementations that stand beside the models: operation, layout, and what a store's contract adds."""

LATE = ("resources/memory", "resources/many_rows", "selection/end_to_end")
"""Checks that cost seconds per model; they are run when nothing else has rejected it."""


def quick(profile: Profile) -> Profile:
    """The profile with little shrinking, for the case matters less here than that it was found; and not to the ends of
    dimensions, for models are run step by step in plain torch, which takes seconds there."""
    shrink, calls = min(2.0, profile.shrink_seconds), min(120, profile.reduce_calls)
    return replace(profile, shrink_seconds=shrink, reduce_calls=calls, far=False)


FIRST: dict[str, tuple[str, ...]] = {
    "integers": ("resources/far_pages",),
    "memory": ("resources/memory",),
    "launch": ("layout/long", "layout/exact", "layout/keys", "resources/many_rows"),
    "precision": ("rounding/ordinary", "rounding/extreme", "rounding/pooled"),
    "race": ("invariance/repeat",),
}
"""By kind of fault: the checks that are likeliest to see it."""


def ordered(operation: Operation, kind: str | None = None) -> list[Check]:
    """The checks of an operation, those first that find most for least."""
    first = FIRST.get(kind or "", ())

    def rank(check: Check) -> int:
        if check.id in first:
            return first.index(check.id) - len(first)
        return LATE.index(check.id) + 1 if check.id in LATE else 0

    return sorted(checks_of(operation), key=rank)


def killed(found: Row | Verdict) -> bool:
    """Whether a check rejects by what was computed, not by an exception or a wrong shape."""
    return found.status in (Status.FAILED, Status.ERROR) and found.grounds.evidence


def score(id: str, profile: Profile | None = None, full: bool = False) -> Row:
    """One model's row: which check of which level killed it, after how many examples, and the minimal case.

    `full` goes on to the next level after a kill. Ids of CORRECT name the correct implementations.
    """
    profile = profile or quick(named_profile("ci"))
    started = time.monotonic()
    fault = BY_ID.get(id)
    if fault is None:
        found = judged(correct_implementation(*CORRECT[id]), None, profile, full=True)
    elif "compile" in fault.extra:
        found = [compiled(fault)]
    else:
        found = judged(implementation(fault), fault.kind, profile, full=full)
    return described(id, found, time.monotonic() - started)


def judged(impl: Implementation, kind: str | None, profile: Profile, *, full: bool) -> list[Row]:
    """What the checks find out, those of a level until one kills, and without `full` no further level."""
    rows: list[Row] = []
    runner = InProcess(impl, CPU)
    for check in ordered(impl.operation, kind):
        kills = [row.level for row in rows if killed(row)]
        if kills and (not full or check.level in kills):
            continue
        found = run_check(check, runner, profile)
        message = found.verdict.message.partition("; parity run")[0]
        names = {"level": check.level, "check": check.name, "message": message, "repro": ""}
        rows.append(Row.of(found.verdict, impl.name, examples=found.examples, **names))
    return rows


def described(id: str, found: Sequence[Row], seconds: float) -> Row:
    """The row of a model, or of a correct implementation, from those of the checks; passed if it is as it should be."""
    fault = BY_ID.get(id)
    against = (Status.FAILED, Status.ERROR) if fault else (Status.FAILED, Status.ERROR, Status.VACUOUS)
    kills = tuple(row for row in found if killed(row))
    crashes = tuple(
        f"{row.level}/{row.check}: {row.status}: {row.message}"
        for row in found
        if row.status in against and not killed(row)
    )
    outcome = "killed" if kills else "crashed only" if crashes else "survived"
    if fault is None or fault.equivalent:
        outcome = "rejected" if kills or crashes else "accepted"
    good = outcome in ("killed", "accepted")
    op, layout = (fault.op, fault.layout) if fault else CORRECT[id][:2]
    facts = {"outcome": outcome, "sentence": fault.sentence if fault else "a correct implementation"}
    if fault is not None:
        facts |= {"step": fault.step, "half": fault.half, "report": fault.report, "equivalent": fault.equivalent}
    return Row(
        id,
        FAULTS,
        fault.kind if fault else "correct",
        Status.PASSED if good else Status.FAILED,
        examples=sum(row.examples for row in found),
        op=op,
        layout=layout,
        seconds=round(seconds, 2),
        message="" if good else f"the fault model {id} {outcome}: {facts['sentence']}",
        repro="" if good else f"parity mutants {id}",
        kills=kills,
        crashes=crashes,
        facts=facts,
    )


def lost(id: str, message: str) -> Row:
    """The row of a model whose process died."""
    row = described(id, (), 0.0)
    facts = {**row.facts, "outcome": "lost"}
    return replace(row, status=Status.ERROR, message=message, grounds=Grounds.CRASH, facts=facts)


def summary(rows: Iterable[Row]) -> dict[str, Any]:
    """Counts and the verdict of a matrix."""
    rows = list(rows)
    faults = [row for row in rows if row.facts.get("equivalent") == ""]
    others = [row for row in rows if row not in faults]
    found = {
        "models": len(faults),
        "killed": sum(row.facts["outcome"] == "killed" for row in faults),
        "equivalent": sum("equivalent" in row.facts for row in others),
        "correct": sum(row.check == "correct" for row in rows),
        "bad": [row.implementation for row in rows if row.status.counts_against],
        "examples_of_correct": sum(row.examples for row in others),
    }
    for half in "AB":
        mine = [row for row in faults if row.facts["half"] == half]
        found[f"half_{half}"] = {"models": len(mine), "killed": sum(row.facts["outcome"] == "killed" for row in mine)}
    return found

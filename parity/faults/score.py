"""The mutation score: each fault model through the suite until a check rejects it by a value."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from parity.domain.profiles import Profile
from parity.domain.profiles import profile as named_profile
from parity.faults.building import CPU, correct_implementation, implementation
from parity.faults.catalogue import BY_ID
from parity.ops.check import Check, all_checks
from parity.ops.fault import Fault
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import InProcess
from parity.suite.search import Finding, run_check

Row = dict[str, Any]

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
"""Checks that cost seconds a model; they are asked when nothing else has rejected it."""

SHAPE_WORDS = ("result:", "slots:", "positions:", "kv_cache:")
"""How the runner's sentences begin that say a result has the wrong shape, type or device."""


def quick(profile: Profile) -> Profile:
    """The same examples with less time for shrinking: a matrix of minimal cases needs no perfect ones."""
    return replace(
        profile, shrink_seconds=min(2.0, profile.shrink_seconds), reduce_calls=min(120, profile.reduce_calls)
    )


FIRST: dict[str, tuple[str, ...]] = {
    "integers": ("resources/far_pages",),
    "memory": ("resources/memory",),
    "launch": ("layout/long", "layout/exact", "layout/keys", "resources/many_rows"),
    "precision": ("rounding/ordinary", "rounding/extreme", "rounding/pooled"),
    "race": ("invariance/repeat",),
}
"""By kind of fault: the checks that are likeliest to see it."""


def ordered(stage: str, kind: str | None = None) -> list[Check]:
    """The checks of a stage, those first that find most for least."""
    first = FIRST.get(kind or "", ())

    def rank(check: Check) -> int:
        if check.id in first:
            return first.index(check.id) - len(first)
        return LATE.index(check.id) + 1 if check.id in LATE else 0

    return sorted(all_checks(stage=stage), key=rank)


def killed(verdict: Verdict) -> bool:
    """Whether a verdict rejects by what was computed, not by an exception or a wrong shape."""
    if verdict.status is Status.ERROR:
        return "the dispatcher ran" in verdict.message  # the spy on the route, which is evidence and no crash
    return verdict.status is Status.FAILED and not verdict.note.startswith(SHAPE_WORDS)


def score(id: str, profile: Profile | None = None, *, full: bool = False) -> Row:
    """One model's row: which check of which level killed it, after how many examples, and the minimal case.

    `full` goes on to the next level after a kill. Ids of CORRECT name the correct implementations.
    """
    profile = profile or quick(named_profile("ci"))
    if id in CORRECT:
        return _row(id, None, correct_implementation(*CORRECT[id]), profile, full=True)
    fault = BY_ID[id]
    if "compile" in fault.extra:
        from parity.faults.launches import score_compile

        return score_compile(fault)
    return _row(id, fault, implementation(fault), profile, full=full)


def _row(id: str, fault: Fault | None, impl: Implementation, profile: Profile, *, full: bool) -> Row:
    started = time.monotonic()
    kills: list[Row] = []
    crashes: list[str] = []
    asked = 0
    runner = InProcess(impl, CPU)
    for check in ordered(impl.stage, fault.kind if fault else None):
        if kills and (not full or any(kill["level"] == check.level for kill in kills)):
            continue
        finding = run_check(check, runner, profile)
        asked += finding.examples
        if killed(finding.verdict):
            kills.append(_kill(check, finding))
        elif finding.verdict.status in (Status.FAILED, Status.ERROR):
            crashes.append(f"{check.id}: {finding.verdict.message}")
        elif finding.verdict.status is Status.VACUOUS and fault is None:
            crashes.append(f"{check.id}: vacuous: {finding.verdict.message}")
    return described(id, fault, kills, crashes, asked, time.monotonic() - started)


def described(id: str, fault: Fault | None, kills: list[Row], crashes: list[str], examples: int, seconds: float) -> Row:
    """The row as the report has it; JSON types only."""
    outcome = "killed" if kills else "crashed only" if crashes else "survived"
    if fault is None or fault.equivalent:
        outcome = "rejected" if kills or crashes else "accepted"
    return {
        "id": id,
        "step": fault.step if fault else None,
        "kind": fault.kind if fault else None,
        "op": fault.op if fault else CORRECT[id][0],
        "layout": fault.layout if fault else CORRECT[id][1],
        "half": fault.half if fault else None,
        "sentence": fault.sentence if fault else "a correct implementation",
        "report": fault.report if fault else "",
        "equivalent": fault.equivalent if fault else "",
        "outcome": outcome,
        "kills": kills,
        "crashes": crashes,
        "examples": examples,
        "seconds": round(seconds, 2),
    }


def _kill(check: Check, finding: Finding) -> Row:
    return {
        "level": check.level,
        "check": check.name,
        "examples": finding.examples,
        "case": finding.verdict.case,
        "message": finding.verdict.message.partition("; parity run")[0],
    }


BAD = ("survived", "crashed only", "rejected")


def summary(rows: Iterable[Row]) -> Row:
    """Counts and the verdict of a matrix."""
    rows = list(rows)
    faults = [row for row in rows if row["kind"] and not row["equivalent"]]
    dead = [row for row in faults if row["outcome"] == "killed"]
    found = {
        "models": len(faults),
        "killed": len(dead),
        "equivalent": sum(bool(row["equivalent"]) for row in rows),
        "correct": sum(not row["kind"] for row in rows),
        "bad": [row["id"] for row in rows if row["outcome"] in BAD],
        "examples_of_correct": sum(row["examples"] for row in rows if not row["kind"] or row["equivalent"]),
    }
    for half in "AB":
        mine = [row for row in faults if row["half"] == half]
        found[f"half_{half}"] = {"models": len(mine), "killed": sum(row["outcome"] == "killed" for row in mine)}
    return found

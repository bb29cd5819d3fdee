"""Verdicts: what was judged, how it came out and where exactly it went wrong, and how a check's examples add up to one.

The comparators that produce verdicts stand in ``verdict.py`` (logits) and ``selection.py`` (top-k).
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Iterable
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.arithmetic import Grouped

PAGE = 64
RESOLUTION_LIMIT = 2.0**-7
"""Median bound over median |logit| above which a bounded comparison shows nothing: bf16's own spacing."""
UNDECIDED_LIMIT = 0.25
"""Share of the places open under the bound above which a selection verdict shows nothing: a quarter of it could be
anything."""


class Status(enum.StrEnum):
    """The closed list of outcomes."""

    PASSED = "passed"  # judged, nothing wrong
    FAILED = "failed"  # judged, wrong
    VACUOUS = "vacuous"  # nothing wrong, but the data could not have shown a fault
    UNSUPPORTED = "unsupported"  # the contract or the hardware lacks what the check needs
    NOT_RUN = "not run"  # left out for a named reason
    ERROR = "error"  # a crash, a time-out or a refused call

    @property
    def counts_against(self) -> bool:
        """Whether a gate that sees it must exit 1."""
        return self in (Status.FAILED, Status.VACUOUS, Status.ERROR)

    @property
    def judged(self) -> bool:
        """Whether the implementation was asked and its answer looked at."""
        return self in (Status.PASSED, Status.FAILED, Status.VACUOUS)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One judgement.

    message     one line: coordinates, got, wanted, bound, ratio, first bad stage, repro, in this order; empty when
                passed
    ratio       worst |error| / bound (inf where the bound is zero and the error is not; None: no bound was used)
    resolution  median bound / median |logit| of what was judged (None: no bound was used)
    undecided   share of the selected places that the bound leaves open (None: no selection was judged)
    cells       elements judged (0: the example was empty)
    where       request, row (of the whole case), draft (row within the request), key, logical_page, physical_page, slot
    note        a reservation that a reader must see, such as a dot judged by a coarse bound
    """

    status: Status
    level: str = ""
    check: str = ""
    message: str = ""
    ratio: float | None = None
    resolution: float | None = None
    undecided: float | None = None
    cells: int = 0
    where: dict[str, int] = dataclasses.field(default_factory=dict)
    got: float | int | str | None = None
    wanted: float | int | str | None = None
    bound: float | None = None
    case: str = ""
    repro: str = ""
    stage: str = ""
    note: str = ""

    @property
    def passed(self) -> bool:
        return self.status is Status.PASSED

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**dataclasses.asdict(self), "status": str(self.status)}

    def with_stage(self, stage: str) -> Verdict:
        """The same failure with its first bad stage named, in the message too."""
        return dataclasses.replace(self, stage=stage, message=_message(dataclasses.replace(self, stage=stage)))


@dataclasses.dataclass(frozen=True)
class Labels:
    """What a comparator writes on its verdict beside its findings."""

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
        """A failure, its message composed from the fields; ``message`` may say what coordinates and numbers cannot."""
        verdict = self.verdict(Status.FAILED, **fields)
        return dataclasses.replace(verdict, message=_message(verdict))


def coordinates(row: int, key: int | None, context_lens: torch.Tensor, block_table: torch.Tensor) -> dict[str, int]:
    """Where a cell of the logits lives. ``context_lens`` [B, next_n], ``block_table`` [B, max_pages]."""
    next_n = context_lens.shape[1]
    where = {"request": row // next_n, "row": row, "draft": row % next_n}
    if key is not None:
        page = key // PAGE
        where |= {"key": key, "logical_page": page}
        if page < block_table.shape[1]:
            physical = int(block_table[row // next_n, page])
            where |= {"physical_page": physical, "slot": physical * PAGE + key % PAGE}
    return where


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
    if verdict.note:
        parts.append(verdict.note)
    if verdict.stage:
        parts.append(f"first bad stage: {verdict.stage}")
    if verdict.repro:
        parts.append(verdict.repro)
    return "; ".join(parts)


def merge(verdicts: Iterable[Verdict], contract: Contract | None = None) -> Verdict:
    """One verdict for all examples of a check; NOT_RUN when there are none.

    The first failure or error decides. Otherwise whether the check was vacuous is asked of all examples together: no
    element was
    judged anywhere, or the median resolution or the median undecided share is past its limit. A coarse resolution is
    forgiven, and
    noted, only where a grouped arithmetic has no verified model and the check also passed on exact data (examples with
    elements
    but no bound)."""
    examples = list(verdicts)
    if not examples:
        return Verdict(Status.NOT_RUN, message="no example was drawn")
    judged = [verdict for verdict in examples if verdict.status.judged]
    resolutions = [v.resolution for v in judged if v.resolution is not None and v.cells]
    shares = [v.undecided for v in judged if v.undecided is not None and v.cells]
    ratios = [v.ratio for v in judged if v.ratio is not None]
    summary: dict[str, Any] = {
        "ratio": max(ratios, default=None),
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
    reason, note = _vacuous(base, any(v.resolution is None and v.cells for v in judged), contract)
    if left := [verdict for verdict in examples if verdict.status is Status.NOT_RUN]:
        note = "; ".join(filter(None, [note, f"{len(left)} of {len(examples)} examples not run: {left[0].message}"]))
    if reason:
        return dataclasses.replace(base, status=Status.VACUOUS, message=f"{reason}, over {len(judged)} examples")
    return dataclasses.replace(base, note=note)


def _vacuous(check: Verdict, saw_exact: bool, contract: Contract | None) -> tuple[str, str]:
    """(why the check shows nothing, or "" ; a note if it shows less than usual)."""
    if not check.cells:
        return "no element was judged", ""
    if check.resolution is not None and check.resolution > RESOLUTION_LIMIT:
        text = f"resolution {check.resolution:.2g} is coarser than {RESOLUTION_LIMIT:.2g}"
        coarse = contract is not None and isinstance(contract.arithmetic, Grouped) and not contract.dot_verified
        if not (coarse and saw_exact):
            return text, ""
        assert contract is not None
        return "", f"{text} ({contract.describe_dot()}): judged by that bound together with exact data"
    if check.undecided is not None and check.undecided > UNDECIDED_LIMIT:
        return f"{check.undecided:.0%} of the places are open under the bound (limit {UNDECIDED_LIMIT:.0%})", ""
    return "", ""

"""Verdicts: what was judged, how it came out, and where exactly it went wrong. (Comparators follow.)"""

from __future__ import annotations

import dataclasses
import enum


class Status(enum.StrEnum):
    """The closed list of outcomes. ``failed``, ``vacuous`` and ``error`` count against an implementation."""

    PASSED = "passed"  # judged, nothing wrong
    FAILED = "failed"  # judged, wrong
    VACUOUS = "vacuous"  # nothing wrong, but the data could not have shown a fault
    UNSUPPORTED = "unsupported"  # the contract or the hardware lacks what the check needs
    NOT_RUN = "not run"  # left out for a named reason
    ERROR = "error"  # a crash, a time-out or a refused call

    @property
    def counts_against(self) -> bool:
        return self in (Status.FAILED, Status.VACUOUS, Status.ERROR)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One judgement. ``where`` has request, row, key, page (logical, physical) and slot; numbers are plain floats.

    ratio       worst |error| / bound; 0 or inf when the bound is zero
    resolution  median bound / median |logit| of what was judged (None: no bound was used)
    undecided   share of selected places that the bound leaves open (None: no selection was judged)
    cells       how many elements were judged (0: the example was empty)
    """

    status: Status
    level: str = ""
    check: str = ""
    message: str = ""
    ratio: float | None = None
    resolution: float | None = None
    undecided: float | None = None
    cells: int = 0
    where: dict[str, object] = dataclasses.field(default_factory=dict)
    got: float | int | str | None = None
    wanted: float | int | str | None = None
    bound: float | None = None
    case: str = ""
    repro: str = ""
    stage: str = ""
    note: str = ""

"""What every room calls things: levels, statuses, grounds of a rejection, exit codes, profiles. Imports nothing."""

from __future__ import annotations

import enum

LEVELS = ("layout", "rounding", "bits", "selection", "invariance", "semantics", "resources")
"""The levels of the suite, in the order of their questions."""
COVERAGE, GOLDEN, FAULTS = "coverage", "golden", "faults"
"""Levels that a gate adds: what the suite did not look at, its golden tensors, and the fault models that it must
reject."""
REPORTED = (*LEVELS, COVERAGE, GOLDEN, FAULTS)
"""Levels in the order of a report."""
REFERENCE, SUITE = "reference", "suite"
"""Who a golden's own rows belong to, and who the rows of the framework itself."""


class Status(enum.StrEnum):
    """The closed list of outcomes."""

    PASSED = "passed"  # judged, nothing wrong
    FAILED = "failed"  # judged, wrong
    VACUOUS = "vacuous"  # nothing wrong, but the data could not have shown a fault
    INCOMPLETE = "incomplete"  # nothing wrong, but parts of the domain that were promised were not judged
    UNSUPPORTED = "unsupported"  # the contract or the hardware lacks what the check needs
    NOT_RUN = "not run"  # left out for a named reason
    ERROR = "error"  # a crash, a time-out or a refused call

    @property
    def counts_against(self) -> bool:
        """Whether a gate that sees it must exit 1."""
        return self in (Status.FAILED, Status.VACUOUS, Status.INCOMPLETE, Status.ERROR)

    @property
    def judged(self) -> bool:
        """Whether the implementation was called and its answer compared."""
        return self in (Status.PASSED, Status.FAILED, Status.VACUOUS)


SEVERITY = (
    *(Status.ERROR, Status.FAILED, Status.VACUOUS, Status.INCOMPLETE),
    *(Status.NOT_RUN, Status.UNSUPPORTED, Status.PASSED),
)
"""Worst first: the order in which rejections are shown."""
PRECEDENCE = (
    *(Status.ERROR, Status.FAILED, Status.VACUOUS, Status.INCOMPLETE, Status.PASSED),
    *(Status.NOT_RUN, Status.UNSUPPORTED),
)
"""Which status stands for several: a rejection wins, then what was judged over what was not."""


class Grounds(enum.StrEnum):
    """What a rejection rests on."""

    VALUES = "values"  # what was computed, read or written is wrong
    FORM = "form"  # the result has a wrong shape, type or device, so that nothing was computed that could be judged
    CRASH = "crash"  # an exception, a time-out, or a process that died
    ROUTE = "route"  # the dispatcher took another path than the one that was chosen

    @property
    def evidence(self) -> bool:
        """Whether the suite saw the fault itself, and not merely that the call broke down."""
        return self in (Grounds.VALUES, Grounds.ROUTE)


class TooLarge(ValueError):
    """A case that this machine has not the memory or the addresses for; the message is one sentence with the figure."""


PASSED, FAILED, USAGE = 0, 1, 2
"""Exit codes of every command: passed; parity failed; usage, environment, or nothing judged."""

PROFILES: dict[str, dict[str, int | float | bool]] = {
    "smoke": {"examples": 24, "shrink_seconds": 5.0, "reduce_calls": 100, "case_seconds": 30.0}
    | {"large": False, "far": False},
    "ci": {"examples": 210, "shrink_seconds": 12.0, "reduce_calls": 300, "case_seconds": 60.0},
    "nightly": {"examples": 2100, "shrink_seconds": 60.0, "reduce_calls": 2000, "case_seconds": 120.0}
    | {"derandomised": False, "database": True},
    "debug": {"examples": 40, "shrink_seconds": 30.0, "reduce_calls": 1000, "case_seconds": 600.0, "verbose": True},
}
"""How much each profile draws; `parity.domain.profiles.Profile` explains the numbers."""
DEVICES = ("auto", "cpu", "cuda")
ARITHMETIC = ("auto", "bound")
"""How dots are judged: by a verified model where there is one, or by the proved bound only."""

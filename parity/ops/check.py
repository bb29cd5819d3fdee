"""What a check is, and how one case is judged by it. Nothing here needs pytest."""

import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from parity.domain.profiles import Profile
from parity.results import Labels, Verdict
from parity.run.implementation import Implementation
from parity.run.operation import Operation
from parity.run.runner import Outcome, Runner
from parity.vocabulary import LEVELS, Grounds, Status

LEAST = 6
"""Examples of a check whatever the profile or the time: the first one is the emptiest there is."""


@dataclass(frozen=True)
class Check:
    """One question to an implementation.

    level, name   where it stands in the report
    strategy      (implementation, profile, device) -> Hypothesis strategy of cases
    judge         (runner, case) -> Verdict; stops at the first fault
    share         part of the level's examples, relative to the other checks of the level
    accepts       whether a case that came from elsewhere can be judged by this check
    needs         (implementation, device) -> the reason why it cannot be run, or None
    shrinks       whether a failure is worth shrinking (not where the shape itself is the question)
    listed        whether, for an implementation, the strategy is a short list of cases
    """

    level: str
    name: str
    strategy: Callable[[Implementation, Profile, torch.device], SearchStrategy[Any]]
    judge: Callable[[Runner, Any], Verdict]
    share: float = 1.0
    accepts: Callable[[Any], bool] = lambda case: True
    needs: Callable[[Implementation, torch.device], str | None] = lambda impl, device: None
    shrinks: bool = True
    listed: Callable[[Implementation], bool] = lambda impl: False

    def share_of(self, impl: Implementation, device: torch.device) -> float:
        """Its part of the level's examples; 0 where its strategy lists a few cases, or where it cannot be run."""
        return 0.0 if self.listed(impl) or self.needs(impl, device) else self.share

    def weight(self, impl: Implementation, device: torch.device) -> float:
        """Its part of a time budget, relative to other checks; listed cases need some too."""
        return max(self.share_of(impl, device), 0.2)

    @property
    def id(self) -> str:
        """`level/name`, as reports write it."""
        return f"{self.level}/{self.name}"


def checks_of(operation: Operation, levels: Iterable[str] = LEVELS) -> list[Check]:
    """The checks of an operation, in the order of the levels; ValueError for an unknown level."""
    found: list[Check] = []
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
        found += [check for check in operation.checks() if check.level == level]
    return found


def fitted(impl: Implementation, case: Any) -> Any:
    """The case within what an implementation's contract accepts."""
    return impl.operation.domain().fit(case, impl.contract)


def find_check(name: str, operation: Operation) -> Check:
    """The check of an operation called `level/name` or `level.name`; ValueError lists all."""
    known = {check.id: check for check in checks_of(operation)}
    if name.replace(".", "/") not in known:
        raise ValueError(f"check: expected one of {', '.join(known)}, got {name!r}")
    return known[name.replace(".", "/")]


def examples_of(check: Check, total: int, impl: Implementation, device: torch.device) -> int | None:
    """How many of a level's examples one check has to judge; None: every case that its strategy lists."""
    share = check.share_of(impl, device)
    if not share:
        return None
    shares = sum(other.share_of(impl, device) for other in checks_of(impl.operation, [check.level]))
    return max(LEAST, math.ceil(total * share / shares))


def judge_one(check: Check, runner: Runner, case: Any) -> Verdict | None:
    """One check on one case from elsewhere; None if the check does not take such a case, not run if it cannot here."""
    if case.op != runner.impl.op or not check.accepts(case):
        return None
    reason = runner.impl.absent or check.needs(runner.impl, runner.device)
    if reason:
        return Verdict(Status.NOT_RUN, check.level, check.name, message=reason, case=str(case))
    return check.judge(runner, case)


def judge_case(runner: Runner, case: Any, checks: Iterable[Check] | None = None) -> list[Verdict]:
    """Every verdict on one case: of all checks that take it, or of those given."""
    found = (judge_one(check, runner, case) for check in (checks or checks_of(runner.impl.operation)))
    return [verdict for verdict in found if verdict is not None]


# ------------------------------------------------------------------------------------------------ parts of a judgement


def repro_arguments(impl: Implementation) -> str:
    """What follows `--impl` in a repro line: the implementation with the options that it was chosen by."""
    return shlex.join(impl.arguments[1:]) if impl.arguments else shlex.quote(impl.name)


def labels(runner: Runner, check: str, case: Any) -> Labels:
    """The labels that comparators write on verdicts; `check` is `level/name`."""
    level, _, name = check.partition("/")
    return Labels(level=level, check=name, case=str(case), impl=repro_arguments(runner.impl))


def named(runner: Runner, check: str) -> dict[str, Any]:
    """The keyword arguments by which comparators take those labels."""
    level, _, name = check.partition("/")
    return {"impl": repro_arguments(runner.impl), "level": level, "check": name}


def failed_call(runner: Runner, check: str, case: Any, outcome: Outcome) -> Verdict | None:
    """The verdict on a call that gave nothing to judge, or None."""
    made = labels(runner, check, case)
    if outcome.error is not None:
        grounds = Grounds(outcome.grounds or Grounds.CRASH)
        return made.verdict(Status.ERROR, message=f"{outcome.error}; {made.repro}", grounds=grounds)
    if outcome.defect is not None:
        return made.failed(note=outcome.defect, grounds=Grounds(outcome.grounds or Grounds.VALUES))
    if outcome.unsupported is not None:
        return replace(made.verdict(Status.UNSUPPORTED), message=outcome.unsupported)
    return None


def verdict(runner: Runner, check: str, case: Any, status: Status, message: str = "", **fields: Any) -> Verdict:
    """A verdict that no comparator made: its message is the given sentence and the repro line."""
    made = labels(runner, check, case)
    text = f"{message}; {made.repro}" if message and status is not Status.PASSED else message
    return replace(made.verdict(status, **fields), message=text)

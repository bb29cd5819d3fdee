"""What a check is, and how one case is asked and judged. Nothing here needs pytest."""

import importlib
import math
import shlex
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis.strategies import SearchStrategy

from parity.domain.profiles import Profile
from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.ops.paged_logits.case import Case
from parity.results import Labels, Status, Verdict
from parity.run.registry import Implementation
from parity.run.runner import Outcome, Runner

LEVELS = ("layout", "rounding", "bits", "selection", "invariance", "semantics", "resources")

MODULES = (
    *(f"paged_logits.checks.{level}" for level in LEVELS if level != "semantics"),
    "store.semantics",
    "store.checks",
    "compressor.checks",
)

ORACLE_PRODUCTS = {"cpu": 2.5e8, "cuda": 4.0e9}
"""Products of the float64 evaluation that one case may cost; beyond it rows are sampled."""


LEAST = 6
"""Examples of a check whatever the profile or the time: the first one is the emptiest there is."""


@dataclass(frozen=True)
class Check:
    """One question to an implementation.

    level, name   where it stands in the report
    stages        the stages that it applies to
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
    stages: tuple[str, ...]
    strategy: Callable[[Implementation, Profile, torch.device], SearchStrategy[Case]]
    judge: Callable[[Runner, Case], Verdict]
    share: float = 1.0
    accepts: Callable[[Case], bool] = lambda case: True
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


def all_checks(*, levels: Iterable[str] = LEVELS, stage: str | None = None) -> list[Check]:
    """Every check of the levels, in order; those of one stage if it is given."""
    found: list[Check] = []
    for level in levels:
        if level not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {level!r}")
        for module in MODULES:
            checks = importlib.import_module(f"parity.ops.{module}").CHECKS
            found += [check for check in checks if check.level == level]
    return [check for check in found if stage is None or stage in check.stages]


def find_check(name: str, stage: str = "logits") -> Check:
    """The check of a stage called `level/name` or `level.name`, else another stage's; ValueError lists all."""
    known = {check.id: check for check in [*all_checks(), *all_checks(stage=stage)]}
    if name.replace(".", "/") not in known:
        raise ValueError(f"check: expected one of {', '.join(known)}, got {name!r}")
    return known[name.replace(".", "/")]


def examples_of(check: Check, total: int, impl: Implementation, device: torch.device) -> int | None:
    """How many of a level's examples one check has to judge; None: every case that its strategy lists."""
    share = check.share_of(impl, device)
    if not share:
        return None
    shares = sum(other.share_of(impl, device) for other in all_checks(levels=[check.level], stage=impl.stage))
    return max(LEAST, math.ceil(total * share / shares))


def judge_one(check: Check, runner: Runner, case: Case) -> Verdict | None:
    """One check on one case from elsewhere; None if the check does not take such a case, not run if it cannot here."""
    if runner.impl.stage not in check.stages or case.stage != runner.impl.stage or not check.accepts(case):
        return None
    reason = runner.impl.absent or check.needs(runner.impl, runner.device)
    if reason:
        return Verdict(Status.NOT_RUN, check.level, check.name, message=reason, case=str(case))
    return check.judge(runner, case)


def judge_case(runner: Runner, case: Case, checks: Iterable[Check] | None = None) -> list[Verdict]:
    """Every verdict on one case: of all checks that take it, or of those given."""
    found = (judge_one(check, runner, case) for check in (checks or all_checks(stage=case.stage)))
    return [verdict for verdict in found if verdict is not None]


# ------------------------------------------------------------------------------------------------ parts of a judgement


def said(impl: Implementation) -> str:
    """What follows `--impl` in a repro line: the implementation with the options that it was chosen by."""
    return shlex.join(impl.arguments[1:]) if impl.arguments else shlex.quote(impl.name)


def labels(runner: Runner, check: str, case: Case) -> Labels:
    """The labels that comparators write on verdicts; `check` is `level/name`."""
    level, _, name = check.partition("/")
    return Labels(level=level, check=name, case=str(case), impl=said(runner.impl))


def named(runner: Runner, check: str) -> dict[str, Any]:
    """The keyword arguments by which comparators take those labels."""
    level, _, name = check.partition("/")
    return {"impl": said(runner.impl), "level": level, "check": name}


def complaint(runner: Runner, check: str, case: Case, outcome: Outcome) -> Verdict | None:
    """The verdict on a call that gave nothing to judge, or None."""
    made = labels(runner, check, case)
    if outcome.error is not None:
        return replace(made.verdict(Status.ERROR), message=f"{outcome.error}; {made.repro}")
    if outcome.defect is not None:
        return made.failed(note=outcome.defect)
    if outcome.unsupported is not None:
        return replace(made.verdict(Status.UNSUPPORTED), message=outcome.unsupported)
    return None


def verdict(runner: Runner, check: str, case: Case, status: Status, message: str = "", **fields: Any) -> Verdict:
    """A verdict that no comparator made: its message is the given sentence and the repro line."""
    made = labels(runner, check, case)
    text = f"{message}; {made.repro}" if message and status is not Status.PASSED else message
    return replace(made.verdict(status, **fields), message=text)


def sampled_rows(case: Case, device: torch.device) -> torch.Tensor | None:
    """Rows for the float64 evaluation: None (all) where that is cheap, else ends, page borders and a seeded draw."""
    lengths = [length for request in case.lengths for length in request]
    # A row costs something even without keys.
    cost = 128.0 * case.heads * (max(lengths, default=0) + 64)
    keep = max(4, int(ORACLE_PRODUCTS[device.type] / cost))
    if keep >= len(lengths):
        return None
    borders = [row for row, length in enumerate(lengths) if length % 64 in (0, 1, 63)]
    generator = torch.Generator().manual_seed(case.seed)
    drawn = torch.randperm(len(lengths), generator=generator)[:keep].tolist()
    chosen = {0, len(lengths) - 1, *borders[:2], *borders[-2:], *drawn}
    return torch.tensor(sorted(chosen), dtype=torch.int64, device=device)


def oracle(outcome: Outcome, runner: Runner, case: Case) -> tuple[Any, bool]:
    """(expected, exact): the exact logits of the sampled rows, with bound zero where the data are exact."""
    rows = sampled_rows(case, runner.device)
    operands, contract = outcome.operands, runner.impl.contract
    if is_exact_data(operands, contract, rows):
        return exact_expected(operands, contract, rows), True
    return expected(operands, contract, rows), False

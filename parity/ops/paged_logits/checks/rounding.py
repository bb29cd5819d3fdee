"""Level rounding: every logit within the proved bound of its contract, non-finite operands by class, and the alarm."""

import torch
from hypothesis import strategies as st

from parity.domain.contract import Contract
from parity.domain.profiles import Profile
from parity.numerics.arithmetic import Grouped
from parity.ops.check import Check, failed_call, named
from parity.ops.paged_logits import shapes
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.checks.layout import EXACT, judge_exact, judge_output
from parity.ops.paged_logits.judge import compare_nonfinite
from parity.ops.paged_logits.oracle import oracle
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Runner

ORDINARY = ("octaves", "outliers", "fp4_grid")
TIES = ("near_ties",)
EXTREME = ("negative", "zeros", "saturating", "needle", "subnormal")


def coarse(contract: Contract) -> bool:
    """Whether the dot's bound is too coarse to stand by itself: a grouped arithmetic that is not verified here."""
    return isinstance(contract.arithmetic, Grouped) and not contract.dot_verified


def data_for(contract: Contract, *data: str) -> tuple[str, ...]:
    """The classes that a contract allows; with exact data in every third place where the bound is coarse."""
    kept = tuple(name for name in data if not (name == "subnormal" and contract.flush_to_zero))
    if coarse(contract):
        return tuple(name for each in kept for name in (each, each, "exact_wide"))
    return kept


def _bounded(name: str, share: float, *data: str) -> Check:
    def strategy(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
        return shapes.drawn(impl, profile, device, data_for(impl.contract, *data))

    def judge(runner: Runner, case: Case) -> Verdict:
        return judge_exact(runner, case, f"rounding/{name}")

    return Check("rounding", name, strategy, judge, share, lambda case: case.data in (*data, *EXACT))


def judge_nonfinite(runner: Runner, case: Case) -> Verdict:
    """NaN and infinities of readable slots show in the logits, by class; the finite logits stay within the bound."""
    check = "rounding/nonfinite"
    outcome = runner.run(case)
    bad = failed_call(runner, check, case, outcome)
    if bad is not None:
        return bad
    wanted, _ = oracle(outcome, runner, case)
    found = compare_nonfinite(
        outcome.output, wanted, outcome.operands, contract=runner.impl.contract, **named(runner, check)
    )
    if found.status is not Status.PASSED:
        return found
    return judge_output(runner, case, check, outcome)


def _nonfinite(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    return shapes.drawn(impl, profile, device, data_for(impl.contract, "nonfinite"))


def judge_alarm(runner: Runner, case: Case) -> Verdict:
    """The statistical alarm: in all of 20 fresh cases the error is over four times that of an honest emulator."""
    from dataclasses import replace

    from parity.numerics import alarm

    check = "rounding/alarm"
    meter = alarm.Alarm()
    for step in range(alarm.CASES):
        fresh = replace(case, seed=case.seed + step)
        outcome = runner.run(fresh)
        bad = failed_call(runner, check, fresh, outcome)
        if bad is not None:
            return bad
        meter.add(outcome.output, outcome.operands, runner.impl.contract)
        if not meter.possible:
            break
    return meter.verdict(case=case, **named(runner, check))


def _alarming(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    return shapes.small(impl, profile, ("octaves",), min_length=64)


def _long(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Long rows; with exact data too where the bound by itself would be too coarse to see anything."""
    data = ("octaves", "exact_wide") if coarse(impl.contract) else ("octaves",)
    return st.one_of(*(shapes.long_rows(impl, device, each) for each in data))


CHECKS = [
    _bounded("ordinary", 4.0, *ORDINARY),
    _bounded("near_ties", 1.0, *TIES),
    _bounded("extreme", 3.0, *EXTREME),
    Check(
        "rounding",
        "nonfinite",
        _nonfinite,
        judge_nonfinite,
        2.0,
        lambda case: case.data == "nonfinite",
    ),
    Check("rounding", "alarm", _alarming, judge_alarm, 1.0, lambda case: case.data == "octaves"),
    Check(
        "rounding",
        "long",
        _long,
        lambda runner, case: judge_exact(runner, case, "rounding/long"),
        0.0,
        lambda case: case.data in ("octaves", *EXACT),
        listed=lambda impl: True,
    ),
]

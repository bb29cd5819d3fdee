"""Level layout: every byte from and to the right place, with no tolerance, on data that any order sums exactly."""

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, named
from parity.ops.paged_logits import shapes
from parity.ops.paged_logits.case import STRIDES, Case
from parity.ops.paged_logits.judge import compare_bounded, compare_exact, compare_tail
from parity.ops.paged_logits.oracle import oracle
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

EXACT = ("exact", "exact_wide")


def judge_exact(runner: Runner, case: Case, check: str) -> Verdict:
    """Every visible cell equals the exact integer, every cell past a row's length is -inf, nothing else was touched."""
    outcome = runner.run(case)
    return failed_call(runner, check, case, outcome) or judge_output(runner, case, check, outcome)


def judge_output(runner: Runner, case: Case, check: str, outcome: Outcome) -> Verdict:
    """The comparison of a call that gave a result: tail first, then values, exact where the data allow it."""
    words = named(runner, check)
    tail = compare_tail(outcome.output, outcome.operands, runner.impl.contract, **words)
    if tail.status is Status.FAILED:
        return tail
    wanted, exact = oracle(outcome, runner, case)
    if exact:
        found = compare_exact(outcome.output, wanted, outcome.operands, **words)
    else:
        found = compare_bounded(outcome.output, wanted, outcome.operands, contract=runner.impl.contract, **words)
    return found if found.cells or not tail.cells else tail


def _check(name: str, share: float, strategy, *, listed: bool = False) -> Check:
    def judge(runner: Runner, case: Case) -> Verdict:
        return judge_exact(runner, case, f"layout/{name}")

    return Check("layout", name, strategy, judge, share, _exact, listed=lambda impl: listed)


def _exact(case: Case) -> bool:
    return case.data in EXACT


def _drawn(*data: str, **options):
    def strategy(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
        return shapes.drawn(impl, profile, device, data, **options)

    return strategy


def _strided(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Operands as views with gaps; every case has one at least."""
    plain = shapes.small(impl, profile, EXACT, strides=STRIDES)
    return plain.filter(lambda case: bool(case.strides) or case.gap > 0)


CHECKS = [
    _check("exact", 4.0, _drawn("exact")),
    _check("exact_wide", 2.0, _drawn("exact_wide")),
    _check("poisoned", 2.0, _drawn("exact", poisons=("nan", "huge", "canary"), tails=("huge", "canary"))),
    _check("strided", 2.0, _strided),
    _check("borders", 0.0, shapes.borders, listed=True),
    _check("long", 0.0, lambda impl, profile, device: shapes.long_rows(impl, device, "exact"), listed=True),
]

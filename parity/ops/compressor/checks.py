"""The checks of compressor functions: however a prompt is split into calls, the same keys are pooled at the same calls.

layout      on data where every weight is a power of two or zero: the right tokens, bit for bit, after each call
rounding    on random scores: every pooled value within the bound that parity.ops.compressor.judge derives
invariance  the same script again gives the same bits; other leftovers in the state change nothing
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, labels, verdict
from parity.ops.compressor.case import POISONS, CompressorCase
from parity.ops.compressor.judge import judge_compressor
from parity.ops.compressor.strategies import compressor_cases
from parity.ops.shared.history import History
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

REPEATS = {"cpu": 2, "cuda": 20}


def judge_script(runner: Runner, case: Any, check: str) -> Verdict:
    """All calls of one case."""
    outcome = runner.run(case)
    bad = failed_call(runner, check, case, outcome)
    return bad or judge_compressor(outcome.output, outcome.operands, labels(runner, check, case))


def judge_repeats(runner: Runner, case: Any, check: str) -> Verdict:
    """The same script again on the same state."""
    outcome = runner.run(case, repeats=REPEATS[runner.device.type])
    bad = failed_call(runner, check, case, outcome)
    if bad is not None:
        return bad
    if outcome.differing is not None:
        return verdict(runner, check, case, Status.FAILED, f"run {outcome.differing[0] + 1} gave other bits")
    return judge_compressor(outcome.output, outcome.operands, labels(runner, check, case))


def judge_leftovers(runner: Runner, case: Any, check: str) -> Verdict:
    """Other contents of the state before the first call: the same bits."""
    other = replace(case, poison=POISONS[1 - POISONS.index(case.poison)])
    first, second = runner.run(case), runner.run(other)
    for each, outcome in ((case, first), (other, second)):
        bad = failed_call(runner, check, each, outcome)
        if bad is not None:
            return bad
    for at, (one, two) in enumerate(zip(first.output, second.output, strict=True)):
        mine, theirs = one[0][one[1]], two[0][two[1]]
        if not torch.equal(one[1], two[1]) or not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)):
            return verdict(runner, check, case, Status.FAILED, f"call {at} gives other bits than with {other}")
    return verdict(runner, check, case, Status.PASSED, cells=sum(int(x[1].sum()) for x in first.output))


def _judged(runner: Runner, case: CompressorCase, check: str, outcome: Outcome) -> Verdict:
    return judge_compressor(outcome.output, outcome.operands, labels(runner, check, case))


def _bases(impl: Implementation) -> list[CompressorCase]:
    mixed = (((0, 5, 0),), ((0, 3, 1), (1, 7, 0)), ((1, 1, 0), (0, 9, 0)))
    return [CompressorCase(calls=mixed, seed=4), CompressorCase(calls=mixed[:2], data="random", seed=7, perm=1)]


def _relatives(impl: Implementation, case: CompressorCase) -> list[CompressorCase]:
    """A long prompt in one call beside others, one token, token by token, and one call of the case after the other."""
    return [
        replace(case, calls=(((0, 70, 0), (1, 9, 0), (2, 21, 0)), ((2, 4, 1),))),
        replace(case, calls=(((0, 1, 0),),)),
        replace(case, calls=(((0, 1, 0),),) * 9),
        replace(case, calls=(((0, 8, 0),), ((1, 8, 0),), ((0, 4, 0), (1, 4, 0)))),
    ]


def _short(case: Any) -> bool:
    return isinstance(case, CompressorCase) and sum(count for call in case.calls for _, count, _ in call) <= 200


def _check(
    level: str,
    name: str,
    share: float,
    data: tuple[str, ...],
    judge: Callable[[Runner, Any, str], Verdict] = judge_script,
) -> Check:
    def strategy(impl: Implementation, profile: Profile, device: torch.device) -> Any:
        return compressor_cases(data=data)

    def accepts(case: Any) -> bool:
        return isinstance(case, CompressorCase) and case.data in data

    def judged(runner: Runner, case: Any) -> Verdict:
        return judge(runner, case, f"{level}/{name}")

    return Check(level, name, strategy, judged, share, accepts)


CHECKS = [
    _check("layout", "chunks", 4.0, ("exact",)),
    _check("rounding", "pooled", 2.0, ("random",)),
    _check("invariance", "repeat", 1.0, ("exact", "random"), judge_repeats),
    _check("invariance", "leftovers", 1.0, ("exact", "random"), judge_leftovers),
    *History(bases=_bases, relatives=_relatives, judge=_judged, accepts=_short).checks(),
]

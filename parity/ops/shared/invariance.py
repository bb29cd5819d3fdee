"""Level invariance over a block table: the same result when it must not change, judged on pairs of cases with the same
logical values.

Run again, move or copy pages, change what may not be read: the same bits on all data. Other rows in the batch, another
width of table or result: the same bits on exact data, and on all data where the contract says `batch_invariant`;
otherwise both results have to be correct by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, fitted, verdict
from parity.ops.shared import metamorphic
from parity.ops.shared.metamorphic import Pair
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

REPEATS = {"cpu": 2, "cuda": 20}

Transform = Callable[[Any], Pair]
Strategy = Callable[[Implementation, Profile, torch.device], st.SearchStrategy[Any]]


@dataclass(frozen=True)
class Paged:
    """What an operation over a block table answers for these checks.

    strides      operands that may be views with gaps
    exact        whether a case's data are exact in any order
    judge        (runner, case, check, outcome) -> Verdict on one result by itself
    agree        (runner, check, case, first outcome, other outcome, rows, what the other is) -> Verdict: row i of the
                 other result repeats row rows[i] of the first, bit for bit
    complete     whether, on a case, everything that `agree` does not compare is specified too
    moves_pages  transforms whose result must be the same bits on all data, chosen by the case's seed
    drawn        strategy of cases; company: of cases with at least two rows
    """

    strides: Sequence[str]
    exact: Callable[[Any], bool]
    judge: Callable[[Runner, Any, str, Outcome], Verdict]
    agree: Callable[[Runner, str, Any, Outcome, Outcome, tuple[int, ...], str], Verdict]
    complete: Callable[[Any], bool]
    moves_pages: tuple[Transform, ...]
    drawn: Strategy
    company: Strategy

    def checks(self) -> list[Check]:
        """The checks of the level."""

        def strided(case: Any) -> Pair:
            return metamorphic.other_strides(case, tuple(n for n in self.strides if n not in case.strides))

        pairs: dict[str, tuple[Transform, bool]] = {
            "pages": (_seeded(self.moves_pages), True),
            "poison": (_seeded((metamorphic.other_poison, metamorphic.other_tail)), True),
            "rows": (_seeded((metamorphic.permute_requests, _keep_half, _keep_last, metamorphic.expand_rows)), False),
            "width": (_seeded((metamorphic.widen_table, metamorphic.other_max_len)), False),
            "strides": (strided, True),
        }
        repeat = Check("invariance", "repeat", self.drawn, self.judge_repeat)
        return [repeat, *(self._pair(name, transform, always) for name, (transform, always) in pairs.items())]

    def _pair(self, name: str, transform: Transform, always: bool) -> Check:
        """always: the bits must agree on all data."""
        return Check(
            "invariance",
            name,
            self.company if name == "rows" else self.drawn,
            lambda runner, case: self.judge_pair(runner, case, f"invariance/{name}", transform, always),
            2.0 if name in ("pages", "rows") else 1.0,
            (lambda case: case.rows > 0) if name == "rows" else (lambda case: True),
        )

    def judge_repeat(self, runner: Runner, case: Any) -> Verdict:
        """The same operands again and again: the same bits every time."""
        check = "invariance/repeat"
        outcome = runner.run(case, repeats=REPEATS[runner.device.type])
        bad = failed_call(runner, check, case, outcome)
        if bad is not None:
            return bad
        if outcome.differing is None:
            cells = sum(length for request in case.lengths for length in request)
            return verdict(runner, check, case, Status.PASSED, cells=cells)
        run, again = outcome.differing
        broken = runner.impl.operation.inspect(again, outcome.operands)
        if broken is not None:
            return verdict(
                runner, check, case, Status.FAILED, f"run {run + 1} returned another kind of result: {broken}"
            )
        other = replace(outcome, output=again)
        found = self.agree(runner, check, case, outcome, other, tuple(range(case.rows)), f"run {run + 1}")
        if found.status is Status.FAILED or not self.complete(case):
            return found
        text = f"run {run + 1} differs from the first past a context length"
        return verdict(runner, check, case, Status.FAILED, text)

    def judge_pair(self, runner: Runner, case: Any, check: str, transform: Transform, always: bool) -> Verdict:
        """The case and its transform: bitwise where that is promised, else the transform's result by itself."""
        pair = transform(case)
        fitting = fitted(runner.impl, pair.case)
        if fitting.lengths != pair.case.lengths:
            reason = "the contract accepts no other batch with these rows"
            return verdict(runner, check, case, Status.UNSUPPORTED, reason)
        pair = pair._replace(case=fitting)
        second = runner.run(pair.case)
        bad = failed_call(runner, check, pair.case, second)
        if bad is not None:
            return _of_pair(bad, case, pair)
        if not (always or self.exact(case) or runner.impl.contract.batch_invariant):
            return _of_pair(self.judge(runner, pair.case, check, second), case, pair)
        first = runner.run(case)
        bad = failed_call(runner, check, case, first)
        if bad is not None:
            return bad
        return _of_pair(self.agree(runner, check, case, first, second, pair.rows, str(pair.case)), case, pair)


def _seeded(transforms: tuple[Transform, ...]) -> Transform:
    """One of the transforms, by the case's seed, so that the case string names the pair."""
    return lambda case: transforms[case.seed % len(transforms)](case)


def _keep_half(case: Any) -> Pair:
    if case.requests < 2:
        return metamorphic.keep_columns(case, range(case.next_n - 1, -1, -1))
    return metamorphic.keep_requests(case, range(case.requests - 1, -1, -2))


def _keep_last(case: Any) -> Pair:
    return metamorphic.keep_rows(case, [case.rows - 1])


def _of_pair(found: Verdict, case: Any, pair: Pair) -> Verdict:
    """The same finding, named after the case that both were derived from."""
    if found.status is Status.PASSED:
        return found
    text = found.message.replace(str(pair.case), str(case))
    return replace(
        found,
        case=str(case),
        repro=found.repro.replace(str(pair.case), str(case)),
        message=f"{text}; against the same values as {pair.case}",
    )

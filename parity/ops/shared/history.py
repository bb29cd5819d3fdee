"""Level invariance, for any operation: a result does not depend on the calls before it, nor on the process.

history    many calls in one process, shapes repeated, growing and shrinking, their results kept: each is right, and
           stays as it was returned
processes  fresh processes whose first calls differ, each judged on the same cases
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, fitted, verdict
from parity.pages.layout import PAGE
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner, same_bits

PROCESSES = 4
"""Fresh processes of one example."""

SEEDS = 1 << 32

BRIEF = 100
"""Profiles of fewer examples judge one sequence, and one set of processes."""


@dataclass(frozen=True)
class History:
    """What an operation answers for these checks.

    bases      implementation -> cases whose data show every fault, each with a history of its own
    relatives  (implementation, case) -> other cases, the largest first, then the smallest, each of another shape
    judge      (runner, case, check, outcome) -> Verdict on one result by itself
    accepts    whether a case from elsewhere is small enough to be called so often
    """

    bases: Callable[[Implementation], Sequence[Any]]
    relatives: Callable[[Implementation, Any], Sequence[Any]]
    judge: Callable[[Runner, Any, str, Outcome], Verdict]
    accepts: Callable[[Any], bool]

    def checks(self) -> list[Check]:
        """The two checks."""
        options: dict[str, Any] = {"accepts": self.accepts, "shrinks": False, "listed": lambda impl: True}
        return [
            Check("invariance", "history", self._listed, self.judge_history, **options),
            Check("invariance", "processes", self._listed, self.judge_processes, needs=_no_processes, **options),
        ]

    def _listed(self, impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Any]:
        bases = self.bases(impl)
        return st.sampled_from(bases[:1] if profile.examples < BRIEF else bases)

    def judge_history(self, runner: Runner, case: Any) -> Verdict:
        """Every call of the sequence right when it returns, and no result changed by a later call."""
        check, cases = "invariance/history", [fitted(runner.impl, each) for each in self._calls(runner.impl, case)]
        outcomes = runner.sequence(cases)
        cells = 0
        for at, (each, outcome) in enumerate(zip(cases, outcomes, strict=False)):
            found = self._judged(runner, check, each, outcome)
            if found.status is not Status.PASSED:
                return _of_base(found, case, each, f"call {at + 1} of {len(cases)} in one process")
            cells += found.cells
        return verdict(runner, check, case, Status.PASSED, cells=cells)

    def judge_processes(self, runner: Runner, case: Any) -> Verdict:
        """The same cases after another first call, in a process each."""
        check, relatives = "invariance/processes", list(self.relatives(runner.impl, case))
        right: dict[str, Outcome] = {}
        cells = 0
        # Bases take turns to begin with the first and with the next relatives.
        places = [(process + PROCESSES * (case.seed % 2)) % len(relatives) for process in range(PROCESSES)]
        sequences = [[fitted(runner.impl, each) for each in (relatives[place], case, *relatives)] for place in places]
        for process, (cases, outcomes) in enumerate(zip(sequences, runner.fresh(sequences), strict=True)):
            for at, (each, outcome) in enumerate(zip(cases, outcomes, strict=False)):
                known = right.get(str(each))
                if outcome.complaint is None and known is not None and same_bits(known.output, outcome.output):
                    continue
                found = self._judged(runner, check, each, outcome)
                if found.status is not Status.PASSED:
                    text = f"call {at + 1} of process {process + 1} of {PROCESSES}, whose first call was {cases[0]}"
                    return _of_base(found, case, each, text)
                right.setdefault(str(each), outcome)
                cells += found.cells
        return verdict(runner, check, case, Status.PASSED, cells=cells)

    def _judged(self, runner: Runner, check: str, case: Any, outcome: Outcome) -> Verdict:
        return failed_call(runner, check, case, outcome) or self.judge(runner, case, check, outcome)

    def _calls(self, impl: Implementation, case: Any) -> Iterator[Any]:
        """The case eight times, with the same and with other values, and between them each of its relatives."""
        relatives = list(self.relatives(impl, case))
        for turn in range(max(7, len(relatives))):
            yield renewed(case, turn if turn % 3 else 0)
            if turn < len(relatives):
                yield renewed(relatives[turn], turn)
        yield case


def renewed(case: Any, turn: int) -> Any:
    """The same shape with other values at other places."""
    return replace(case, seed=(case.seed + turn) % SEEDS, perm=(case.perm + turn) % SEEDS)


def paged_relatives(case: Any) -> list[Any]:
    """Of a case over a block table: larger in every direction, one key, wider table and result, shorter rows, another
    number of rows a request, and no keys at all."""
    plain = replace(case, request_ids=None, row_ids=None, page_ids=None, only_keys=None, width=None, max_len=None)
    longer = tuple(tuple(length + PAGE + 6 for length in request) for request in case.lengths)
    other = [row for request in case.lengths for row in request]
    return [
        replace(plain, lengths=(*longer, (case.longest + 2 * PAGE + 1,) * case.next_n)),
        replace(plain, lengths=((1,),)),
        replace(plain, width=case.table_width + 9, max_len=case.max_context_len + 1000),
        replace(plain, lengths=tuple(tuple(min(length, 3) for length in request) for request in case.lengths)),
        replace(plain, lengths=tuple((length,) * (2 if case.next_n == 1 else 1) for length in other)),
        replace(plain, lengths=tuple((0,) * case.next_n for _ in case.lengths)),
    ]


def brief(case: Any) -> bool:
    """Whether a case over a block table is small enough to be called some dozens of times."""
    return case.rows <= 16 and case.longest <= 512 and case.max_context_len <= 4096


def _of_base(found: Verdict, base: Any, case: Any, where: str) -> Verdict:
    """The same finding, repeated by the case that the calls were derived from."""
    message = found.message.replace(found.repro, found.repro.replace(str(case), str(base)))
    return replace(
        found,
        case=str(base),
        repro=found.repro.replace(str(case), str(base)),
        message=f"{message}; at {where}: {case}",
    )


def _no_processes(impl: Implementation, device: torch.device) -> str | None:
    if impl.function is None:
        return None
    return "a built-in function lives in the judging process; fresh processes are for functions that a worker loads"

"""Level resources over a block table: memory against a formula, empty and enormous batches, CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, fitted, verdict
from parity.ops.shared.case import POISONS, TAILS
from parity.ops.shared.strategies import SEEDS
from parity.pages.layout import PAGE
from parity.results import Status, Verdict
from parity.run import interpreter
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

SLACK = {"cpu": 64 << 10, "cuda": 4 << 20}
"""Besides the formula: small tables of a call; on CUDA also the allocator's rounding of each tensor to 2 MiB."""

OBJECTS = 1 << 20
"""Besides both: the objects of Python, of which a call that has been made before takes about 100 KB."""

MANY = (65_535, 65_536)

Strategy = Callable[[Implementation, Profile, torch.device], st.SearchStrategy[Any]]
Draw = Callable[[st.DrawFn, Implementation], Mapping[str, Any]]


@dataclass(frozen=True)
class Paged:
    """What an operation over a block table answers for these checks.

    case      type of its cases
    judge     (runner, case, check, outcome) -> Verdict on one result
    result    case -> bytes of the result
    explain   case -> words that a failed memory check adds
    memory    strategy of shapes at which more than the budget would show
    fields    (draw, implementation) -> fields of an empty case that the operation has for itself
    many      implementation -> the same of a case of very many rows
    replayed  strategy of cases for graphs
    dry       whether an interpreted launch of very many rows is judged without running its programs
    """

    case: Callable[..., Any]
    judge: Callable[[Runner, Any, str, Outcome], Verdict]
    result: Callable[[Any], int]
    memory: Strategy
    fields: Draw
    many: Callable[[Implementation], Mapping[str, Any]]
    replayed: Strategy
    explain: Callable[[Any], str] = lambda case: ""
    dry: bool = False

    def checks(self) -> list[Check]:
        """The checks of the level, in the report's order: memory, empty, many_rows, graph."""
        return [
            Check(
                "resources",
                "memory",
                self.memory,
                self.judge_memory,
                3.0,
                shrinks=False,
                listed=lambda impl: bool(impl.workspace),
            ),
            Check("resources", "empty", self.empty, self._plain("empty"), 3.0, accepts=lambda case: case.longest <= 65),
            Check(
                "resources",
                "many_rows",
                self.many_rows,
                self._plain("many_rows"),
                accepts=lambda case: case.rows >= 4096,
                shrinks=False,
                listed=always,
            ),
            Check("resources", "graph", self.replayed, self.judge_graph, 0.5, needs=no_graph),
        ]

    def _plain(self, name: str) -> Callable[[Runner, Any], Verdict]:
        return lambda runner, case: self.judge_plain(runner, case, f"resources/{name}")

    def judge_memory(self, runner: Runner, case: Any) -> Verdict:
        """Peak bytes of the call against result, declared workspace and slack; interpreted kernels are launched without
        running their programs."""
        check = "resources/memory"
        # What a first call imports and compiles is no part of what a call takes.
        first = replace(case, lengths=((1,),), width=None, max_len=None, spare=1, base=0)
        runner.run(fitted(runner.impl, first), dry=True)
        outcome = runner.run(case, measure=True, dry=True)
        bad = failed_call(runner, check, case, outcome) or _launch(runner, check, case, outcome)
        if bad is not None:
            return bad
        allowed = runner.impl.workspace + SLACK[runner.device.type] + self.result(case)
        text = over_budget(outcome, allowed)
        if text is None:
            return verdict(runner, check, case, Status.PASSED, cells=1)
        text += self.explain(case)
        if outcome.peak_note:
            text += f"; the largest tensor: {outcome.peak_note}"
        got = outcome.peak_bytes if (outcome.peak_bytes or 0) > allowed else outcome.joint_bytes
        return verdict(runner, check, case, Status.FAILED, text, got=got, wanted=allowed)

    def judge_plain(self, runner: Runner, case: Any, check: str) -> Verdict:
        """Right values at an unusual size, and a launch that devices accept."""
        # 65,536 programs are beyond an interpreter: there the launch itself is judged, elsewhere its result.
        dry = self.dry and case.rows > 4096 and interpreter.interpreting()
        outcome = runner.run(case, dry=dry)
        bad = failed_call(runner, check, case, outcome) or _launch(runner, check, case, outcome)
        if bad is not None:
            return bad
        if dry and outcome.launches:
            return verdict(runner, check, case, Status.PASSED, cells=1)
        found = self.judge(runner, case, check, outcome)
        # An empty result is an answer too: the call came back with the right shape.
        return found if found.cells or found.status is not Status.PASSED else replace(found, cells=1)

    def judge_graph(self, runner: Runner, case: Any) -> Verdict:
        """A graph captured on the case's full lengths and replayed on short ones gives what an eager call gives."""
        check = "resources/graph"
        short = tuple(tuple(length // (2 + b) for length in row) for b, row in enumerate(case.lengths))
        # The same sizes of every operand: width, result and pool are those of the long case.
        wide = replace(case, width=case.table_width, max_len=case.max_context_len)
        spare = case.spare + sum(-(-max(row) // PAGE) for row in case.lengths)
        narrow = replace(wide, lengths=short, alias="copied")
        narrow = replace(narrow, spare=spare - sum(-(-max(row) // PAGE) for row in short))
        outcome = runner.replay(replace(wide, alias="copied"), narrow)
        bad = failed_call(runner, check, case, outcome)
        return bad if bad is not None else self.judge(runner, narrow, check, outcome)

    def empty(self, impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Any]:
        """No rows at all, rows without keys, and at most one row with some."""

        @st.composite
        def cases(draw: st.DrawFn) -> Any:
            requests = draw(st.sampled_from((0, 1, 2, 5) if impl.interpreted else (0, 1, 2, 7, 32)))
            next_n = draw(st.integers(1, 3)) if requests else 1
            lengths = [[0] * next_n for _ in range(requests)]
            if requests and draw(st.booleans()):
                lengths[draw(st.integers(0, requests - 1))][-1] = draw(st.sampled_from((1, 64, 65)))
            longest = max((n for row in lengths for n in row), default=0)
            fields = self.fields(draw, impl)
            return self.case(
                lengths=tuple(map(tuple, lengths)),
                seed=draw(st.integers(0, SEEDS)),
                width=max(1, -(-longest // PAGE)) + draw(st.integers(0, 3)),
                max_len=max(1, longest) + draw(st.integers(0, 100)),
                tail=draw(st.sampled_from(TAILS)),
                poison=draw(st.sampled_from(POISONS)),
                **fields,
            )

        return cases()

    def many_rows(self, impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Any]:
        """65,535 and 65,536 rows, as requests of one row each and as one request, of at most two keys."""
        found = []
        for rows in MANY:
            common = {"prefix": 1, "max_len": 2, "seed": rows, **self.many(impl)}
            expanded = tuple((row % 3,) for row in range(rows))
            names = (0,) * rows
            found.append(self.case(lengths=expanded, request_ids=names, row_ids=tuple(range(rows)), **common))
            found.append(self.case(lengths=((0,) + (1,) * (rows - 2) + (2,),), **common))
        return st.sampled_from(found if device.type == "cuda" else found[-1:])


def over_budget(outcome: Outcome, allowed: int) -> str | None:
    """The sentence that says which counter passed the budget, tensors or those with Python's and numpy's allocations
    added, or None."""
    tensors, joint = outcome.peak_bytes or 0, outcome.joint_bytes or 0
    if tensors > allowed:
        return f"peak of {tensors} bytes of tensors beyond the inputs, allowed {allowed}"
    if joint > allowed + OBJECTS:
        return (
            f"peak of {joint} bytes beyond the inputs, of tensors and of what Python and numpy allocate, "
            f"allowed {allowed + OBJECTS}"
        )
    return None


def _launch(runner: Runner, check: str, case: Any, outcome: Outcome) -> Verdict | None:
    if outcome.excess is None:
        return None
    return verdict(runner, check, case, Status.FAILED, f"launch: {outcome.excess}")


def no_graph(impl: Implementation, device: torch.device) -> str | None:
    """Why no CUDA graph can be captured, or None."""
    if not impl.contract.graph:
        return "the contract says that it cannot be captured"
    return None if device.type == "cuda" else "CUDA graphs need a CUDA device"


def always(impl: Implementation) -> bool:
    """Listed whatever the implementation."""
    return True

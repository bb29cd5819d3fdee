"""Which fault model explains an observed result: all models of the operation on the same inputs, by what they leave.

An observation is a short protocol, the same for the function in question and for every model: a call on other values
of the same shape, then the call, then the call again. So stale buffers and races are compared like with like.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity.faults.building import CPU, contract, staged
from parity.faults.catalogue import MODELS
from parity.numerics.bounds import expected
from parity.ops.fault import OPS, Fault
from parity.ops.paged_logits.operands import build_logits as build
from parity.run.runner import poisoned_allocations

FLOOR = 2.0**-16
"""Relative: gamma(2^8) of float32, what a sum of all terms may lose in another order where no bound is known."""

CORRECT = Fault("correct", "none", "formula", "nothing is wrong", change={"-": lambda: None}, op="none")


@dataclass(frozen=True, eq=False)
class Problem:
    """One call to be explained. `fresh()` gives its operands anew, `warm()` those of the call before it, or None; each
    has `.kwargs()`, or `.steps` and `.kwargs(step)` for a compressor."""

    op: str
    layout: str
    fresh: Callable[[], Any]
    warm: Callable[[], Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    runs: int = 2


def warm_case(case: Any) -> Any:
    """The call before a case's: the same shape, other values, and every row at full length."""
    other = replace(case, seed=case.seed + 1)
    if case.stage in ("logits", "topk"):
        return replace(other, lengths=tuple((case.longest,) * case.next_n for _ in case.lengths))
    return other


def problem_of(case: Any, extra: dict[str, Any] | None = None) -> Problem:
    """The problem of a case."""
    layout, other = getattr(case, "layout", "bf16"), warm_case(case)
    return Problem(OPS[case.stage], layout, lambda: build(case), lambda: build(other), dict(extra or {}))


def call_once(op: str, function: Callable[..., Any], operands: Any) -> Any:
    """What a function answers to operands, or None where it raises."""
    try:
        with poisoned_allocations():
            if op == "compressor":
                found = [function(**operands.kwargs(at)) for at in range(len(operands.steps))]
                return [tuple(x.clone() for x in result) for result in found]
            result = function(**operands.kwargs())
        if op == "store":
            return operands.contents()
        return tuple(x.clone() for x in result) if isinstance(result, tuple | list) else result.clone()
    except Exception:
        # A model that cannot run on this input explains nothing; its absence from the ranking says so.
        return None


def observe(problem: Problem, function: Callable[..., Any], kept: Operands | None = None) -> list[Any]:
    """The results of the protocol's runs; on operands `kept` between calls where the function writes none."""
    get = kept.get if kept is not None else _built
    if problem.warm is not None:
        call_once(problem.op, function, get(problem.warm))
    return [call_once(problem.op, function, get(problem.fresh)) for _ in range(problem.runs)]


def _built(make: Callable[[], Any]) -> Any:
    return make()


class Operands:
    """Operands built once and put back into their first state before each use."""

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Any, Any]] = {}

    def get(self, make: Callable[[], Any]) -> Any:
        if make not in self._made:
            operands = make()
            state = getattr(operands, "state", None)
            self._made[make] = (operands, None if state is None else state.clone())
        operands, state = self._made[make]
        if state is not None:
            operands.state.copy_(state)
        elif hasattr(operands, "restore"):
            operands.restore()
        return operands


def models_for(problem: Problem) -> list[Fault]:
    """The models that can be evaluated on a problem: those of its operation that its layout can have."""
    found = []
    for fault in MODELS:
        if fault.op != problem.op or fault.equivalent or {"compile", "route"} & set(fault.extra):
            continue
        if fault.op == "paged_logits" and fault.layout == "fp8" and problem.layout != "fp8":
            continue
        chain = fault.step in ("norm", "rope", "hadamard", "dispatch")
        if fault.op == "store" and fault.layout != problem.layout and not chain:
            continue
        found.append(fault)
    return found


def function_of(problem: Problem, faults: Sequence[Fault]) -> Callable[..., Any]:
    """A function with all the faults at once, on the problem's layout."""
    change = {name: stage for fault in faults for name, stage in fault.change.items() if fault is not CORRECT}
    function = staged(problem.op, problem.layout, problem.extra, change)
    for fault in faults:
        if fault.wrap is not None:
            function = fault.wrap(function)
    return function


# ------------------------------------------------------------------------------------------------ cells of a result


@dataclass(frozen=True, eq=False)
class Cells:
    """A result as a list of numbers: values float64 [n], and what each may differ by without being another, [n]."""

    values: Tensor
    tolerance: Tensor


class Ruler:
    """Turns results of one problem into cells, with the problem's own bounds."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.operands = problem, problem.fresh()
        self._cells: dict[int, tuple[Any, Cells]] = {}
        if problem.op == "paged_logits":
            exact = expected(self.operands, contract("paged_logits", problem.layout))
            lens = self.operands.context_lens.reshape(-1).to(torch.int64)
            width = self.operands.max_context_len
            self.visible = torch.arange(width) < lens[:, None]
            self.bound = torch.zeros((len(lens), width), dtype=torch.float64)
            self.bound[:, : exact.bound.shape[1]] = torch.where(torch.isfinite(exact.bound), exact.bound, 0.0)
            self.judged = self.visible | bool(self.operands.clean_logits)

    def cells(self, result: Any) -> Cells:
        if id(result) not in self._cells:  # the result is kept beside, so that its id stays its own
            self._cells[id(result)] = (result, getattr(self, "_" + self.problem.op)(result))
        return self._cells[id(result)][1]

    def _paged_logits(self, out: Tensor) -> Cells:
        values = out.to(torch.float64)[self.judged]
        # What stands in memory that was never written cannot be told beforehand: any such cell is one kind of wrong.
        return Cells(values, self.bound[self.judged])

    def _topk(self, out: tuple[Tensor, Tensor]) -> Cells:
        """Scores chosen (ties do not count), where -1 stands, how often a position stands twice, and slot errors."""
        slots, positions = (x.to(torch.int64) for x in out)
        o = self.operands
        rows, width = o.logits.shape
        lens = o.context_lens.reshape(-1).to(torch.int64)[:, None]
        inside = (positions >= 0) & (positions < width)
        score = o.logits.gather(1, positions.clamp(0, max(0, width - 1))).to(torch.float64) if width else slots * 0.0
        score = score.nan_to_num(5e38, 6e38, -6e38)
        score = score.masked_fill(~inside | (positions >= lens), 4e38).masked_fill(positions < 0, -4e38)
        ordered = positions.sort(1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(1).to(torch.float64)
        table = o.block_table
        page = positions.clamp_min(0) // 64
        known = page < table.shape[1]
        row = (torch.arange(rows) // o.context_lens.shape[1])[:, None].expand_as(page)
        safe = page.clamp_max(max(0, table.shape[1] - 1))
        image = table[row, safe].to(torch.int64) * 64 + positions.clamp_min(0) % 64 if table.shape[1] else page
        off = torch.where(positions < 0, slots + 1, torch.where(known, slots - image, 0)).to(torch.float64)
        parts = [score.sort(1).values, (positions < 0).to(torch.float64), off.sort(1).values, twice[:, None]]
        values = torch.cat([part.reshape(-1) for part in parts])
        return Cells(values, torch.zeros_like(values))

    def _store(self, contents: Tensor) -> Cells:
        values = contents.to(torch.float64)
        return Cells(values, torch.zeros_like(values))

    def _compressor(self, outputs: list[tuple[Tensor, Tensor]]) -> Cells:
        parts, slack = [], []
        for pooled, closes in outputs:
            kept = torch.where(closes[:, None], pooled.to(torch.float64), 7e38)
            parts += [closes.to(torch.float64), kept.reshape(-1)]
            slack += [torch.zeros(len(closes), dtype=torch.float64), kept.abs().reshape(-1) * 2.0**-18]
        values = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
        return Cells(values, torch.cat(slack) if slack else values)


@dataclass(frozen=True, eq=False)
class Distance:
    """How far a model's results are from the observed ones: wrong cells, and the size of what is left in the others."""

    wrong: int
    rest: float
    cells: int

    @property
    def key(self) -> tuple[int, float]:
        return (self.wrong, self.rest)


def near_cells(ruler: Ruler, mine: Any, theirs: Any) -> tuple[Tensor, Tensor]:
    """(whether each cell is the same within the arithmetic, its error over what is allowed there), of two results."""
    a, b = ruler.cells(mine), ruler.cells(theirs)
    equal = (a.values == b.values) | (a.values.isnan() & b.values.isnan())
    error, allowed = (a.values - b.values).abs(), a.tolerance
    if ruler.problem.op == "paged_logits":
        allowed = torch.maximum(allowed, FLOOR * torch.maximum(a.values.abs(), b.values.abs()))
    near = equal | ((error <= allowed) & torch.isfinite(error))
    return near, torch.where(equal | ~near, 0.0, error / allowed.clamp_min(1e-300))


def distance(ruler: Ruler, observed: Sequence[Any], found: Sequence[Any]) -> Distance:
    """Over all runs: cells that differ by more than the arithmetic allows, and the root mean square of the rest."""
    wrong, cells, total = 0, 0, 0.0
    for mine, theirs in zip(observed, found, strict=True):
        if mine is None or theirs is None:
            same = mine is None and theirs is None
            wrong, cells = wrong + (0 if same else 1 << 40), cells + 1
            continue
        near, rest = near_cells(ruler, mine, theirs)
        wrong += int((~near).sum())
        cells += len(near)
        total += float(rest.square().sum())
    return Distance(wrong, (total / max(1, cells)) ** 0.5, cells)


@dataclass(frozen=True, eq=False)
class Explanation:
    """One or two faults, how far they are from what was observed, and what they compute."""

    faults: tuple[Fault, ...]
    distance: Distance
    results: list[Any] = field(repr=False)

    @property
    def name(self) -> str:
        return " + ".join(fault.id for fault in self.faults)

    @property
    def explains(self) -> bool:
        """Whether nothing is left to explain."""
        return self.distance.wrong == 0


def rank(problem: Problem, observed: Sequence[Any], models: Sequence[Fault] | None = None) -> list[Explanation]:
    """All models, and no fault at all, by what they leave unexplained; the best first."""
    ruler, kept = Ruler(problem), Operands()
    found = []
    for fault in [CORRECT, *(models_for(problem) if models is None else models)]:
        results = observe(problem, function_of(problem, [fault]), None if fault.wrap else kept)
        found.append(Explanation((fault,), distance(ruler, observed, results), results))
    return sorted(found, key=lambda each: each.distance.key)


def rank_pairs(problem: Problem, observed: Sequence[Any], best: Sequence[Explanation]) -> list[Explanation]:
    """Pairs of the given single explanations that touch different steps, by what they leave unexplained."""
    ruler, kept = Ruler(problem), Operands()
    found = []
    singles = [each.faults[0] for each in best if each.faults[0] is not CORRECT]
    for one, two in itertools.combinations(singles, 2):
        if set(one.change) & set(two.change):
            continue
        results = observe(problem, function_of(problem, [one, two]), None if one.wrap or two.wrap else kept)
        found.append(Explanation((one, two), distance(ruler, observed, results), results))
    return sorted(found, key=lambda each: each.distance.key)


def equals(problem: Problem, ranked: Sequence[Explanation]) -> list[Explanation]:
    """The explanations that leave exactly as much as the best one and compute the same: no telling them apart here."""
    best = ranked[0]
    ruler = Ruler(problem)
    close = [each for each in ranked if each.distance.wrong == best.distance.wrong]
    return [each for each in close if each is best or distance(ruler, best.results, each.results).key == (0, 0.0)]


__all__ = ["CORRECT", "CPU", "Explanation", "Problem", "equals", "observe", "problem_of", "rank", "rank_pairs"]

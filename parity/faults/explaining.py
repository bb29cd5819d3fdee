"""Which fault model explains an observed result: all models of the operation on the same inputs, by what they leave.

An observation is a short protocol, the same for the function in question and for every model: a call on other values
of the same shape, then the call, then the call again. So stale buffers and races are compared like with like.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.faults.building import CPU, diagnosis_of, staged
from parity.ops.diagnosis import Cells, Diagnosis
from parity.ops.fault import Fault, Function
from parity.run.operation import Operation, find
from parity.run.runner import BrokenConventionError, over_tensors, poisoned_allocations

CORRECT = Fault("correct", "none", "formula", "nothing is wrong", op="", change={"-": lambda: None})
NO_RESULT = 1 << 40
"""The wrong cells of a call that gave a result where the other gave none."""
REFUSALS = (RuntimeError, IndexError, ValueError, BrokenConventionError)
"""What torch, and a model, raise for an input that they cannot take."""


@dataclass(frozen=True, eq=False)
class Problem:
    """One call to be explained. `fresh()` gives its operands anew, `warm()` those of the call before it, or None; both
    as the operation builds them. `extra` is what of the contract decides results, `runs` how often the call is
    observed."""

    op: str
    layout: str
    fresh: Callable[[], Any]
    warm: Callable[[], Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    runs: int = 2

    @property
    def operation(self) -> Operation:
        """What the call computes."""
        return find(self.op)

    @property
    def diagnosis(self) -> Diagnosis:
        """What the operation provides for the comparison."""
        return diagnosis_of(self.op)

    @property
    def obstacle(self) -> str:
        """The sentence that says why no model can be run on the problem, or ""."""
        try:
            staged(self.op, self.layout, self.extra)
        except ValueError as error:
            return str(error)
        return ""


def problem_of(case: Any, extra: dict[str, Any] | None = None) -> Problem:
    """The problem of a case."""
    build, other = find(case.op).build, diagnosis_of(case.op).before(case)
    layout = getattr(case, "layout", "")
    return Problem(case.op, layout, lambda: build(case, CPU), lambda: build(other, CPU), dict(extra or {}))


def call_once(problem: Problem, model: Function, operands: Any) -> Any:
    """What a model gives for operands, or None where it cannot take them."""
    operation = problem.operation
    try:
        with poisoned_allocations():
            given = operation.invoke(model, operands.kwargs(), operands)
        return over_tensors(Tensor.clone, operation.collect(given, operands))
    except REFUSALS:
        # A model that cannot run on this input explains nothing; its absence from the ranking says so.
        return None


def observe(problem: Problem, model: Function, kept: Operands | None = None) -> list[Any]:
    """The results of the protocol's runs; on operands `kept` between calls where the model writes none."""
    get = kept.get if kept is not None else lambda make: make()
    if problem.warm is not None:
        call_once(problem, model, get(problem.warm))
    return [call_once(problem, model, get(problem.fresh)) for _ in range(problem.runs)]


class Operands:
    """Operands of a problem, built once and put back into their first state before each use."""

    def __init__(self, problem: Problem) -> None:
        self._restore, self._made = problem.operation.restore, dict[Any, Any]()

    def get(self, make: Callable[[], Any]) -> Any:
        if make not in self._made:
            self._made[make] = make()
        self._restore(self._made[make])
        return self._made[make]


def models_for(problem: Problem) -> list[Fault]:
    """The models that can be run on a problem: those of its operation that its layout can have."""
    return [
        fault
        for fault in problem.operation.faults()
        if not fault.equivalent
        and not {"compile", "route"} & set(fault.extra)
        and problem.diagnosis.fits(fault, problem.layout)
    ]


def function_of(problem: Problem, faults: Sequence[Fault]) -> Function:
    """A function with all the faults at once, on the problem's layout."""
    change = {name: step for fault in faults for name, step in fault.change.items() if fault is not CORRECT}
    function = staged(problem.op, problem.layout, problem.extra, change)
    for fault in faults:
        if fault.wrap is not None:
            function = fault.wrap(function)
    return function


# ------------------------------------------------------------------------------------------------ distance of results


class Ruler:
    """Turns results of one problem into cells, with the problem's own bounds."""

    def __init__(self, problem: Problem) -> None:
        self._measure = problem.diagnosis.cells(problem.fresh(), problem.layout)
        self._cells: dict[int, tuple[Any, Cells]] = {}

    def cells(self, result: Any) -> Cells:
        if id(result) not in self._cells:  # the result is kept too, so that its id stays its own
            self._cells[id(result)] = (result, self._measure(result))
        return self._cells[id(result)][1]


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
    if a.relative:
        allowed = torch.maximum(allowed, a.relative * torch.maximum(a.values.abs(), b.values.abs()))
    near = equal | ((error <= allowed) & torch.isfinite(error))
    return near, torch.where(equal | ~near, 0.0, error / allowed.clamp_min(1e-300))


def distance(ruler: Ruler, observed: Sequence[Any], found: Sequence[Any]) -> Distance:
    """Over all runs: cells that differ by more than the arithmetic allows, and the root mean square of the rest."""
    wrong, cells, total = 0, 0, 0.0
    for mine, theirs in zip(observed, found, strict=True):
        if mine is None or theirs is None:
            same = mine is None and theirs is None
            wrong, cells = wrong + (0 if same else NO_RESULT), cells + 1
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

    @property
    def correct(self) -> bool:
        """Whether it says that nothing is wrong."""
        return self.faults == (CORRECT,)


def _ranked(problem: Problem, observed: Sequence[Any], candidates: Sequence[tuple[Fault, ...]]) -> list[Explanation]:
    ruler, kept = Ruler(problem), Operands(problem)
    found = []
    for faults in candidates:
        writes = any(fault.wrap for fault in faults)
        results = observe(problem, function_of(problem, faults), None if writes else kept)
        found.append(Explanation(faults, distance(ruler, observed, results), results))
    return sorted(found, key=lambda each: each.distance.key)


def rank(problem: Problem, observed: Sequence[Any], models: Sequence[Fault] | None = None) -> list[Explanation]:
    """All models, and no fault at all, by what they leave unexplained; the best first."""
    return _ranked(problem, observed, [(f,) for f in (CORRECT, *(models_for(problem) if models is None else models))])


def rank_pairs(problem: Problem, observed: Sequence[Any], best: Sequence[Explanation]) -> list[Explanation]:
    """Pairs of the given single explanations that touch different steps, by what they leave unexplained."""
    singles = [each.faults[0] for each in best if not each.correct]
    pairs = [pair for pair in itertools.combinations(singles, 2) if not set(pair[0].change) & set(pair[1].change)]
    return _ranked(problem, observed, pairs)


def equals(problem: Problem, ranked: Sequence[Explanation]) -> list[Explanation]:
    """The explanations that leave exactly as much as the best one and compute the same: no telling them apart here."""
    best = ranked[0]
    ruler = Ruler(problem)
    close = [each for each in ranked if each.distance.wrong == best.distance.wrong]
    return [each for each in close if each is best or distance(ruler, best.results, each.results).key == (0, 0.0)]

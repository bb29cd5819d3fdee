"""What comparing a result with fault models takes of an operation: the value behind its hook `diagnosis`."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from parity.ops.fault import Fault


@dataclass(frozen=True, eq=False)
class Cells:
    """A result as a list of numbers, float64 [n], and how much each may differ without being another: by `tolerance`
    [n], and by `relative` of the larger of two values."""

    values: Tensor
    tolerance: Tensor
    relative: float = 0.0


def _next_seed(case: Any) -> Any:
    return replace(case, seed=case.seed + 1)


def plain_operands(named: Mapping[str, Any]) -> Any:
    """Operands that are the arguments of one call, tensors copied, without a case behind them."""
    mine = {name: value.clone() if isinstance(value, Tensor) else value for name, value in named.items()}
    return SimpleNamespace(**mine, kwargs=lambda: mine)


@dataclass(frozen=True)
class Diagnosis:
    """What the diagnosis needs of an operation besides its fault models and its staged implementation.

    draw            (model, random source) -> a case of a size at which the model's kind of fault can show
    cells           (operands, layout) -> (result -> its Cells)
    promises        contract keys that the staged function keeps beyond the defaults
    facts           contract -> what of it decides results, as the staged implementation takes it
    fits            (model, layout) -> whether the model can be run on that layout
    before          case -> the case of the call before it: the same shape, other values
    describe        (operands, layout, result) -> sentences on what the wrong cells have in common
    describe_parts  (case, layout, case -> result) -> sentences from calls on parts of the case
    captured        arguments of a captured call -> operands, anew at every call
    tensors         names of the tensors among the arguments of a captured call (none: calls are not captured)
    numbers         names and types of its other arguments
    results         names of what came out
    """

    draw: Callable[[Fault, random.Random], Any]
    cells: Callable[[Any, str], Callable[[Any], Cells]]
    promises: Mapping[str, Any] = field(default_factory=dict)
    facts: Callable[[Any], dict[str, Any]] = lambda contract: {}
    fits: Callable[[Fault, str], bool] = lambda fault, layout: True
    before: Callable[[Any], Any] = _next_seed
    describe: Callable[[Any, str, Any], list[str]] = lambda operands, layout, result: []
    describe_parts: Callable[[Any, str, Callable[[Any], Any]], list[str]] = lambda case, layout, run: []
    tensors: tuple[str, ...] = ()
    numbers: Mapping[str, type] = field(default_factory=dict)
    results: tuple[str, ...] = ()
    captured: Callable[[Mapping[str, Any]], Any] = plain_operands

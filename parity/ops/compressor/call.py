"""A case of a compressor function: all its calls, one after the other on one state, and what each returned."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from parity.ops.compressor.case import CompressorOperands
from parity.pages.layout import DIM
from parity.run import interpreter
from parity.run.registry import Implementation
from parity.run.runner import Outcome, poisoned_allocations, sentence


def execute_compressor(
    impl: Implementation, function: Callable[..., Any], operands: CompressorOperands, *, repeats: int = 1
) -> Outcome:
    """The output is a list of (pooled float32 [N, 128], closes bool [N]), one a call. Repeats start from a copy of the
    first state; Python exceptions become `error`."""
    outcome = Outcome(operands=operands)
    started = time.perf_counter()
    fresh = operands.state.clone()
    try:
        with poisoned_allocations(), interpreter.corrected():
            outcome.output = _script(function, operands, outcome)
            for index in range(1, repeats):
                operands.state.copy_(fresh)
                again = _script(function, operands, outcome)
                if outcome.defect is None and not _same(outcome.output, again):
                    outcome.differing = (index, again)
                    break
    except Exception as error:
        outcome.error = sentence(interpreter.cause(error))
    if outcome.complaint is not None:
        outcome.output = None
    outcome.seconds = time.perf_counter() - started
    return outcome


def _script(function: Callable[..., Any], operands: CompressorOperands, outcome: Outcome) -> Any:
    found = []
    for at, step in enumerate(operands.steps):
        named = operands.kwargs(at)
        inputs = {name: x.clone() for name, x in named.items() if name != "state"}
        result = function(**named)
        count = len(step.positions)
        outcome.defect = outcome.defect or _inspect(result, count)
        for name, before in inputs.items():
            if not torch.equal(before, named[name]):
                outcome.defect = outcome.defect or f"inputs: call {at} wrote {name}"
        if outcome.defect is not None:
            return None
        found.append(tuple(x.clone() for x in result))
    return found


def _inspect(result: Any, count: int) -> str | None:
    wanted = (("pooled", torch.float32, (count, DIM)), ("closes", torch.bool, (count,)))
    if not (isinstance(result, tuple | list) and len(result) == 2):
        return f"result: expected (pooled, closes), got a {type(result).__name__}"
    for (name, dtype, shape), value in zip(wanted, result, strict=True):
        if not isinstance(value, torch.Tensor) or value.dtype != dtype or tuple(value.shape) != shape:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            return f"result: expected {name} {dtype} {list(shape)}, got {got}"
    return None


def _same(a: Any, b: Any) -> bool:
    """The same bits where a key is closed; the other rows are nobody's."""
    return all(
        torch.equal(x[1], y[1]) and torch.equal(x[0][x[1]].view(torch.int32), y[0][y[1]].view(torch.int32))
        for x, y in zip(a, b, strict=True)
    )

"""How compressor functions are called: all calls of a case, one after the other on one state."""

from collections.abc import Callable
from typing import Any

import torch

from parity.ops.compressor.operands import CompressorOperands
from parity.pages.layout import DIM
from parity.run.runner import BrokenConventionError, ChangedResultError, inspect_tensors, kind_of, same_bits

Output = tuple[tuple[torch.Tensor, torch.Tensor], ...]
"""(pooled float32 [N, 128], closes bool [N]) of every call."""


Given = list[tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]
"""What every call returned, and a copy of it."""


def invoke(function: Callable[..., Any], named: dict[str, Any], operands: CompressorOperands) -> Given:
    """Every call of the case; one that breaks the convention, or changes what an earlier one returned, ends it."""
    found: Given = []
    for at, step in enumerate(operands.steps):
        result = function(**operands.kwargs(at))
        broken = _inspect(result, len(step.positions), operands.device)
        if broken is not None:
            raise BrokenConventionError(broken)
        for earlier, (kept, copy) in enumerate(found):
            if not same_bits(kept, copy):
                raise ChangedResultError(f"result: call {at} changed what call {earlier} had returned")
        found.append(((result[0], result[1]), (result[0].clone(), result[1].clone())))
    return found


def collect(given: Given, operands: CompressorOperands) -> Output:
    """What the calls returned."""
    return tuple(copy for _, copy in given)


def kept(given: Given, operands: CompressorOperands) -> Any:
    """The tensors themselves."""
    return [returned for returned, _ in given]


def _inspect(result: Any, count: int, device: torch.device) -> str | None:
    if not (isinstance(result, tuple | list) and len(result) == 2):
        return f"result: expected (pooled, closes), got {kind_of(result)}"
    parts = [("pooled", result[0], torch.float32, (count, DIM)), ("closes", result[1], torch.bool, (count,))]
    return inspect_tensors(parts, device)


def inspect(output: Output, operands: CompressorOperands) -> None:
    """Each call was inspected when it returned."""
    return


def equal(a: Output, b: Output) -> bool:
    """The same bits where a key is closed; the other rows are unspecified."""
    return all(
        torch.equal(x[1], y[1]) and torch.equal(x[0][x[1]].view(torch.int32), y[0][y[1]].view(torch.int32))
        for x, y in zip(a, b, strict=True)
    )


def restore(operands: CompressorOperands) -> None:
    """The state as it was before the first call."""
    operands.state.copy_(operands.fresh)

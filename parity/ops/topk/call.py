"""What top-k functions have to return."""

from typing import Any

import torch

from parity.ops.topk.case import TopkCase
from parity.ops.topk.operands import TopkOperands
from parity.run.runner import inspect_tensors, kind_of

LIGHT_CELLS = 1 << 18
"""Logits up to which a case is drawn and judged on the CPU."""


def inspect(output: Any, operands: TopkOperands) -> str | None:
    """Slots and positions are int32 [T, k]."""
    if not (isinstance(output, tuple | list) and len(output) == 2):
        return f"result: expected (slots, positions), got {kind_of(output)}"
    shape = (operands.case.rows, operands.k)
    parts = [("slots", output[0], torch.int32, shape), ("positions", output[1], torch.int32, shape)]
    return inspect_tensors(parts, operands.device)


def light(case: TopkCase) -> bool:
    """Whether a CPU evaluates the case about as fast as a GPU launches the steps of it."""
    return case.rows * case.max_context_len <= LIGHT_CELLS

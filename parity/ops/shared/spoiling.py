"""Faults that a function of any operation may have: what it puts back, counts or hands out again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from parity.ops.fault import Function


def restored(name: str) -> Callable[[Function], Function]:
    """Clears the first row of an argument, and puts it back before the function is called."""

    def wrap(f: Function) -> Function:
        def call(**named: Any) -> Any:
            row = named[name][:1].view(torch.uint8)
            held = row.clone()
            row.zero_()
            row.copy_(held)
            return f(**named)

        return call

    return wrap


def turn(memory: dict[str, Any], *key: Any) -> int:
    """How often this has been asked with the same key before."""
    count = memory[str(key)] = memory.get(str(key), -1) + 1
    return count


def lent(memory: dict[str, Any], name: str, result: torch.Tensor) -> torch.Tensor:
    """The same values in a buffer that is kept and handed out again and again."""
    kept = memory.get(name)
    if kept is None or kept.numel() < result.numel():
        kept = memory[name] = torch.zeros(max(1, result.numel()), dtype=result.dtype)
    return kept[: result.numel()].view(result.shape).copy_(result)

"""How a compressor function is compared with the fault models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from parity.ops.compressor.call import Output
from parity.ops.compressor.case import CompressorCase
from parity.ops.compressor.faults import staged
from parity.ops.diagnosis import Cells, Diagnosis
from parity.ops.fault import Fault, Function


def cells(operands: Any, layout: str) -> Callable[[Output], Cells]:
    """Which tokens close a group, and the pooled keys that they close."""

    def of(outputs: Output) -> Cells:
        parts, slack = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
        for pooled, closes in outputs:
            kept = torch.where(closes[:, None], pooled.to(torch.float64), 7e38)
            parts += [closes.to(torch.float64), kept.reshape(-1)]
            slack += [torch.zeros(len(closes), dtype=torch.float64), kept.abs().reshape(-1) * 2.0**-18]
        return Cells(torch.cat(parts), torch.cat(slack))

    return of


def function(layout: str, facts: Mapping[str, Any], change: Mapping[str, Function]) -> Function:
    """The staged implementation, with steps replaced."""
    return staged.function(change)


def draw(fault: Fault, source: random.Random) -> CompressorCase:
    """A script of some calls for two requests, with tokens dropped now and then."""
    calls, length = [], {0: 0, 1: 0}
    for _ in range(source.randint(3, 7)):
        call = []
        for request in source.sample((0, 1), source.randint(1, 2)):
            undone = source.randint(1, min(3, length[request])) if length[request] and source.random() < 0.2 else 0
            count = source.choice((1, 3, 4, 5, 9, 13))
            if undone:
                count = max(count, undone + 1)
            call.append((request, count, undone))
            length[request] += count - undone
        calls.append(tuple(call))
    data, poison = source.choice(("exact", "random")), source.choice(("nan", "stale"))
    seed, perm = source.randrange(1 << 16), source.randint(0, 2)
    return CompressorCase(calls=tuple(calls), data=data, seed=seed, poison=poison, perm=perm)


DIAGNOSIS = Diagnosis(draw=draw, cells=cells)

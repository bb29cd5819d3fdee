"""Top-k to slots as a chain of small torch stages under the calling convention; correct until a model replaces one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity.pages.layout import PAGE


@dataclass
class Call:
    """logits float32 [T, W], context_lens int32 [B, N], block_table int32 [B, P], k; and a model's memory."""

    logits: Tensor
    context_lens: Tensor
    block_table: Tensor
    k: int
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def next_n(self) -> int:
        return self.context_lens.shape[1]

    @property
    def rows(self) -> int:
        return self.context_lens.numel()

    def entry(self, row: Tensor, column: Tensor) -> Tensor:
        """Block-table entries int64; outside of the table, some other entry of its storage."""
        table = self.block_table
        if not table.numel():
            return torch.zeros(torch.broadcast_shapes(row.shape, column.shape), dtype=torch.int64)
        flat = table.as_strided((table.untyped_storage().nbytes() // 4,), (1,), 0)
        place: Tensor = int(table.storage_offset()) + row * table.stride(0) + column * table.stride(1)
        return flat[place.remainder(flat.numel())].to(torch.int64)


def lengths(c: Call) -> Tensor:
    """Visible scores of each row, int64 [T]."""
    return c.context_lens.reshape(-1).to(torch.int64)


def scores(c: Call) -> Tensor:
    """float32 [T, W]."""
    return c.logits


def order(c: Call, scores: Tensor) -> Tensor:
    """int64 [T, W] that sorts as the scores do: -0 equals +0, NaN above everything."""
    bits = (scores + 0.0).view(torch.int32).to(torch.int64)
    return torch.where(scores.isnan(), 1 << 31, torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits))


def candidates(c: Call, order: Tensor, lens: Tensor) -> Tensor:
    """bool [T, W]: places that may be selected."""
    return torch.arange(order.shape[1]) < lens[:, None]


def select(c: Call, order: Tensor, taken: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(positions int64 [T, m], valid bool [T, m]) of the m = min(k, W) best candidates, best first, ties by place."""
    lowest = torch.where(taken, order, -(1 << 40))
    best = torch.sort(lowest, dim=1, descending=True, stable=True).indices[:, :k]
    return best, torch.gather(taken, 1, best)


def pad(c: Call, positions: Tensor, valid: Tensor) -> Tensor:
    """Positions int64 [T, k], -1 where nothing was selected."""
    out = torch.full((positions.shape[0], c.k), -1, dtype=torch.int64)
    out[:, : positions.shape[1]] = torch.where(valid, positions, -1)
    return out


def slots(c: Call, positions: Tensor) -> Tensor:
    """Cache slots int64 [T, k] of positions, -1 for -1."""
    request = torch.arange(positions.shape[0])[:, None] // c.next_n
    safe = positions.clamp_min(0)
    return torch.where(positions < 0, -1, c.entry(request, safe // PAGE) * PAGE + safe % PAGE)


def finish(c: Call, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The result as it is returned: int32 [T, k] twice."""
    return slots.to(torch.int32), positions.to(torch.int32)


@dataclass(frozen=True)
class Stages:
    """The chain; every field is a function of the same name in this module until a model replaces it."""

    lengths: Callable[[Call], Tensor] = lengths
    scores: Callable[[Call], Tensor] = scores
    order: Callable[[Call, Tensor], Tensor] = order
    candidates: Callable[[Call, Tensor, Tensor], Tensor] = candidates
    select: Callable[[Call, Tensor, Tensor, int], tuple[Tensor, Tensor]] = select
    pad: Callable[[Call, Tensor, Tensor], Tensor] = pad
    slots: Callable[[Call, Tensor], Tensor] = slots
    finish: Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]] = finish


CORRECT = Stages()


def compute(stages: Stages, c: Call) -> tuple[Tensor, Tensor]:
    """Run the chain on one call: (slots, positions), int32 [T, k]."""
    lens = stages.lengths(c)
    order = stages.order(c, stages.scores(c))
    taken = stages.candidates(c, order, lens)
    positions = stages.pad(c, *stages.select(c, order, taken, c.k))
    return stages.finish(c, stages.slots(c, positions), positions)


def function(change: Mapping[str, Callable[..., Any]] | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """A top-k function under the calling convention, with some stages replaced and a memory of its own."""
    stages, memory = replace(CORRECT, **(change or {})), dict[str, Any]()  # type: ignore[arg-type]

    def staged_topk(logits: Tensor, context_lens: Tensor, block_table: Tensor, k: int) -> tuple[Tensor, Tensor]:
        return compute(stages, Call(logits, context_lens, block_table, k, memory))

    return staged_topk

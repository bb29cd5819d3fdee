"""The chunked compressor as small torch stages under its calling convention; correct until a model replaces one.

The state holds the last 16 tokens of each request, kv beside score, at row position mod 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity.ops.compressor.case import RATIO
from parity.pages.layout import DIM


@dataclass
class Call:
    """kv, score float32 [N, 256], ape float32 [4, 256], positions, slots int32 [N], state float32 [rows, 16, 512]."""

    kv: Tensor
    score: Tensor
    ape: Tensor
    positions: Tensor
    slots: Tensor
    state: Tensor
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> Tensor:
        """Index of the first token of each token's request in this call, int64 [N]."""
        count = torch.arange(len(self.slots))
        new = torch.ones_like(self.slots, dtype=torch.bool)
        new[1:] = self.slots[1:] != self.slots[:-1]
        return torch.where(new, count, 0).cummax(0).values


def phase(c: Call) -> Tensor:
    """Row of the position encoding of each token, int64 [N]."""
    return c.positions.long() % RATIO


def encoded(c: Call, phase: Tensor) -> Tensor:
    """Scores with their position encoding, float32 [N, 256]."""
    return c.score + c.ape[phase]


def closes(c: Call) -> Tensor:
    """Tokens that close a group, bool [N]."""
    return c.positions % RATIO == RATIO - 1


def rows(c: Call) -> Tensor:
    """Row of the state that each token's request owns, int64 [N]."""
    return c.slots.long()


def held(c: Call, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """(kv, score) [..., 256] of tokens of earlier calls."""
    found = c.state[row, position % c.state.shape[1]]
    return found[..., : 2 * DIM], found[..., 2 * DIM :]


def missing(c: Call, kv: Tensor, score: Tensor, absent: Tensor) -> tuple[Tensor, Tensor]:
    """What stands for tokens before the sequence's start: no value and no weight."""
    return torch.where(absent[..., None], 0.0, kv), torch.where(absent[..., None], -torch.inf, score)


def window(c: Call, last: Tensor, score: Tensor, stages: Stages) -> tuple[Tensor, Tensor]:
    """(kv, score) float32 [m, 8, 128] of the windows that the tokens `last` (int64 [m]) close."""
    back = torch.arange(2 * RATIO - 1, -1, -1)
    index = last[:, None] - back
    position = c.positions.long()[last][:, None] - back
    inside = index >= c.first[last][:, None]
    row = stages.rows(c)[last][:, None].expand_as(index)
    old_kv, old_score = stages.held(c, row, position.clamp_min(0))
    safe = index.clamp_min(0)
    kv = torch.where(inside[..., None], c.kv[safe], old_kv)
    both = torch.where(inside[..., None], score[safe], old_score)
    kv, both = stages.missing(c, kv, both, position < 0)
    return stages.lanes(c, kv), stages.lanes(c, both)


def lanes(c: Call, x: Tensor) -> Tensor:
    """[m, 8, 256] -> [m, 8, 128]: the first four tokens' first channels, the last four's others."""
    return torch.cat((x[:, :RATIO, :DIM], x[:, RATIO:, DIM:]), 1)


def pool(c: Call, kv: Tensor, score: Tensor) -> Tensor:
    """float32 [m, 128]."""
    return (kv * torch.softmax(score, 1)).sum(1)


def save(c: Call, row: Tensor, kv: Tensor, score: Tensor, kept: Tensor) -> None:
    """Keep the tokens `kept` (bool [N]) for later calls."""
    place = c.positions.long()[kept] % c.state.shape[1]
    c.state[row[kept], place] = torch.cat((kv, score), 1)[kept]


def recent(c: Call) -> Tensor:
    """The last 16 tokens of each request, which its state row can hold, bool [N]."""
    count = torch.arange(len(c.slots))
    size = torch.zeros(len(c.slots), dtype=torch.int64).scatter_reduce(0, c.first, count, "amax", include_self=True)
    return count > size[c.first] - c.state.shape[1]


@dataclass(frozen=True)
class Stages:
    """The chain; every field is a function of the same name in this module until a model replaces it."""

    phase: Callable[[Call], Tensor] = phase
    encoded: Callable[[Call, Tensor], Tensor] = encoded
    closes: Callable[[Call], Tensor] = closes
    rows: Callable[[Call], Tensor] = rows
    held: Callable[[Call, Tensor, Tensor], tuple[Tensor, Tensor]] = held
    missing: Callable[[Call, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = missing
    lanes: Callable[[Call, Tensor], Tensor] = lanes
    pool: Callable[[Call, Tensor, Tensor], Tensor] = pool
    recent: Callable[[Call], Tensor] = recent
    save: Callable[[Call, Tensor, Tensor, Tensor, Tensor], None] = save


CORRECT = Stages()


def compute(stages: Stages, c: Call) -> tuple[Tensor, Tensor]:
    """Run the chain on one call: (pooled float32 [N, 128], closes bool [N])."""
    score = stages.encoded(c, stages.phase(c))
    closing = stages.closes(c)
    pooled = torch.full((len(c.positions), DIM), torch.nan)
    last = closing.nonzero()[:, 0]
    if len(last):
        pooled[last] = stages.pool(c, *window(c, last, score, stages))
    stages.save(c, stages.rows(c), c.kv, score, stages.recent(c))
    return pooled, closing


def function(change: Mapping[str, Callable[..., Any]] | None = None) -> Callable[..., tuple[Tensor, Tensor]]:
    """A compressor function under the calling convention, with some stages replaced and a memory of its own."""
    stages, memory = replace(CORRECT, **(change or {})), dict[str, Any]()  # type: ignore[arg-type]

    def staged_compressor(
        kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, slots: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        return compute(stages, Call(kv, score, ape, positions, slots, state, memory))

    return staged_compressor

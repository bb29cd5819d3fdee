"""Walks the operands of a case in padded blocks that fit a memory budget, reading every visible key once.

Also holds ``Expected``, what the blocks' results are gathered into.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from parity.pages.layout import PAGE, find
from reference.exact import widen

TEMPORARIES = 12
"""float64 arrays of [rows, heads, keys] that an evaluation may hold at once, for the budget."""


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a contract allows, for some rows of a case. R rows, W keys, W the longest of their context lengths.

    logits    float64 [R, W]: the exact logits; NaN and infinities where the exact evaluation ends there; -inf past the
              length
    bound     float64 [R, W]: |returned - logits| may not exceed it; inf where float32 itself may overflow; 0 past the
              length
    free      bool [R, W]: an infinity or NaN is accepted (some intermediate of the contract may overflow)
    nan_ok    bool [R, W]: NaN is accepted beside the class of ``logits`` (an infinite scale, or 0 * inf by folding)
    rows      int64 [R]: row numbers, request * next_n + draft
    lens      int64 [R]: their context lengths
    """

    logits: torch.Tensor
    bound: torch.Tensor
    free: torch.Tensor
    nan_ok: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor

    @classmethod
    def empty(cls, operands: Any, rows: torch.Tensor | None) -> Expected:
        """Nothing filled in yet: every cell counts as past the length. ``rows`` None means all."""
        device = operands.context_lens.device
        count = operands.context_lens.numel()
        if rows is None:
            rows = torch.arange(count, device=device)
        elif rows.dim() != 1 or rows.is_floating_point():
            raise ValueError(f"rows: expected int64 [R], got {rows.dtype} {list(rows.shape)}")
        rows = rows.to(device=device, dtype=torch.int64)
        lens = operands.context_lens.reshape(-1)[rows].to(torch.int64)
        shape = (rows.numel(), int(lens.max()) if rows.numel() else 0)
        return cls(
            logits=torch.full(shape, -math.inf, dtype=torch.float64, device=device),
            bound=torch.zeros(shape, dtype=torch.float64, device=device),
            free=torch.zeros(shape, dtype=torch.bool, device=device),
            nan_ok=torch.zeros(shape, dtype=torch.bool, device=device),
            rows=rows,
            lens=lens,
        )

    def visible(self) -> torch.Tensor:
        """bool [R, W]: keys inside each row's context length."""
        return torch.arange(self.logits.shape[1], device=self.lens.device) < self.lens[:, None]

    def interval(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(low, high) float64 [R, W], rounded outward: [-inf, inf] for NaN and free cells, a point for exact
        infinities and zero bounds."""
        away = torch.tensor(math.inf, dtype=torch.float64, device=self.logits.device)
        low = torch.nextafter(self.logits - self.bound, -away)
        high = torch.nextafter(self.logits + self.bound, away)
        point = (self.bound == 0) | self.logits.isinf()
        open_ended = self.logits.isnan() | self.free | self.nan_ok | self.bound.isinf()
        low = torch.where(open_ended, -away, torch.where(point, self.logits, low))
        high = torch.where(open_ended, away, torch.where(point, self.logits, high))
        return low, high


@dataclasses.dataclass(frozen=True)
class Block:
    """Some rows of b requests against some of their keys, padded to r rows and S keys with zeros.

    raw_q [b, r, H, D] and raw_k [b, S, D] in the dtypes as stored; q, k, w [b, r, H], s [b, S] (or None) in float64.
    place  int64 [b, r]: index of the row in ``Expected``, -1 for padding; real [b, r, S]: cells inside the length."""

    raw_q: torch.Tensor
    raw_k: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    w: torch.Tensor
    s: torch.Tensor | None
    place: torch.Tensor
    real: torch.Tensor
    keys: slice

    @property
    def finite(self) -> bool:
        """Whether every operand is."""
        parts = [self.q, self.k, self.w] + ([] if self.s is None else [self.s])
        return all(bool(torch.isfinite(part).all()) for part in parts)

    def put(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the real cells of ``values`` [b, r, S] into ``target`` [R, W]."""
        given = self.place >= 0
        rows = self.place[given]
        old = target[rows, self.keys]
        target[rows, self.keys] = torch.where(self.real[given], values[given].to(old.dtype), old)


def blocks(operands: Any, layout: str, expected: Expected, chunk_bytes: int) -> Iterator[Block]:
    """Every visible cell of ``expected``'s rows exactly once. ValueError for a negative scale in a readable slot."""
    next_n, heads = operands.q.shape[1], operands.q.shape[2]
    budget = max(1, chunk_bytes // (8 * TEMPORARIES))
    requests = expected.rows // next_n
    members = _members(requests, expected.lens)
    while members:
        batch, members = _take(members, heads, budget)
        table = torch.tensor([request for request, _, _ in batch], device=expected.rows.device)
        longest = torch.tensor([length for _, _, length in batch], device=expected.rows.device)
        place = torch.nn.utils.rnn.pad_sequence([index for _, index, _ in batch], batch_first=True, padding_value=-1)
        width = batch[0][2]
        step = width
        if len(batch) == 1:  # a single request may be too large: then take its keys in pieces, whole pages each
            step = min(width, max(PAGE, budget // max(1, place.shape[1] * heads) // PAGE * PAGE))
        row_step = max(1, budget // max(1, len(batch) * heads * step))
        for start in range(0, width, step):
            keys = slice(start, min(start + step, width))
            raw_k, s = _read(operands, layout, table, longest, keys)
            k = widen(raw_k)
            for first in range(0, place.shape[1], row_step):
                yield _block(operands, expected, place[:, first : first + row_step], raw_k, k, s, keys)


def _members(requests: torch.Tensor, lens: torch.Tensor) -> list[tuple[int, torch.Tensor, int]]:
    """(request, indices of its rows, longest of their lengths), longest first, those without a visible key left out."""
    found = []
    order = torch.argsort(requests, stable=True)
    names, counts = torch.unique_consecutive(requests[order], return_counts=True)
    longest = torch.segment_reduce(lens[order].to(torch.float64), "max", lengths=counts) if counts.numel() else lens
    for name, index, length in zip(names.tolist(), order.split(counts.tolist()), longest.tolist(), strict=True):
        if length > 0:
            found.append((name, index, int(length)))
    return sorted(found, key=lambda member: -member[2])


def _take(members: list[Any], heads: int, budget: int) -> tuple[list[Any], list[Any]]:
    """The longest requests that fit the budget together (at least one), and the rest."""
    width, rows, count = members[0][2], 0, 0
    for _, index, _ in members:
        rows = max(rows, index.numel())
        if count and (count + 1) * rows * heads * width > budget:
            break
        count += 1
    return members[:count], members[count:]


def _read(
    operands: Any, layout: str, table: torch.Tensor, longest: torch.Tensor, keys: slice
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys [b, S, D] as stored and scales float64 [b, S] (or None); zeros where a request has no such key."""
    position = torch.arange(keys.start, keys.stop, device=table.device)
    there = position < longest[:, None]
    request, column = there.nonzero(as_tuple=True)
    key = position[column]
    page = operands.block_table[table[request], key // PAGE].to(torch.int64)
    slots = page * PAGE + key % PAGE
    values, scales = find(layout).read(operands.kv_cache, slots)
    if scales is not None and bool((scales < 0).any()):
        worst = int((scales < 0).to(torch.uint8).argmax())
        raise ValueError(
            f"kv_cache: the scale of slot {int(slots[worst])} is {float(scales[worst]):g}; "
            "a negative scale cannot pass the ReLU, expected zero or more"
        )
    flat = values.contiguous().view(torch.uint8)
    padded = flat.new_zeros(*there.shape, flat.shape[1])
    padded[there] = flat
    raw = padded.view(values.dtype)
    if scales is None:
        return raw, None
    s = torch.zeros(there.shape, dtype=torch.float64, device=table.device)
    s[there] = scales.to(torch.float64)
    return raw, s


def _block(
    operands: Any,
    expected: Expected,
    place: torch.Tensor,
    raw_k: torch.Tensor,
    k: torch.Tensor,
    s: torch.Tensor | None,
    keys: slice,
) -> Block:
    rows = torch.where(place >= 0, expected.rows[place.clamp_min(0)], expected.rows[place[:, :1]])
    next_n = operands.q.shape[1]
    q = operands.q if operands.q.stride(-1) == 1 else operands.q.contiguous()
    # Bytes, because not every torch indexes float8 tensors on every device.
    raw_q = q.view(torch.uint8)[rows // next_n, rows % next_n].view(q.dtype)
    position = torch.arange(keys.start, keys.stop, device=place.device)
    lens = torch.where(place >= 0, expected.lens[place.clamp_min(0)], 0)
    return Block(
        raw_q=raw_q,
        raw_k=raw_k,
        q=widen(raw_q),
        k=k,
        w=widen(operands.weights[rows]),
        s=s,
        place=place,
        real=position < lens[..., None],
        keys=keys,
    )

"""Faults of a logits function that neither one call nor a look at its inputs afterwards shows: what is kept between
calls, inputs written and restored, writes beside the result, memory that torch does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.ops.fault import Function, collector
from parity.ops.paged_logits.faults import staged as ok
from parity.ops.paged_logits.faults.staged import PAGE, Call
from parity.ops.shared.spoiling import restored, turn

MODELS, fault = collector("paged_logits")


def _last_cell(out: Tensor, c: Call, wrong: bool) -> Tensor:
    lens = c.context_lens.reshape(-1)
    if wrong and out.numel() and int(lens.max()):
        out[int(lens.argmax()), int(lens.max()) - 1] = 0.5
    return out


def _left(c: Call, total: Tensor) -> Tensor:
    """Sums, and what a larger call has left behind those of this one, added."""
    kept = c.memory.get("sums")
    if kept is None or kept.numel() <= total.numel():
        c.memory["sums"] = total.reshape(-1).clone()
        return total
    kept[: total.numel()] = total.reshape(-1)
    return total + kept[total.numel()]


def _workspace(c: Call, total: Tensor) -> Tensor:
    """The same sums through a workspace that is kept and cleared."""
    size, kept = total.numel(), c.memory.get("sums")
    if kept is None or kept.numel() < size:
        kept = c.memory["sums"] = torch.empty(size)
    part = kept[:size].zero_().view(total.shape)
    return part.add_(total)


def _columns(c: Call, rows: Tensor, logits: Tensor) -> Tensor:
    """Visible cells bool [R, K], cached by the shape alone: only columns, which no other argument decides."""
    key = f"columns {logits.shape[1]}"
    columns = c.memory.get(key)
    if columns is None:
        columns = c.memory[key] = torch.arange(logits.shape[1])
    return columns < ok.lengths(c, rows)[:, None]


def _beside(place: Callable[[Tensor], int]) -> Callable[[Function], Function]:
    """Into `out=`, and one element more at a place counted from its first."""

    def wrap(f: Function) -> Function:
        def call(*, out: Tensor | None = None, **named: Any) -> Tensor:
            found = f(**named)
            if out is None:
                return found
            whole = out.as_strided((out.untyped_storage().nbytes() // out.itemsize,), (1,), 0)
            at = int(out.storage_offset()) + place(out)
            out.copy_(found)
            if 0 <= at < len(whole) and out.numel():
                whole[at] = 0.0
            return out

        return call

    return wrap


def _numpy(out: Tensor, size: int) -> Tensor:
    np.empty(size, np.uint8)
    return out


fault(
    "fifth-call-of-a-shape (launch, stale): a workspace is made for four calls of a shape, and the fifth writes past it"
).by(finish=lambda c, out: _last_cell(out, c, turn(c.memory, c.rows, c.width, c.heads) >= 4))
fault("larger-call-left-behind (head-sum, stale): sums begin with what a larger call before has left").by(
    head_sum=lambda c, x: _left(c, ok.head_sum(c, x))
)
fault("workspace-kept (head-sum, stale): sums are made in a workspace that is kept between calls, and cleared").by(
    head_sum=lambda c, x: _workspace(c, ok.head_sum(c, x)).clone(),
    equivalent="The part of the workspace that a call uses is cleared before it adds, and the result is a copy of it.",
)
fault("plan-kept-by-shape (mask, stale): what depends on the shape alone is kept by the shape").by(
    write=lambda c, out, rows, logits, lens: ok.write(
        c, out, rows, torch.where(_columns(c, rows, logits), logits, -torch.inf), lens
    ),
    equivalent=(
        "The numbers of the columns depend on nothing but their count, by which they are kept; lengths are read anew, "
        "and what they hide is -inf either way or unspecified."
    ),
)
fault("weights-restored (head-weight, stale): the gates are overwritten during the call and put back").by(
    wrap=restored("weights")
)
fault("pool-restored (gather, stale): a page of the cache is overwritten during the call and put back").by(
    wrap=restored("kv_cache")
)
fault("row-after-the-last (launch, padding): the grid is one row too large, and writes behind the result").by(
    wrap=_beside(lambda out: out.shape[0] * out.stride(0))
)
fault("row-before-the-first (launch, padding): a block without a row writes in front of the result").by(
    wrap=_beside(lambda out: -out.stride(0))
)
fault("tile-past-the-width (mask, padding): the last tile writes past the last column of a result with gaps").by(
    wrap=_beside(lambda out: out.shape[1] if out.stride(0) > out.shape[1] else 0x7FFFFFFF)
)
fault("pool-copied-by-numpy (memory, memory): numpy copies the whole pool at every call").by(
    finish=lambda c, out: _numpy(out, c.kv_cache.untyped_storage().nbytes())
)
fault("gather-by-numpy (memory, memory): every row gathers all its pages at once, through numpy").by(
    finish=lambda c, out: _numpy(out, c.rows * c.block_table.shape[1] * PAGE * 256)
)

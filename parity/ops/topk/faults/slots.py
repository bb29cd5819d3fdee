"""Faults of padding, stale indices, the mapping from positions to cache slots, and of a top-k on a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.shared.spoiling import lent, restored, turn
from parity.ops.topk.faults import staged as ok
from parity.ops.topk.faults.members import Chosen, last_first, mapped, rows_of, twice
from parity.ops.topk.faults.staged import PAGE, Call

MODELS, fault = collector("topk")


# ----------------------------------------------------------------------------------------- padding and stale indices
def _repeated(c: Call, positions: Tensor) -> Tensor:
    last = ((positions >= 0).sum(1, keepdim=True) - 1).clamp_min(0)
    return torch.where(positions < 0, torch.gather(positions, 1, last), positions)


def _kept(c: Call, positions: Tensor) -> Tensor:
    before = c.memory.get(str(c.k))
    c.memory[str(c.k)] = positions
    if before is None:
        return positions
    rows = min(len(before), len(positions))
    mixed = positions.clone()
    mixed[:rows] = torch.where(positions[:rows] < 0, before[:rows], positions[:rows])
    return mixed


def _unwritten(c: Call, slots: Tensor, positions: Tensor) -> Chosen:
    out = torch.empty((2, *slots.shape), dtype=torch.int32)
    some = ok.lengths(c) > 0
    out[0, some], out[1, some] = slots[some].to(torch.int32), positions[some].to(torch.int32)
    return out[0], out[1]


fault(
    "topk-padded-with-0 (topk, padding): index 0 stands where -1 should [vllm-project/vllm#51593, radixark/miles#1122]"
).by(pad=lambda c, positions, valid: ok.pad(c, positions, valid).clamp_min(0))
fault("topk-padded-with-last (topk, padding): the last valid index is repeated where -1 should stand").by(
    pad=lambda c, positions, valid: _repeated(c, ok.pad(c, positions, valid))
)
fault("topk-padding-in-front (topk, padding): -1 stands before the valid ones").by(
    pad=lambda c, positions, valid: ok.pad(c, positions, valid).flip(1)
)
fault("topk-all-when-short (topk, padding): rows no longer than k get 0 to k - 1 without end").by(
    pad=lambda c, positions, valid: torch.where(
        (ok.lengths(c) <= c.k)[:, None], torch.arange(c.k), ok.pad(c, positions, valid)
    )
)
fault("topk-buffer-stale (topk, stale): places past the valid ones keep the indices of the call before").by(
    pad=lambda c, positions, valid: _kept(c, ok.pad(c, positions, valid))
)
fault("topk-empty-rows-unwritten (topk, stale): rows without keys are skipped, and their places never written").by(
    finish=_unwritten
)


# ------------------------------------------------------------------------------------------------ positions to slots
def _sorted(slots: Tensor) -> Tensor:
    return torch.where(slots < 0, -1, torch.where(slots < 0, 1 << 40, slots).sort(1).values)


def _dense_entry(c: Call, column: Tensor) -> Tensor:
    table = c.block_table
    if not table.numel():
        return column * 0
    flat = table.as_strided((table.untyped_storage().nbytes() // 4 - table.storage_offset(),), (1,))
    place = rows_of(c)[:, None] // c.next_n * table.shape[1] + column
    return flat[place.remainder(flat.numel())].to(torch.int64)


def _dense_scores(c: Call) -> Tensor:
    rows, width = c.logits.shape
    flat = c.logits.as_strided((c.logits.untyped_storage().nbytes() // 4,), (1,), 0)
    return flat[: rows * width].reshape(rows, width)


fault(
    "slots-table-row-0 (topk-to-page, rows): positions are mapped through row 0's table "
    "[sgl-project/sglang#32490, vllm-project/vllm#41834]"
).by(slots=mapped(lambda c, row: row * 0))
fault(
    "slots-table-row-is-query-row (topk-to-page, rows): the table row is the query row, without division by next_n"
).by(slots=mapped(lambda c, row: row))
fault(
    "slots-without-modulo (topk-to-page, bytes): the position is added to the page's first slot without modulo 64 "
    "[sgl-project/sglang#32490, vllm-project/vllm#41834]"
).by(
    slots=lambda c, p: torch.where(
        p < 0, -1, c.entry(rows_of(c)[:, None] // c.next_n, p.clamp_min(0) // PAGE) * PAGE + p
    )
)
fault("slots-pages-of-128 (topk-to-page, bytes): pages are taken to hold 128 slots").by(
    slots=lambda c, p: torch.where(
        p < 0, -1, c.entry(rows_of(c)[:, None] // c.next_n, p.clamp_min(0) // 128) * 128 + p.clamp_min(0) % 128
    )
)
fault("slots-unmapped (topk-to-page, formula): positions are returned as slots").by(
    slots=lambda c, positions: positions
)
fault(
    "slots-minus-1-mapped (topk-to-page, padding): -1 is mapped like a position instead of kept "
    "[sgl-project/sglang#32771]"
).by(slots=lambda c, p: c.entry(rows_of(c)[:, None] // c.next_n, p // PAGE) * PAGE + p % PAGE)
fault("slots-sorted (topk-to-page, selection): slots are sorted, and no longer belong to their positions").by(
    slots=lambda c, positions: _sorted(ok.slots(c, positions))
)
fault("slots-table-stride (topk-to-page, rows): the table's row stride is taken to be its width").by(
    slots=lambda c, p: torch.where(p < 0, -1, _dense_entry(c, p.clamp_min(0) // PAGE) * PAGE + p.clamp_min(0) % PAGE)
)
fault("slots-int16 (topk-to-page, integers): slots pass through 16-bit integers").by(
    finish=lambda c, slots, positions: (slots.to(torch.int16).to(torch.int32), positions.to(torch.int32))
)
fault("slots-float32 (topk-to-page, integers): slots pass through float32").by(
    finish=lambda c, slots, positions: (slots.to(torch.float32).to(torch.int32), positions.to(torch.int32))
)
fault("positions-12-bits (topk, integers): positions are kept in 12 bits beside the score").by(
    pad=lambda c, positions, valid: ok.pad(c, positions & 0xFFF, valid)
)


# ----------------------------------------------------------------------------------- strides, races, dispatch, memory
def _overwritten(c: Call, positions: Tensor) -> Tensor:
    c.memory["calls"] = c.memory.get("calls", 0) + 1
    return twice(c, positions) if c.memory["calls"] % 3 == 0 else positions


def _either(c: Call, order: Tensor, taken: Tensor, k: int) -> Chosen:
    c.memory["calls"] = c.memory.get("calls", 0) + 1
    return last_first(c, order, taken, k) if c.memory["calls"] % 2 else ok.select(c, order, taken, k)


def _frozen(c: Call, order: Tensor, lens: Tensor) -> Tensor:
    short = c.memory.setdefault("short", bool(len(lens)) and int(lens.max()) <= c.k)
    inside = ok.candidates(c, order, lens)
    return inside & (torch.arange(order.shape[1]) < c.k) if short else inside


def _spent(c: Call, found: Any) -> Any:
    torch.empty((c.rows, c.k, c.logits.shape[1]), dtype=torch.uint8)
    return found


fault("topk-logits-stride (topk, rows): logits are read as if they were contiguous").by(scores=_dense_scores)
fault(
    "topk-atomic-append (topk, race): "
    "members are appended by atomics without a barrier, and now and then one is overwritten"
).by(pad=lambda c, positions, valid: _overwritten(c, ok.pad(c, positions, valid)))
fault("topk-tie-race (topk, race): which of equal scores is kept differs from call to call").by(select=_either)
fault(
    "take-all-frozen (dispatch, dispatch): "
    "the branch 'no longer than k: take all' is decided by the first call and kept, as in a captured graph "
    "[local-inference-lab/vllm#429]"
).by(candidates=_frozen)
fault("topk-one-hot (memory, memory): a mask [rows, k, width] is built").by(
    finish=lambda c, slots, positions: _spent(c, ok.finish(c, slots, positions))
)
fault("topk-small-k-other-kernel (dispatch, dispatch): k of 64 and less goes to a kernel that compares bf16").by(
    order=lambda c, scores: ok.order(c, scores.to(torch.bfloat16).to(torch.float32) if c.k <= 64 else scores)
)


# --------------------------------------------------------------------------------------------------- between calls
def _handed_out(c: Call, found: Chosen) -> Chosen:
    slots, positions = found
    return lent(c.memory, "slots", slots), lent(c.memory, "positions", positions)


def _fifth(c: Call, found: Chosen) -> Chosen:
    if turn(c.memory, c.rows, c.logits.shape[1], c.k) >= 4 and c.rows:
        found[1][-1, 0] = -1
    return found


fault(
    "topk-result-buffers-shared (topk, stale): "
    "every call returns the same two buffers, so that a later call changes an earlier result"
).by(finish=lambda c, slots, positions: _handed_out(c, ok.finish(c, slots, positions)))
fault(
    "topk-fifth-call-of-a-shape (topk, stale): from the fifth call of a shape on the last row loses its best position"
).by(finish=lambda c, slots, positions: _fifth(c, ok.finish(c, slots, positions)))
fault("topk-logits-restored (topk, stale): the logits are overwritten during the call and put back").by(
    wrap=restored("logits")
)
fault("topk-buffers-kept (topk, stale): the result is made in buffers that are kept, and copied").by(
    finish=lambda c, slots, positions: tuple(part.clone() for part in _handed_out(c, ok.finish(c, slots, positions))),
    equivalent="All of the part of the buffers that a call uses is written by it, and what it returns is a copy.",
)

"""Faults of the chunked compressor: groups, overlap and state between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.ops.compressor.faults import staged as ok
from parity.ops.compressor.faults.staged import DIM, RATIO, Call
from parity.ops.fault import Function, collector
from parity.ops.shared.spoiling import lent, restored, turn

MODELS, fault = collector("compressor")


def local(c: Call) -> Tensor:
    """Place of each token in its request's part of this call."""
    return torch.arange(len(c.slots)) - c.first


def start(c: Call) -> Tensor:
    """Position of the first token of each token's request in this call."""
    return c.positions.long()[c.first]


def last_of_call(c: Call) -> Tensor:
    """bool [N]: the last token of each request in this call."""
    last = torch.ones(len(c.slots), dtype=torch.bool)
    last[:-1] = c.slots[1:] != c.slots[:-1]
    return last


def batch_row(c: Call) -> Tensor:
    """Number of each token's request in this call."""
    new = torch.zeros(len(c.slots), dtype=torch.int64)
    new[1:] = (c.slots[1:] != c.slots[:-1]).to(torch.int64)
    return new.cumsum(0)


def _without_overlap(c: Call, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    kv, score = ok.held(c, row, position)
    own = torch.arange(2 * RATIO) >= RATIO
    return kv, torch.where(own[:, None], score, -torch.inf)


def _last_tokens(c: Call, count: int) -> Tensor:
    index = torch.arange(len(c.slots))
    ends = torch.zeros(len(c.slots), dtype=torch.int64).scatter_reduce(0, c.first, index, "amax")
    return index > ends[c.first] - count


def _ring(c: Call, row: Tensor, kv: Tensor, score: Tensor, size: int) -> None:
    kept = _last_tokens(c, size)
    c.state[row[kept], c.positions.long()[kept] % size] = torch.cat((kv, score), 1)[kept]


def _saved_at(c: Call, row: Tensor, kv: Tensor, score: Tensor, kept: Tensor, place: Tensor) -> None:
    c.state[row[kept], place[kept] % c.state.shape[1]] = torch.cat((kv, score), 1)[kept]


def _oldest_cleared(c: Call, row: Tensor, kv: Tensor, score: Tensor, kept: Tensor) -> None:
    ok.save(c, row, kv, score, kept)
    newest = c.memory.setdefault("newest", {})
    for slot, first, end in zip(row.tolist(), start(c).tolist(), (c.positions + 1).tolist(), strict=True):
        newest[slot] = end if first == 0 else max(newest.get(slot, 0), end)
    for slot in set(row.tolist()):
        c.state[slot, newest[slot] % c.state.shape[1]] = 0.0


def _ends_closed(c: Call) -> Tensor:
    ends = last_of_call(c) & ok.closes(c)
    closed = torch.zeros(int(batch_row(c).max()) + 1 if len(c.slots) else 1, dtype=torch.bool)
    closed[batch_row(c)[ends]] = True
    return closed[batch_row(c)]


def _after_longest(c: Call, row: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    longest = c.memory.setdefault("longest", {})
    found = []
    for slot, first in zip(c.slots.tolist(), start(c).tolist(), strict=True):
        longest[slot] = first if first == 0 else max(longest.get(slot, 0), first)
        found.append(longest[slot] - first)
    shift = dict(zip(c.slots.tolist(), found, strict=True))
    late = torch.tensor([shift.get(slot, 0) for slot in row[:, 0].tolist()])[:, None]
    for slot, last in zip(c.slots.tolist(), c.positions.tolist(), strict=True):
        longest[slot] = max(longest[slot], last + 1)
    return ok.held(c, row, position + late)


def _late(c: Call, kv: Tensor, score: Tensor) -> Tensor:
    c.memory["calls"] = c.memory.get("calls", 0) + 1
    if c.memory["calls"] % 5 == 0:
        kv = torch.cat((kv[:, :-1], kv[:, -2:-1]), 1)
    return ok.pool(c, kv, score)


def _scaling(f: Function) -> Function:
    def call(**named: Any) -> tuple[Tensor, Tensor]:
        named["kv"].mul_(0.5)
        pooled, closes = f(**named)
        return pooled * 2, closes

    return call


def _handed_out(f: Function) -> Function:
    memory: dict[str, Any] = {}

    def call(**named: Any) -> tuple[Tensor, Tensor]:
        pooled, closes = f(**named)
        return lent(memory, "pooled", pooled), lent(memory, "closes", closes)

    return call


def _fifth(c: Call, kv: Tensor, score: Tensor) -> Tensor:
    pooled = ok.pool(c, kv, score)
    return pooled + 1 if turn(c.memory, len(c.slots)) >= 4 else pooled


fault(
    "ape-chunk-local (compressor-pool, chunks): "
    "the in-group bias is indexed by the place in the chunk, not by the position modulo 4 [JustVugg/colibri#1554]"
).by(phase=lambda c: local(c) % RATIO)
fault("ape-missing (compressor-pool, formula): the in-group bias is left out").by(encoded=lambda c, phase: c.score)
fault("ape-shifted (compressor-pool, formula): the in-group bias is one token late").by(
    phase=lambda c: (c.positions.long() + 3) % RATIO
)
fault("ape-twice (compressor-pool, formula): the in-group bias is added twice").by(
    encoded=lambda c, phase: ok.encoded(c, phase) + c.ape[phase]
)
fault(
    "group-end-chunk-local (compressor-pool, chunks): a group's end is decided by the place in the chunk "
    "[vllm-project/tpu-inference#3536, vllm-project/vllm#55927]"
).by(closes=lambda c: local(c) % RATIO == RATIO - 1)
fault(
    "partial-group-stored (compressor-pool, chunks): a partly filled last group is stored at the end of a call "
    "[vllm-project/tpu-inference#3536, vllm-project/vllm#55927]"
).by(closes=lambda c: ok.closes(c) | last_of_call(c))
fault("group-of-first-token-stored (compressor-pool, chunks): a group is stored when its first token arrives").by(
    closes=lambda c: c.positions % RATIO == 0
)
fault(
    "overlap-empty-each-call (compressor-pool, chunks): the overlap lane is empty for the first group of every call "
    "[jundot/omlx#2271, ml-explore/mlx-lm#1189]"
).by(held=_without_overlap)
fault("overlap-missing (compressor-pool, formula): windows do not overlap: the four tokens before have no weight").by(
    pool=lambda c, kv, score: ok.pool(c, kv[:, RATIO:], score[:, RATIO:])
)
fault(
    "overlap-lanes-swapped (compressor-pool, formula): the overlap takes the last channels and the own tokens the first"
).by(lanes=lambda c, x: torch.cat((x[:, :RATIO, DIM:], x[:, RATIO:, :DIM]), 1))
fault(
    "ring-last-4-of-call (compressor-pool, chunks): only the last 4 tokens of a call are kept "
    "[sgl-project/sglang#34189]"
).by(recent=lambda c: _last_tokens(c, 4))
fault(
    "ring-of-8 (compressor-pool, chunks): "
    "the ring holds 8 tokens, so rejected drafts overwrite what the next window reads"
).by(held=lambda c, row, p: ok.held(c, row, p % 8), save=lambda c, row, kv, score, kept: _ring(c, row, kv, score, 8))
fault("ring-row-chunk-local (compressor-pool, chunks): tokens are kept at their place in the call modulo 16").by(
    save=lambda c, row, kv, score, kept: _saved_at(c, row, kv, score, kept, local(c))
)
fault("state-not-kept-when-closed (compressor-pool, chunks): a call that ends on a closed group keeps nothing").by(
    recent=lambda c: ok.recent(c) & ~_ends_closed(c)
)
fault(
    "first-window-zero-scores (compressor-pool, padding): "
    "the first group's missing predecessor has score 0 instead of -inf [huggingface/transformers#45938]"
).by(
    missing=lambda c, kv, score, absent: (
        torch.where(absent[..., None], 0.0, kv),
        torch.where(absent[..., None], 0.0, score),
    )
)
fault(
    "first-window-stale (compressor-pool, stale): the first group reads what the sequence before left in the state"
).by(
    missing=lambda c, kv, score, absent: (kv, score), held=lambda c, row, p: ok.held(c, row, torch.where(p == 0, 12, p))
)
fault(
    "state-row-is-batch-index (compressor-pool, rows): "
    "the state row is the place in the batch instead of the request's slot "
    "[hw-native-sys/pypto-lib#1260, ggml-org/llama.cpp#26741]"
).by(rows=lambda c: batch_row(c) % c.state.shape[0])
fault("state-row-0 (compressor-pool, rows): all requests share state row 0").by(rows=lambda c: c.slots.long() * 0)
fault(
    "rollback-ignored (compressor-pool, chunks): after rejected drafts the state goes on from the longest length seen"
).by(held=_after_longest)
fault("state-bf16 (compressor-pool, precision): the state is kept in bf16").by(
    save=lambda c, row, kv, score, kept: ok.save(
        c, row, kv.to(torch.bfloat16).to(torch.float32), score.to(torch.bfloat16).to(torch.float32), kept
    )
)
fault("pool-weights-bf16 (compressor-pool, precision): softmax weights are rounded to bf16").by(
    pool=lambda c, kv, score: (kv * torch.softmax(score, 1).to(torch.bfloat16).to(torch.float32)).sum(1)
)
fault("pool-inputs-bf16 (compressor-pool, precision): projections are rounded to bf16 before they are pooled").by(
    pool=lambda c, kv, score: ok.pool(c, kv.to(torch.bfloat16).to(torch.float32), score)
)
fault("pool-mean (compressor-pool, formula): the mean over the window stands for the weighted sum").by(
    pool=lambda c, kv, score: (kv * (score > -torch.inf)).sum(1) / (score > -torch.inf).sum(1)
)
fault("pool-softmax-over-channels (compressor-pool, formula): the softmax runs over channels").by(
    pool=lambda c, kv, score: (kv * torch.softmax(score, 2)).nan_to_num(0.0).sum(1)
)
fault(
    "chunk-of-one-other-kernel (dispatch, dispatch): "
    "a call with one token a request goes to a path without position encoding"
).by(encoded=lambda c, phase: c.score if len(c.slots) == len(c.slots.unique()) else ok.encoded(c, phase))
fault(
    "token-raced (compressor-pool, race): "
    "now and then the newest token is not in the state yet when its group is pooled"
).by(pool=_late)
fault("state-aliased (compressor-pool, stale): the projections of the call are scaled in place").by(wrap=_scaling)
fault(
    "ring-oldest-cleared (compressor-pool, chunks): "
    "the oldest of the 16 tokens in the state is cleared after every call"
).by(
    save=_oldest_cleared,
    equivalent=(
        "A call begins at most 8 tokens before the newest one ever taken, at position e - 8 or later, and its first "
        "window reads 7 tokens back from there: position e - 15 or later, e the newest plus 1. The row cleared is that "
        "of position e - 16, which nothing reads before it is written again."
    ),
)
fault("pooled-buffer-shared (compressor-pool, stale): every call returns the same two buffers").by(wrap=_handed_out)
fault("pool-fifth-call-of-a-shape (compressor-pool, stale): from the fifth call of a shape on keys are wrong").by(
    pool=_fifth
)
fault("projections-restored (compressor-pool, stale): projections are overwritten during the call and put back").by(
    wrap=restored("kv")
)

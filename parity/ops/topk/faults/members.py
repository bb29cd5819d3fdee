"""Faults of top-k selection: lengths, the order of scores, and members lost or duplicated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.topk.faults import staged as ok
from parity.ops.topk.faults.staged import PAGE, Call

MODELS, fault = collector("topk")
Chosen = tuple[Tensor, Tensor]


def bits(c: Call, scores: Tensor) -> Tensor:
    return (scores + 0.0).contiguous().view(torch.int32).to(torch.int64)


def by(convert: Callable[[Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
    """Order by converted scores."""
    return lambda c, scores: ok.order(c, convert(scores).to(torch.float32))


def fewer(c: Call, order: Tensor, taken: Tensor, k: int) -> Chosen:
    return ok.select(c, order, taken, max(1, k))


def lens_of(c: Call, row: Tensor) -> Tensor:
    return c.context_lens.reshape(-1)[row].to(torch.int64)


def rows_of(c: Call) -> Tensor:
    return torch.arange(c.rows)


def mapped(request: Callable[[Call, Tensor], Tensor]) -> Callable[[Call, Tensor], Tensor]:
    """Slots through the table row that `request` gives for row numbers [T, 1]."""

    def slots(c: Call, positions: Tensor) -> Tensor:
        safe = positions.clamp_min(0)
        page = c.entry(request(c, rows_of(c)[:, None]), safe // PAGE)
        return torch.where(positions < 0, -1, page * PAGE + safe % PAGE)

    return slots


# ------------------------------------------------------------------------------------------------------------ lengths
fault(
    "topk-length-ignored (topk, padding): row lengths are ignored, so what stands in the tail is selected "
    "[vllm-project/vllm#42169, tenstorrent/tt-metal#49359]"
).by(
    candidates=lambda c, order, lens: torch.ones_like(order, dtype=torch.bool),
    pad=lambda c, positions, valid: ok.pad(c, positions, torch.arange(positions.shape[1]) < ok.lengths(c)[:, None]),
)
fault("topk-length-row-0 (topk, rows): every row has the length of row 0").by(
    lengths=lambda c: lens_of(c, rows_of(c) * 0)
)
fault("topk-length-last-draft (topk, rows): all draft rows have the last one's length").by(
    lengths=lambda c: lens_of(c, rows_of(c) // c.next_n * c.next_n + c.next_n - 1)
)
fault("topk-length-one-less (topk, padding): the newest key is never selected").by(
    lengths=lambda c: (ok.lengths(c) - 1).clamp_min(0)
)
fault("topk-length-one-more (topk, padding): one place past the length may be selected").by(
    lengths=lambda c: (ok.lengths(c) + 1).clamp_max(c.logits.shape[1])
)
fault("topk-empty-row-selects (topk, padding): a row without keys selects position 0").by(
    lengths=lambda c: ok.lengths(c).clamp_min(1)
)


# -------------------------------------------------------------------------------------------------------------- order
def last_first(c: Call, order: Tensor, taken: Tensor, k: int) -> Chosen:
    positions, valid = ok.select(c, order.flip(1), taken.flip(1), k)
    return order.shape[1] - 1 - positions, valid


fault(
    "topk-bits-unsigned (topk, selection): float bits are compared as unsigned integers "
    "[vllm-project/vllm#27568, NVIDIA/cudnn-frontend#445]"
).by(order=lambda c, scores: bits(c, scores) & 0xFFFFFFFF)
fault("topk-bits-signed (topk, selection): float bits are compared as signed integers").by(order=bits)
fault(
    "topk-fp16-keys (topk, selection): selection works on fp16 keys alone "
    "[vllm-project/vllm#27568, NVIDIA/cudnn-frontend#445]"
).by(order=by(lambda x: x.to(torch.float16)))
fault("topk-bf16-keys (topk, selection): selection works on bf16 keys alone").by(
    order=by(lambda x: x.to(torch.bfloat16))
)
fault("topk-24-bit-keys (topk, selection): the last of four radix passes is missing").by(
    order=lambda c, scores: ok.order(c, scores) >> 8
)
fault("topk-magnitudes (topk, selection): the largest magnitudes are selected").by(order=by(torch.abs))
fault("topk-smallest (topk, selection): the smallest scores are selected").by(
    order=lambda c, scores: -ok.order(c, scores)
)
fault("topk-clamped (topk, selection): scores are clamped to the fp16 range").by(
    order=by(lambda x: x.clamp(-65504, 65504))
)
fault("topk-exponential (topk, selection): scores pass through exp, which overflows").by(order=by(torch.exp))
fault("topk-neginf-dropped (topk, selection): -inf inside the window counts as masked").by(
    candidates=lambda c, order, lens: ok.candidates(c, order, lens) & (c.logits > -torch.inf)
)
fault("topk-nonpositive-dropped (topk, selection): scores that are not positive are not selected").by(
    candidates=lambda c, order, lens: ok.candidates(c, order, lens) & ~(c.logits <= 0)
)
fault("topk-nan-dropped (topk, selection): NaN scores are not selected, even where the row has no more keys than k").by(
    candidates=lambda c, order, lens: ok.candidates(c, order, lens) & ~c.logits.isnan()
)
fault("topk-ties-to-the-last (topk, selection): of equal scores the last position wins").by(
    select=last_first,
    equivalent=(
        "Ties are free: any member of a group of equal scores may fill the last places, and the convention does "
        "not order the result. So every output of the model is a legal output of the correct function."
    ),
)
fault("topk-minus-zero-first (topk, selection): -0 sorts below +0").by(
    order=lambda c, scores: torch.where((scores == 0) & scores.signbit(), -1, ok.order(c, scores) * 2),
    equivalent="-0 and +0 are the same number, so which of them is selected is a tie, and ties are free.",
)


# ---------------------------------------------------------------------------------------------------------- selection
def _capped(cap: int, coarse: int) -> Callable[[Call, Tensor, Tensor, int], Chosen]:
    """Of the members that share the threshold's coarse bin the first `cap` are kept as candidates."""

    def select(c: Call, order: Tensor, taken: Tensor, k: int) -> Chosen:
        kept = min(k, order.shape[1])
        lowest = torch.where(taken, order, -(1 << 40))
        threshold = torch.sort(lowest, dim=1, descending=True).values[:, kept - 1 : kept] >> coarse
        inside = taken & (order >> coarse == threshold)
        lost = inside & (inside.cumsum(1) > cap)
        return ok.select(c, torch.where(lost, -(1 << 39), order), taken, k)

    return select


def twice(c: Call, positions: Tensor) -> Tensor:
    found = positions.clone()
    if c.k > 1:
        last = (positions >= 0).sum(1) - 1
        some = (last > 0).nonzero()[:, 0]
        found[some, last[some]] = positions[some, 0]
    return found


def _twice_at_tie(c: Call, positions: Tensor) -> Tensor:
    found = positions.clone()
    lens = ok.lengths(c)
    if c.k > 1 and c.logits.shape[1] > c.k:
        for row in range(min(c.rows, 64)):
            n = int(lens[row])
            values = c.logits[row, :n].sort(descending=True).values
            if n > c.k and bool(values[c.k - 1] == values[c.k]):
                found[row, c.k - 1] = found[row, c.k - 2]
    return found


def _strictly_above(c: Call, order: Tensor, taken: Tensor, k: int) -> Chosen:
    positions, valid = ok.select(c, order, taken, k)
    if not positions.shape[1] or order.shape[1] <= k:
        return positions, valid
    chosen = torch.gather(order, 1, positions)
    longer = taken.sum(1, keepdim=True) > k
    return positions, valid & (~longer | (chosen > chosen[:, -1:]) | (torch.arange(positions.shape[1]) == 0))


def _halves(c: Call, order: Tensor, taken: Tensor, k: int) -> Chosen:
    middle = order.shape[1] // 2
    lens = taken.sum(1)
    if middle < 1 or k < 2 or order.shape[1] <= k or int(lens.min()) <= k:
        return ok.select(c, order, taken, k)
    left = ok.select(c, order[:, :middle], taken[:, :middle], (k + 1) // 2)
    right = ok.select(c, order[:, middle:], taken[:, middle:], k // 2)
    positions, valid = torch.cat([left[0], right[0] + middle], 1), torch.cat([left[1], right[1]], 1)
    front = torch.sort(valid.to(torch.int8), dim=1, descending=True, stable=True).indices
    return torch.gather(positions, 1, front), torch.gather(valid, 1, front)


fault(
    "topk-candidates-capped (topk, selection): "
    "the candidate buffer keeps the first 4,096 members of the threshold's bin "
    "[sgl-project/sglang#30512, sgl-project/sglang#35257]"
).by(select=_capped(4096, 16))
fault(
    "topk-candidates-capped-1024 (topk, selection): "
    "the candidate buffer keeps the first 1,024 members of the threshold's bin"
).by(select=_capped(1024, 16))
fault(
    "topk-duplicate (topk, selection): the best index stands twice, and the last one is lost "
    "[NVIDIA/TensorRT-LLM#15381]"
).by(pad=lambda c, positions, valid: twice(c, ok.pad(c, positions, valid)))
fault(
    "topk-duplicate-at-ties (topk, selection): where the k-th place is tied, the last place repeats the one before"
).by(pad=lambda c, positions, valid: _twice_at_tie(c, ok.pad(c, positions, valid)))
fault(
    "topk-ties-lost (topk, selection): only scores above the threshold are kept, and ties at it are not filled in"
).by(select=_strictly_above)
fault("topk-one-less (topk, selection): k - 1 members are selected").by(select=lambda c, o, t, k: fewer(c, o, t, k - 1))
fault("topk-half-of-k (topk, selection): k of the other model: half of the places are filled [ROCm/ATOM#1591]").by(
    select=lambda c, o, t, k: fewer(c, o, t, k // 2)
)
fault("topk-at-most-1024 (topk, launch): a block of 1,024 threads fills at most 1,024 places").by(
    select=lambda c, o, t, k: fewer(c, o, t, min(k, 1024))
)
fault("topk-first-2048-scores (topk, launch): the first 2,048 scores of a row are looked at").by(
    candidates=lambda c, order, lens: ok.candidates(c, order, lens.clamp_max(2048))
)
fault(
    "topk-last-block-lost (topk, launch): scores past the last multiple of 1,024 are left out in rows longer than that"
).by(candidates=lambda c, order, lens: ok.candidates(c, order, torch.where(lens > 1024, lens // 1024 * 1024, lens)))
fault("topk-merge-of-halves (topk, selection): each half of a row delivers half of the places").by(select=_halves)
fault("topk-rows-on-grid-y (topk, launch): rows are launched on grid.y: 65,536 rows are not computed").by(
    pad=lambda c, positions, valid: ok.pad(c, positions, valid & (c.rows <= 65535))
)

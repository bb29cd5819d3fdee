"""Top-k of paged logits as cache slots, with one deterministic rule for ties: the lower position wins."""

from typing import Any

import torch

from impl.checks import PAGE, check_topk

# Rows go in chunks of this many bytes of float32 keys; temporaries are a few times that.
CHUNK_BYTES = 64 << 20
_INF = float("inf")
_LOW = 0xFFFFFFFF


def topk_to_slots(
    logits: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor, k: int, *, validate: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best keys of every row: `(slots, positions)`, both int32 `[rows, k]`, best first, -1 after the valid ones.

    logits `[rows, max_context_len]` float32; context_lens int32 `[B, next_n]` with B * next_n rows; block_table int32
    `[B, max_pages]`; k >= 1. A row has `min(k, n)` valid entries, n its length clamped to the table and the logits.
    Positions count keys of the request; `slot = block_table[position // 64] * 64 + position % 64`. Deterministic:
    order by logit, then by lower position. -0 equals +0; -inf is a logit like any other; NaN counts as +inf. Does not
    wait for the device unless `validate`. Raises TypeError or ValueError.
    """
    check_topk(logits, context_lens, block_table, k, validate)
    rows, width = logits.shape
    next_n = context_lens.shape[1]
    slots = torch.full((rows, k), -1, dtype=torch.int32, device=logits.device)
    positions = slots.clone()
    limit = min(width, block_table.shape[1] * PAGE)
    kept = min(k, limit)
    if rows == 0 or kept == 0:
        return slots, positions
    lens = context_lens.clamp(0, limit).reshape(-1, 1)
    step = max(1, CHUNK_BYTES // (4 * limit))
    for first in range(0, rows, step):
        last = min(first + step, rows)
        found, valid = _best(logits[first:last, :limit], lens[first:last], kept)
        request = torch.arange(first, last, device=logits.device)[:, None] // next_n
        # Places past the valid ones look up entry 0, which any table has, and are discarded.
        page = block_table[request, torch.where(valid, found // PAGE, 0)]
        positions[first:last, :kept] = torch.where(valid, found, -1).to(torch.int32)
        slots[first:last, :kept] = torch.where(valid, page * PAGE + found % PAGE, -1).to(torch.int32)
    return slots, positions


def _best(logits: torch.Tensor, lens: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions int64 [rows, k] in the documented order, and which of them are valid.

    torch.topk does not say which of several equal values it takes, but the values themselves are certain, and so is
    every position above the last of them. The places left go to the lowest positions equal to it, by a second top-k.
    """
    width = logits.shape[1]
    position = torch.arange(width, device=logits.device, dtype=torch.int32)
    # Past the length -inf will do: it ties with a real -inf at most, and ties prefer the lower position.
    key = torch.where(position < lens, logits.nan_to_num(nan=_INF, posinf=_INF, neginf=-_INF), -_INF)
    values, found = torch.topk(key, k, dim=1)
    last = values[:, -1:]
    above = (values > last).sum(dim=1, keepdim=True)
    ties = torch.topk(torch.where(key == last, width - position, 0), k, dim=1).values
    rank = torch.arange(k, device=logits.device)
    found = torch.where(rank < above, found, width - ties.gather(1, (rank - above).clamp_min_(0)))
    # Floats in the order of integers: adding zero turns -0 into +0, a negative float's bits are mirrored. With the
    # complement of the position below, no two are equal, so that any sort orders them alike.
    bits = (torch.where(rank < above, values, last) + 0.0).view(torch.int32)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    unique = ((order << 32) | (_LOW - found)).sort(dim=1, descending=True).values
    return _LOW - (unique & _LOW), rank < lens


CONTRACT: dict[str, Any] = {"op": "topk", "batch_invariant": True, "devices": ["cpu", "cuda"]}
topk_to_slots.parity_contract = CONTRACT  # type: ignore[attr-defined]

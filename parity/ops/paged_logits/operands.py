"""From a case of paged logits to the tensors a kernel is called with."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.ops.paged_logits.case import Case
from parity.ops.shared.operands import Stored, build_lens_and_table, lodged, names_of, with_singletons
from parity.pages import placement, pools, values
from parity.pages.layout import DIM, find
from parity.pages.pools import build_pool, pool_bytes
from parity.run import memory

SENTINEL = -7.0e33
"""What an `out=` buffer and all round it hold before the call: finite, and no logit that a case can produce."""


@dataclass(frozen=True, eq=False)
class Operands(Stored):
    """Operands of a logits function. q [B, next_n, H, 128]; kv_cache a view of pool, uint8 [pages, page stride];
    weights float32 [T, H]; context_lens int32 [B, next_n]; block_table int32 [B, width]."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int
    clean_logits: bool
    pool: Tensor
    around: list[Tensor] = field(default_factory=list, kw_only=True)
    """The buffer that the `out=` of a call lies in, once there is one."""

    def outside(self) -> str | None:
        """The sentence on what a call wrote round the buffer of its result, or None."""
        for around in self.around:
            wrong = around != SENTINEL
            wrong[1:-1, : self.max_context_len] = False
            if bool(wrong.any()):
                row, column = (int(at) for at in wrong.nonzero()[0])
                what = f"row {row - 1} of {self.case.rows}, column {column} of {self.max_context_len}"
                return f"out: the call wrote outside of it, at {what} ({int(wrong.sum())} such cells)"
        return None

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a logits function, without schedule_meta."""
        names = ("q", "kv_cache", "weights", "context_lens", "block_table", "max_context_len", "clean_logits")
        return {name: getattr(self, name) for name in names}


def operand_bytes(case: Case, device: str | torch.device = "cpu") -> int:
    """About how many bytes the operands and the result of a case take on a device; what judging takes comes on top."""
    heads = case.rows * case.heads
    own = 4 * heads * DIM + 16 * heads  # queries drawn and then joined, weights and the words that they are drawn from
    pool = pool_bytes(case, placement.count_pages(case)[1], torch.device(device))
    return placement.placement_bytes(case) + own + pool + memory.result_bytes(case.rows, case.max_context_len)


def build_logits(case: Case, device: str | torch.device = "cpu") -> Operands:
    """The operands of a case on a device, the same bits on every device; new storages at every call."""
    device = torch.device(device)
    memory.require(operand_bytes(case, device), device)
    plan = placement.place(case)
    storages: dict[str, Tensor] = {}
    q = _build_queries(case, device, storages)
    weights = _build_weights(case, device, storages)
    pool, windows, storages["pool"] = build_pool(case, plan, device)
    lens, table = build_lens_and_table(case, plan, device, storages)
    return Operands(
        case,
        plan,
        storages,
        q,
        with_singletons(find(case.layout).cache_view(pool), case),
        weights,
        lens,
        table,
        case.max_context_len,
        case.clean,
        pool,
        windows=windows,
    )


def _build_queries(case: Case, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    requests, rows = names_of(case, device)
    shape = (case.requests, case.next_n, case.heads, DIM)
    dtype = find(case.layout).query_dtype
    step = max(1, pools.CHUNK_ELEMENTS // (case.heads * DIM))
    parts = [
        values.draw_queries(
            case.data, case.layout, case.seed, requests[at : at + step], rows[at : at + step], case.heads
        )
        for at in range(0, max(1, case.rows), step)
    ]
    q = (parts[0] if len(parts) == 1 else torch.cat([p.view(torch.uint8) for p in parts]).view(dtype)).view(shape)
    if "q" in case.strides:  # an extra row a request, an extra head, and 16 more elements a head
        base = torch.full((shape[0], shape[1] + 1, shape[2] + 1, 16 + DIM), 0xFF, dtype=torch.uint8, device=device)
        base = base.repeat_interleave(dtype.itemsize, -1).view(dtype)
        view = base[:, : shape[1], : shape[2], :DIM]
        view.view(torch.uint8).copy_(q.view(torch.uint8))
        q = view
    else:
        base = q
    storages["q"] = base
    return lodged("q", q, case, storages)


def _build_weights(case: Case, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    requests, rows = names_of(case, device)
    weights = values.draw_weights(case.data, case.seed, requests, rows, case.heads)
    if case.only_heads is not None:
        dropped = torch.ones(case.heads, dtype=torch.bool)
        dropped[list(case.only_heads)] = False
        weights.masked_fill_(dropped.to(device), 0.0)
    if "weights" in case.strides:
        base = torch.full((case.rows, case.heads + 4), torch.nan, device=device)
        view = base[:, : case.heads]
        view.copy_(weights)
        weights = view
    else:
        base = weights
    storages["weights"] = base
    return lodged("weights", weights, case, storages)

"""Small hand-made operands of logits functions, and results held against their bound.

Values are random behind a permuted block table. What nothing may read is poison: NaN keys, pages outside the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.bounds import expected
from parity.selftest.helpers import seeded
from reference.pages import PAGE, page_bytes, write_keys

LAYOUTS = ("bf16", "fp8")


def operands(
    layout: str,
    lengths: Sequence[Sequence[int]],
    heads: int = 64,
    *,
    seed: int = 0,
    kind: str = "gauss",
    width: int | None = None,
    page_stride: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a logits function for the context lengths [requests][next_n].

    kind: "gauss"; "integers" (exact in any order); "wide" (exact, nine-bit weights and dots beyond 256);
    "octaves" (magnitudes over many octaves); "cancel" (dots that nearly vanish).
    `width` in pages of the block table, by default as many as needed; `page_stride` in bytes, by default no gaps.
    """
    g = seeded(seed)
    requests, next_n = len(lengths), len(lengths[0])
    needed = [-(-max(row) // PAGE) for row in lengths]
    width = max(1, *needed) if width is None else width
    order = torch.randperm(sum(needed) + 2, generator=g)
    count, size, stride = len(order), page_bytes(layout), page_stride or page_bytes(layout)
    base, unit = torch.full((count * stride,), 0xFF, dtype=torch.uint8), 1
    if layout == "bf16":
        base, unit = base.view(torch.bfloat16), 2
    slot = size // PAGE // unit
    kv_cache = base.as_strided((count, PAGE, 1, slot), (stride // unit, slot, slot, 1))
    block_table = torch.full((requests, width), count + 1000, dtype=torch.int32)
    dtype = torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16
    q, weights = draw_queries(kind, requests * next_n, heads, g)
    for request, pages in enumerate(order[: sum(needed)].split(needed)):
        block_table[request, : len(pages)] = pages.to(torch.int32)
        if len(pages):
            keys, scales = draw_keys(kind, max(lengths[request]), g)
            slots = slots_of(block_table, request, len(keys))
            write_keys(kv_cache, layout, slots, keys.to(dtype), scales if layout == "fp8" else None)
    return {
        "q": q.to(dtype).view(requests, next_n, heads, 128),
        "kv_cache": kv_cache,
        "weights": weights,
        "context_lens": torch.tensor(lengths, dtype=torch.int32).reshape(requests, next_n),
        "block_table": block_table,
        "max_context_len": width * PAGE,
    }


def make_operands(layout: str, lengths: Sequence[Sequence[int]], heads: int = 8, seed: int = 0, **options: Any) -> Any:
    """The same as an object, as judges take it: with a case string, `clean_logits`, and one page more than needed."""
    width = max(-(-max(row) // PAGE) for row in lengths) + 1
    given = operands(layout, lengths, heads, seed=seed, width=width, **options)
    case = f"v1 test {layout} {lengths} {heads} {seed} {options}"
    return SimpleNamespace(case=case, clean_logits=True, **given)


def slots_of(block_table: torch.Tensor, request: int, count: int) -> torch.Tensor:
    """Slots of the first `count` keys of a request, int64 [count]."""
    position = torch.arange(count)
    return block_table[request, position // PAGE].long() * PAGE + position % PAGE


def draw_queries(kind: str, rows: int, heads: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """q float32 [rows, heads, 128], weights float32 [rows, heads]."""
    shape = (rows, heads, 128)
    if kind in ("integers", "wide"):
        low, high, most = (-4, 5, 8) if kind == "integers" else (1, 3, 511)
        q = torch.randint(low, high, shape, generator=g).float()
        return q, torch.randint(-most, most + 1, shape[:2], generator=g).float()
    q, weights = torch.randn(shape, generator=g), torch.randn(shape[:2], generator=g)
    if kind == "octaves":
        q = q * torch.exp2(torch.randint(-3, 4, shape, generator=g).float())
        weights = weights * torch.exp2(torch.randint(-6, 7, shape[:2], generator=g).float())
    if kind == "cancel":
        q[..., 64:] = q[..., :64]
    return q, weights


def draw_keys(kind: str, count: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """keys float32 [count, 128], scales float32 [count]."""
    if kind in ("integers", "wide"):
        low, high = (-4, 5) if kind == "integers" else (1, 3)
        keys = torch.randint(low, high, (count, 128), generator=g).float()
        return keys, torch.exp2(torch.randint(-3, 4, (count,), generator=g).float())
    keys = torch.randn(count, 128, generator=g)
    if kind == "octaves":
        keys = keys * torch.exp2(torch.randint(-5, 6, (count, 1), generator=g).float())
    if kind == "cancel":
        keys[:, 64:] = -keys[:, :64] + torch.randn(count, 64, generator=g) * 2.0**-6
    return keys, torch.rand(count, generator=g) + 0.01


def ratio(layout: str, given: dict[str, Any], got: torch.Tensor, **promises: Any) -> float:
    """Largest error of `got` over its proved bound under the default contract and `promises`; at most 1 is correct.

    Columns that `got` lacks are not compared; inf where a tail is not -inf.
    """
    contract = dataclasses.replace(Contract.default(layout, got.device), **promises)
    wanted = expected(SimpleNamespace(**given), contract)
    inside = torch.arange(got.shape[1], device=got.device) < wanted.lens[:, None]
    if not torch.equal(got == -torch.inf, ~inside):
        return torch.inf
    count = min(got.shape[1], wanted.logits.shape[1])
    error = (got.double()[:, :count] - wanted.logits[:, :count]).abs().where(inside[:, :count], 0.0)
    ratios = (error / wanted.bound[:, :count].clamp_min(1e-300)).nan_to_num(nan=torch.inf)
    return float(ratios.max()) if ratios.numel() else 0.0

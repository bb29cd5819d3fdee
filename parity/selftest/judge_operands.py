"""Small hand-made operands for the judge's tests: random values, permuted pages, poison where nothing may be read."""

from __future__ import annotations

import types
from typing import Any

import torch

from reference.pages import PAGE, page_bytes, write_keys


def make_operands(
    layout: str = "bf16",
    lengths: tuple[tuple[int, ...], ...] = ((70, 130), (0, 1)),
    heads: int = 8,
    seed: int = 0,
    *,
    kind: str = "gauss",
    clean_logits: bool = True,
    extra_pages: int = 1,
) -> Any:
    """Operands with q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits and a case string.

    kind: "gauss"; "integers" (exact in any order); "wide" (exact, nine-bit weights and dots beyond 256);
    "octaves" (magnitudes over many octaves); "cancel" (dots that nearly vanish)."""
    g = torch.Generator().manual_seed(seed)
    batch, next_n = len(lengths), len(lengths[0])
    longest = [max(row) for row in lengths]
    width = max((n + PAGE - 1) // PAGE for n in longest) + extra_pages
    needed = [(n + PAGE - 1) // PAGE for n in longest]
    order = torch.randperm(sum(needed) + 2, generator=g)
    pool = torch.full((order.numel(), page_bytes(layout)), 0xFF, dtype=torch.uint8)
    if layout == "bf16":
        kv_cache = pool.view(torch.bfloat16).view(-1, PAGE, 1, 128)
    else:
        kv_cache = pool.view(order.numel(), PAGE, 1, page_bytes(layout) // PAGE)
    block_table = torch.full((batch, width), -1, dtype=torch.int32)
    dtype = torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16
    q, weights = draw_queries(kind, batch * next_n, heads, g)
    taken = 0
    for request, count in enumerate(longest):
        pages = order[taken : taken + needed[request]]
        taken += needed[request]
        block_table[request, : len(pages)] = pages.to(torch.int32)
        if count:
            position = torch.arange(count)
            slots = pages[position // PAGE] * PAGE + position % PAGE
            keys, scales = draw_keys(kind, count, g)
            write_keys(kv_cache, layout, slots, keys.to(dtype), scales if layout == "fp8" else None)
    return types.SimpleNamespace(
        case=f"v1 test {layout} {lengths} {heads} {seed} {kind}",
        q=q.to(dtype).view(batch, next_n, heads, 128),
        kv_cache=kv_cache,
        weights=weights,
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table=block_table,
        max_context_len=width * PAGE,
        clean_logits=clean_logits,
    )


def draw_queries(kind: str, rows: int, heads: int, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """q float32 [rows, heads, 128], weights float32 [rows, heads]."""
    shape = (rows, heads, 128)
    if kind == "integers":
        q = torch.randint(-4, 5, shape, generator=g).float()
        return q, torch.randint(-8, 9, shape[:2], generator=g).float()
    if kind == "wide":
        q = torch.randint(1, 3, shape, generator=g).float()
        return q, torch.randint(-511, 512, shape[:2], generator=g).float()
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

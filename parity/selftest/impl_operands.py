"""Operands for the tests of impl/: random keys behind a permuted block table, and results held against their bound."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.bounds import expected
from reference.pages import PAGE, page_bytes, write_keys

LAYOUTS = ("bf16", "fp8")


def operands(
    layout: str,
    lengths: list[list[int]],
    heads: int = 64,
    *,
    width: int | None = None,
    seed: int = 0,
    page_stride: int | None = None,
) -> dict[str, Any]:
    """Keyword arguments of a logits function. Unreadable keys are NaN, unused table entries point outside the pool.

    `page_stride` in bytes; by default pages follow each other.
    """
    generator = torch.Generator().manual_seed(seed)
    requests, next_n = len(lengths), len(lengths[0])
    needed = [-(-max(row) // PAGE) for row in lengths]
    width = max(1, *needed) if width is None else width
    pages = sum(needed) + 2
    stride = page_stride or page_bytes(layout)
    pool = torch.full((pages * stride,), 0xFF, dtype=torch.uint8).as_strided((pages, page_bytes(layout)), (stride, 1))
    slot = page_bytes(layout) // PAGE
    if layout == "bf16":
        base = torch.empty(0, dtype=torch.uint8).set_(pool.untyped_storage()).view(torch.bfloat16)
        kv_cache = base.as_strided((pages, PAGE, 1, slot // 2), (stride // 2, slot // 2, slot // 2, 1))
    else:
        kv_cache = pool.as_strided((pages, PAGE, 1, slot), (stride, slot, slot, 1))
    table = torch.full((requests, width), pages + 1000, dtype=torch.int32)
    order = torch.randperm(pages, generator=generator).tolist()
    for request, row in enumerate(lengths):
        mine = torch.tensor([order.pop() for _ in range(needed[request])], dtype=torch.int32)
        table[request, : len(mine)] = mine
        keys = max(row)
        slots = _slots(table[request], keys)
        values = torch.randn(keys, 128, generator=generator)
        if keys and layout == "bf16":
            write_keys(kv_cache, layout, slots, values.bfloat16())
        elif keys:
            scales = 0.01 + torch.rand(keys, generator=generator)
            write_keys(kv_cache, layout, slots, (values * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scales)
    q = torch.randn(requests, next_n, heads, 128, generator=generator)
    return {
        "q": q.bfloat16() if layout == "bf16" else (q * 60).to(torch.float8_e4m3fn),
        "kv_cache": kv_cache,
        "weights": torch.randn(requests * next_n, heads, generator=generator),
        "context_lens": torch.tensor(lengths, dtype=torch.int32).reshape(requests, next_n),
        "block_table": table,
        "max_context_len": width * PAGE,
    }


def ratio(layout: str, given: dict[str, Any], got: torch.Tensor, **promises: Any) -> float:
    """Largest error of `got` over its proved bound under the default contract and `promises`; at most 1 is right.

    Columns that `got` lacks are not compared; inf where a tail is not -inf.
    """
    contract = dataclasses.replace(Contract.default(layout, got.device), **promises)
    wanted = expected(SimpleNamespace(**given), contract)
    columns = torch.arange(got.shape[1], device=got.device)
    inside = columns < wanted.lens[:, None]
    if not bool(((got == -float("inf")) == ~inside).all()):
        return float("inf")
    count = min(got.shape[1], wanted.logits.shape[1])
    difference = torch.where(inside, got.double(), 0.0)[:, :count] - torch.where(
        inside[:, :count], wanted.logits[:, :count], 0.0
    )
    ratios = (difference.abs() / wanted.bound[:, :count].clamp_min(1e-300)).nan_to_num(nan=float("inf"))
    return float(ratios.max()) if ratios.numel() else 0.0


def _slots(table: torch.Tensor, count: int) -> torch.Tensor:
    key = torch.arange(count)
    return table[key // PAGE].long() * PAGE + key % PAGE

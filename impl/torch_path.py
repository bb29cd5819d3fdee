"""Paged logits in plain PyTorch: the row-chunked path a server falls back to, and the historical gather beside it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from impl.checks import DIM, PAGE, Shapes, check_logits

WORKSPACE_BYTES = 256 << 20
_PAYLOAD = PAGE * DIM
# What one key costs while it is gathered: its stored bytes twice (pages, then values), and 128 float32.
_KEY_BYTES = {"bf16": 2 * 256 + 4 * DIM, "fp8": 2 * 132 + 4 * DIM}
# What a logit costs beside its heads' scores: the sum, the scaled and the masked value, the mask, the old cell.
_CELL_BYTES = 20


def torch_bf16_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """`impl.logits_bf16.bf16_paged_mqa_logits` in PyTorch: IEEE float32 products of the stored operands.

    Rows, keys and requests are taken in chunks whose temporaries stay under `workspace_bytes`, beyond inputs and
    result. Never waits for the device, so it can be captured in a CUDA graph; for that reason it works on all of
    max_context_len, whatever the lengths. Raises TypeError or ValueError naming the argument.
    """
    return _chunked(
        *("bf16", q, kv_cache, weights, context_lens, block_table, max_context_len),
        *(clean_logits, workspace_bytes, out, validate),
    )


def torch_fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """`impl.logits_fp8.fp8_paged_mqa_logits` in PyTorch: IEEE float32 products of the payloads, scaled after the head
    sum. Otherwise as `torch_bf16_paged_mqa_logits`."""
    return _chunked(
        *("fp8", q, kv_cache, weights, context_lens, block_table, max_context_len),
        *(clean_logits, workspace_bytes, out, validate),
    )


def materialising_gather_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
) -> torch.Tensor:
    """The path that ran before there was a kernel, kept to show what it costs: every row gathers all its keys.

    Bf16 pages only. Its gather takes `rows * table width * 16 KiB` (23.1 GB for 4,096 rows and 344 pages), the
    scores as much again in float32. Each head's dot is rounded to bf16, as a bf16 matrix product does.
    """
    shapes = check_logits("bf16", q, kv_cache, weights, context_lens, block_table, max_context_len)
    out = torch.full((shapes.rows, max_context_len), -float("inf"), dtype=torch.float32, device=q.device)
    if shapes.rows == 0 or shapes.limit == 0:
        return out
    lens = context_lens.clamp(0, shapes.limit).reshape(-1, 1)
    table = block_table.repeat_interleave(shapes.next_n, dim=0)
    page = torch.arange(shapes.table_width, device=q.device)
    table = torch.where(page * PAGE < lens, table, 0)
    keys = kv_cache[table].reshape(shapes.rows, -1, DIM)
    scores = torch.bmm(q.reshape(shapes.rows, shapes.heads, DIM), keys.transpose(1, 2)).float().relu_()
    logits = torch.bmm(weights[:, None, :], scores)[:, 0, : shapes.limit]
    key = torch.arange(shapes.limit, device=q.device)
    out[:, : shapes.limit] = torch.where(key < lens, logits, -float("inf"))
    return out


def _chunked(
    layout: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean: bool,
    workspace_bytes: int,
    out: torch.Tensor | None,
    validate: bool,
) -> torch.Tensor:
    shapes = check_logits(
        layout, q, kv_cache, weights, context_lens, block_table, max_context_len, out=out, validate=validate
    )
    if isinstance(workspace_bytes, bool) or not isinstance(workspace_bytes, int):
        raise TypeError(f"workspace_bytes must be an int, got {type(workspace_bytes).__name__}")
    least = 2 * (PAGE * (_KEY_BYTES[layout] + 4 * shapes.heads + _CELL_BYTES) + 4 * shapes.heads * DIM)
    if workspace_bytes < least:
        raise ValueError(f"workspace_bytes must be at least {least} (one row against one page), got {workspace_bytes}")
    if out is None:
        out = torch.empty((shapes.rows, max_context_len), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out
    result = out.view(shapes.requests, shapes.next_n, max_context_len)
    if clean:
        # Cells past the table; the rest is written chunk by chunk.
        result[:, :, shapes.limit :] = -float("inf")
    w = weights.view(shapes.requests, shapes.next_n, shapes.heads)
    lens = context_lens.clamp(0, shapes.limit)
    extent = _extent(lens, shapes)
    if clean:
        result[:, :, extent : shapes.limit] = -float("inf")
    with _ieee_matmul():
        for some, rows, pages in _chunks(shapes, extent, workspace_bytes):
            _score(layout, shapes, q, kv_cache, w, lens, block_table, result, clean, some, rows, pages)
    return out


def _extent(lens: torch.Tensor, shapes: Shapes) -> int:
    """Keys to go through: the longest row where lengths can be read at no cost, else all that the result holds."""
    return int(lens.max()) if lens.device.type == "cpu" else shapes.limit


def _chunks(shapes: Shapes, extent: int, budget: int) -> Iterator[tuple[slice, slice, slice]]:
    """Slices of requests, rows and pages whose temporaries fit the budget, largest first in keys, then rows."""
    total = -(-extent // PAGE)
    # A quarter of the budget stays for the libraries' own workspaces and for the allocator's rounding.
    budget -= budget // 4
    per_row = 4 * shapes.heads + _CELL_BYTES
    keys_cost = _KEY_BYTES[shapes.layout]
    pages = max(1, min(total, budget // (2 * PAGE * (keys_cost + per_row)), 256))
    left = max(0, budget - pages * PAGE * keys_cost)
    rows = max(1, min(shapes.next_n, left // (pages * PAGE * per_row + 4 * shapes.heads * DIM)))
    one = pages * PAGE * (keys_cost + rows * per_row) + rows * 4 * shapes.heads * DIM
    some = max(1, min(shapes.requests, budget // one)) if rows == shapes.next_n else 1
    for b in range(0, shapes.requests, some):
        for p in range(0, total, pages):
            for n in range(0, shapes.next_n, rows):
                yield (
                    slice(b, min(b + some, shapes.requests)),
                    slice(n, min(n + rows, shapes.next_n)),
                    slice(p, min(p + pages, total)),
                )


def _score(
    layout: str,
    shapes: Shapes,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    lens: torch.Tensor,
    block_table: torch.Tensor,
    result: torch.Tensor,
    clean: bool,
    some: slice,
    rows: slice,
    pages: slice,
) -> None:
    """One chunk: requests x rows x pages, written into its cells of `result`."""
    first, last = pages.start * PAGE, min(pages.stop * PAGE, shapes.limit)
    length = lens[some, rows, None]
    # Entries past every row's length may hold anything: they become page 0, whose keys the mask below discards.
    needed = lens[some].amax(dim=1, keepdim=True)
    table = block_table[some, pages]
    page = torch.arange(pages.start, pages.stop, device=q.device)
    table = torch.where(page * PAGE < needed, table, 0)
    keys, scales = _read(layout, kv_cache, table)
    queries = q[some, rows].float()
    requests, count, heads, _ = queries.shape
    scores = torch.bmm(queries.reshape(requests, count * heads, DIM), keys.transpose(1, 2)).relu_()
    del keys, queries
    scores = scores.view(requests * count, heads, -1)
    logits = torch.bmm(weights[some, rows].reshape(-1, 1, heads), scores).view(requests, count, -1)
    del scores
    if scales is not None:
        logits *= scales[:, None, :]
    logits = logits[:, :, : last - first]
    inside = torch.arange(first, last, device=q.device) < length
    cells = result[some, rows, first:last]
    cells.copy_(torch.where(inside, logits, -float("inf") if clean else cells))


def _read(layout: str, kv_cache: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Keys float32 [requests, keys, 128] and for fp8 their scales [requests, keys], through the block table."""
    requests = table.shape[0]
    if layout == "bf16":
        return kv_cache[table].view(requests, -1, DIM).float(), None
    pages = kv_cache[table].view(requests, table.shape[1], PAGE * (DIM + 4))
    keys = pages[:, :, :_PAYLOAD].view(torch.float8_e4m3fn).float().view(requests, -1, DIM)
    scales = pages[:, :, _PAYLOAD:].contiguous().view(torch.float32).view(requests, -1)
    return keys, scales


@contextmanager
def _ieee_matmul() -> Iterator[None]:
    """Full float32 products whatever the process prefers (TF32 on CUDA, bf16 in oneDNN); the settings come back."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


for _function, _layout, _rounding in (
    (torch_bf16_paged_mqa_logits, "bf16", {}),
    (torch_fp8_paged_mqa_logits, "fp8", {}),
    (materialising_gather_paged_mqa_logits, "bf16", {"dot_dtype": "bf16"}),
):
    _function.parity_contract = {  # type: ignore[attr-defined]
        "layout": _layout,
        "op": "paged_logits",
        "arithmetic": "ieee",
        "tail": "-inf",
        "batch_invariant": False,
        "devices": ["cpu", "cuda"],
        **_rounding,
    }

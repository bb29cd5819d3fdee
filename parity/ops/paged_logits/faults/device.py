"""Faults of a logits kernel's life on a device: stale memory, races, launch limits, dispatch and memory growth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.ops.fault import Function, collector
from parity.ops.paged_logits.faults import staged as ok
from parity.ops.paged_logits.faults.formula import rounded, running
from parity.ops.paged_logits.faults.staged import PAGE, Call

MODELS, fault = collector("paged_logits")


def counted(c: Call, name: str = "calls") -> int:
    """How often this was called before on the same function."""
    c.memory[name] = c.memory.get(name, -1) + 1
    return c.memory[name]


# ------------------------------------------------------------------------------------------------------- stale memory
def _reused(c: Call) -> Tensor:
    """A result buffer that is kept between calls: whatever is not written shows an earlier result."""
    size = c.rows * c.width
    buffer = c.memory.get("buffer")
    if buffer is None or buffer.numel() < size:
        buffer = c.memory["buffer"] = torch.zeros(max(size, 1))
    return buffer[:size].view(c.rows, c.width)


def _visible_only(c: Call, out: Tensor, rows: Tensor, logits: Tensor, lens: Tensor) -> None:
    visible = torch.arange(c.width) < lens[:, None]
    wide = torch.nn.functional.pad(logits, (0, c.width - logits.shape[1]))
    out[rows] = torch.where(visible, wide, out[rows])


def _first_has_keys(c: Call, rows: Tensor) -> Tensor:
    return c.context_lens[:, 0][rows // c.next_n] > 0


def _where_rows(c: Call, out: Tensor, rows: Tensor, logits: Tensor, lens: Tensor, kept: Tensor) -> None:
    ok.write(c, out, rows[kept], logits[kept], lens[kept])


def _with_leak(c: Call, out: Tensor) -> Tensor:
    lens = c.context_lens.reshape(-1).to(torch.int64)
    for row in range(min(c.rows, 4096)):
        last = int(lens[row])
        if not 0 < last < c.width or last % PAGE == 0:
            continue
        key = torch.tensor([last])
        base = ok.address(c, ok.pages(c, torch.tensor([row // c.next_n]), key))
        behind = ok.decode(c, ok.keys(c, ok.payload(c, base, key % PAGE)))
        out[row, last - 1] += 0.0 * behind.sum()
    return out


def _cached_pages(c: Call, r: Tensor, key: Tensor) -> Tensor:
    name = ("table", tuple(c.block_table.shape))
    table = c.memory.setdefault(str(name), c.block_table.clone())
    own = Call(c.layout, c.q, c.kv_cache, c.weights, c.context_lens, table, c.width, c.clean)
    return ok.pages(own, r, key)


def _cached_keys(c: Call, first: Tensor) -> Tensor:
    fresh = ok.keys(c, first)
    cache = c.memory.setdefault("keys", {})
    rows = first.reshape(-1).tolist()
    if len(rows) > 4096:
        return fresh
    flat = fresh.reshape(-1, fresh.shape[-1])
    return torch.stack([cache.setdefault(a, flat[i]) for i, a in enumerate(rows)]).view_as(fresh) if rows else fresh


def _cleaning(f: Function) -> Function:
    def call(**named: Any) -> Tensor:
        cache = named["kv_cache"]
        if cache.dtype == torch.bfloat16 and cache.numel() < 1 << 26:
            cache.nan_to_num_(0.0)
        return f(**named)

    return call


def _scaling(f: Function) -> Function:
    def call(**named: Any) -> Tensor:
        named["weights"].mul_(0.5)
        return 2 * f(**named)

    return call


fault(
    "result-buffer-stale (mask, stale): "
    "the result is a workspace kept between calls, and cells past the length show the call before"
).by(allocate=_reused, write=_visible_only, finish=lambda c, out: out.clone())
fault(
    "result-buffer-shared (mask, stale): every call returns the same buffer, so a later call changes an earlier result"
).by(allocate=_reused)
fault("rows-without-keys-unwritten (mask, padding): rows without keys are skipped and never written").by(
    write=lambda c, out, rows, logits, lens: ok.write(c, out, rows[lens > 0], logits[lens > 0], lens[lens > 0])
)
fault("request-without-keys-skipped (mask, padding): a request whose first row has no keys is skipped as a whole").by(
    write=lambda c, out, rows, logits, lens: _where_rows(c, out, rows, logits, lens, _first_has_keys(c, rows))
)
fault("reads-past-length (gather, stale): the slot behind the last key enters the last key's sum with weight zero").by(
    finish=_with_leak
)
fault(
    "page-cached (gather, stale): odd logical pages are computed from the page before, still in the shared buffer"
).by(pages=lambda c, r, key: c.entry(r[:, None], torch.where(key // PAGE % 2 == 1, key // PAGE - 1, key // PAGE)))
fault("table-cached (page-table, stale): the block table of the first call of each shape is kept").by(
    pages=_cached_pages
)
fault(
    "pages-cached-by-number (gather, stale): decoded keys are cached by page number, and survive the page's rewriting"
).by(keys=_cached_keys)
fault("pool-cleaned-in-place (gather, stale): NaN in the cache are replaced by zero in place before the call").by(
    wrap=_cleaning
)
fault(
    "weights-scaled-in-place (head-weight, stale): "
    "the gates are scaled in place, so that a second call sees them scaled twice"
).by(wrap=_scaling)
fault("accumulated-into-result (head-sum, stale): the sum starts from what the result buffer holds").by(
    write=lambda c, out, rows, logits, lens: ok.write(
        c, out, rows, logits + torch.nan_to_num(out[rows][:, : logits.shape[1]], 1.0), lens
    )
)


# -------------------------------------------------------------------------------------------------------------- races
def _stale_page(every: int, after: int = 0) -> Callable[[Call, Tensor], Tensor]:
    """In some calls one page of one row holds what the page before it held."""

    def finish(c: Call, out: Tensor) -> Tensor:
        turn = counted(c)
        lens = c.context_lens.reshape(-1)
        if turn % every or turn < after or not out.numel() or int(lens.max()) <= PAGE:
            return out
        row = int(lens.argmax())
        last = (int(lens[row]) - 1) // PAGE
        keep = min(PAGE, int(lens[row]) - last * PAGE)
        out[row, last * PAGE : last * PAGE + keep] = out[row, (last - 1) * PAGE : (last - 1) * PAGE + keep]
        return out

    return finish


def _shuffled(c: Call, x: Tensor) -> Tensor:
    order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(counted(c, "order")))
    return x[:, order]


def _lossy(c: Call, w: Tensor) -> Tensor:
    if counted(c, "updates") % 5 or not w.numel():
        return w
    w = w.clone()
    w[-1, -1] = 0.0
    return w


def _erased(c: Call, out: Tensor) -> Tensor:
    lens = c.context_lens.reshape(-1)
    if out.numel() and counted(c, "cleanings") % 5 == 0 and int(lens.max()):
        row = int(lens.argmax())
        out[row, int(lens[row]) - 1] = -torch.inf
    return out


fault(
    "barrier-missing (launch, race): "
    "without a barrier between producer and consumer a page is now and then computed from the buffer's old content "
    "[deepseek-ai/DeepGEMM#392, ikawrakow/ik_llama.cpp#2347]"
).by(finish=_stale_page(7))
fault("barrier-missing-rarely (launch, race): the same once in 23 calls").by(finish=_stale_page(23))
fault("double-buffer-swapped (launch, race): every second call reads the wrong half of a double buffer").by(
    finish=_stale_page(2, 1)
)
fault("atomic-head-sum (head-sum, race): heads are added by atomics, in another order at every call").by(
    head_sum=lambda c, x: running(_shuffled(c, x), torch.float32, 1)
)
fault("lost-update (head-sum, race): one head's contribution to one row is lost now and then").by(
    weights=lambda c, rows: _lossy(c, ok.weights(c, rows))
)
fault(
    "tail-cleaned-too-late (mask, race): "
    "the cleaning of the tail runs beside the kernel and now and then erases a visible cell"
).by(finish=_erased)


# ------------------------------------------------------------------------------------------------------------- launch
def _first_rows(limit: Callable[[Call], int]) -> Callable[..., None]:
    """Only the first rows are launched."""

    def write(c: Call, out: Tensor, rows: Tensor, logits: Tensor, lens: Tensor) -> None:
        kept = rows < limit(c)
        ok.write(c, out, rows[kept], logits[kept], lens[kept])

    return write


def _first_keys(limit: int) -> Callable[..., Tensor]:
    return lambda c, rows: ok.lengths(c, rows).clamp_max(limit)


def _border(logits: Tensor) -> Tensor:
    half = logits.shape[1] // 2 // PAGE * PAGE
    if half:
        logits = logits.clone()
        logits[:, half] = 0.0
    return logits


fault(
    "rows-on-grid-y (launch, launch): "
    "rows are launched on grid.y, so that from 65,536 rows on the launch fails and nothing is written "
    "[vllm-project/vllm#52381]"
).by(write=_first_rows(lambda c: c.rows if c.rows <= 65535 else 0))
fault("rows-past-65535-lost (launch, launch): the grid is clamped to 65,535 rows").by(
    write=_first_rows(lambda c: 65535)
)
fault("rows-rounded-down (launch, launch): the grid is rows // 2 blocks of two rows").by(
    write=_first_rows(lambda c: c.rows // 2 * 2)
)
fault(
    "empty-batch-not-returned (launch, padding): where all lengths are 0 the kernel returns before it writes anything "
    "[sgl-project/sglang#39899, vllm-project/vllm#51970]"
).by(write=lambda c, out, rows, logits, lens: ok.write(c, out, rows, logits, lens) if logits.shape[1] else None)
fault("splits-fixed (launch, launch): the grid has 32 splits of one page: longer rows are not finished").by(
    lengths=_first_keys(32 * PAGE)
)
fault("splits-fixed-masked (launch, launch): keys past 3,968 are left out, all the shared table of pages can hold").by(
    lengths=_first_keys(3968)
)
fault(
    "split-border-lost (launch, launch): a row is split in two and the first key of the second half is not computed"
).by(scale=lambda c, total, s: _border(ok.scale(c, total, s)))
fault(
    "tile-128-kib (launch, launch): a tile takes 128 KiB of shared memory, more than sm_120 has "
    "[vllm-project/vllm#41189, vllm-project/vllm#41963]"
).by(extra={"arch": 120, "compile": ("decode", "bf16", 64, 256, 1, 16, 8, 3)})

# ------------------------------------------------------------------------------------------------------------ dispatch
fault(
    "flag-without-effect (dispatch, dispatch): "
    "the flag has no effect: the torch fallback runs although the kernel is selected "
    "[vllm-project/vllm#41063, sgl-project/sglang#37892]"
).by(extra={"route": "torch"})
fault("few-heads-other-kernel (dispatch, dispatch): batches of 8 heads go to a kernel without ReLU").by(
    relu=lambda c, x: x if c.heads == 8 else ok.relu(c, x)
)
fault("drafts-other-kernel (dispatch, dispatch): with more than two draft rows a path runs that knows only two").by(
    write=lambda c, out, rows, logits, lens: _where_rows(c, out, rows, logits, lens, rows % c.next_n < 2)
)
fault(
    "long-rows-other-kernel (dispatch, dispatch): rows longer than three pages take a path that rounds the dot to bf16"
).by(dot=lambda c, q, k: rounded(ok.dot(c, q, k), torch.bfloat16) if k.shape[1] > 3 * PAGE else ok.dot(c, q, k))
fault("single-row-other-kernel (dispatch, dispatch): a batch of one row takes a path that adds its heads in bf16").by(
    head_sum=lambda c, x: rounded(ok.head_sum(c, x), torch.bfloat16) if c.rows == 1 else ok.head_sum(c, x)
)
fault(
    "strided-table-other-kernel (dispatch, dispatch): "
    "a block table that is a view goes to a path that uses row 0 for all"
).by(request=lambda c, rows: rows * 0 if not c.block_table.is_contiguous() else ok.request(c, rows))
fault(
    "plan-kept-from-first-call (dispatch, dispatch): "
    "the schedule of the first call with as many rows is used again: later rows stop at its longest length"
).by(
    lengths=lambda c, rows: ok.lengths(c, rows).clamp_max(
        c.memory.setdefault(f"longest {c.rows}", int(c.context_lens.max()))
    )
)
fault("clean-flag-ignored (dispatch, dispatch): the flag clean_logits is not passed on").by(write=_visible_only)


# -------------------------------------------------------------------------------------------------------------- memory
def _spent(out: Tensor, size: int) -> Tensor:
    torch.empty(size, dtype=torch.uint8)
    return out


fault("gather-materialised (memory, memory): every row gathers all its pages at once [sgl-project/sglang#33246]").by(
    finish=lambda c, out: _spent(out, c.rows * c.block_table.shape[1] * PAGE * 256)
)
fault("scores-materialised (memory, memory): the scores of all heads are written to memory before they are summed").by(
    finish=lambda c, out: _spent(out, 4 * c.rows * c.heads * c.width)
)
fault("gates-broadcast (memory, memory): a float64 copy of the gates is made for every key of every row").by(
    finish=lambda c, out: _spent(out, 8 * c.rows * c.heads * c.width)
)

"""Third-party kernels on plain torch for the suite's own tests: correct ones, and each with one fault.

They follow the calling convention, import nothing of this repository, and are handed to the suite as a user would,
by `path/to/faulty.py:name`. A fault changes one step of `_logits`.
"""

import os
import signal
import sys
import time

import torch

PAGE, DIM = 64, 128


def _keys(kv_cache, table_row, length, *, page=lambda page, logical: page):
    """Keys float32 [length, 128] and scales [length] of the first `length` positions of one request."""
    positions = torch.arange(length)
    logical = positions // PAGE
    pages = page(table_row[logical].long(), logical)
    offsets = positions % PAGE
    if kv_cache.dtype == torch.bfloat16:
        return kv_cache[pages, offsets, 0].float(), torch.ones(length)
    flat = kv_cache.as_strided((kv_cache.shape[0], PAGE * 132), (kv_cache.stride(0), 1), kv_cache.storage_offset())
    payload = flat[pages[:, None], (offsets * DIM)[:, None] + torch.arange(DIM)]
    scale = flat[pages[:, None], PAGE * DIM + (offsets * 4)[:, None] + torch.arange(4)]
    return payload.view(torch.float8_e4m3fn).float(), scale.contiguous().view(torch.float32)[:, 0]


def _same(x):
    return x


def _logits(
    q,
    kv_cache,
    weights,
    context_lens,
    block_table,
    max_context_len,
    clean_logits,
    *,
    keys=_keys,
    scales=_same,
    dot=_same,
    relu=torch.relu,
    weight=_same,
    length=_same,
    table=lambda table, b: table[b],
    row=lambda values, row, n: values,
    tail=float("-inf"),
):
    requests, next_n, _, _ = q.shape
    out = torch.empty(requests * next_n, max_context_len)
    if clean_logits and tail is not None:
        out.fill_(tail)
    for b in range(requests):
        for i in range(next_n):
            n = length(int(context_lens[b, i]))
            k, s = keys(kv_cache, table(block_table, b).clamp(0, kv_cache.shape[0] - 1), n)
            dots = dot(q[b, i].float() @ k.T)
            w = weight(weights[b * next_n + i])
            out[b * next_n + i, :n] = row((w[:, None] * relu(dots)).sum(0) * scales(s), b * next_n + i, n)
    return out


def correct(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    return _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)


def correct_out(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, out=None):
    found = _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)
    return found if out is None else out.copy_(found)


def _make(**change):
    def function(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
        return _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, **change)

    return function


def _bf16(x):
    return x.bfloat16().float()


def _stale(pages, logical):
    """The last full page of two or more is read where the one before it lies."""
    return torch.where((logical > 0) & (logical == logical.max()), pages[0], pages)


stale_page = _make(keys=lambda kv, t, n: _keys(kv, t, n, page=_stale) if n else _keys(kv, t, n))
neighbours_scale = _make(scales=lambda s: s.roll(1))
one_key_of_1024 = _make(row=lambda x, row, n: torch.where(torch.arange(n) % 1024 == 700, x.roll(1), x))
last_partial_page = _make(row=lambda x, row, n: torch.where(torch.arange(n) < n // PAGE * PAGE, x, 0.0))
head_63 = _make(weight=lambda w: torch.cat([w[:63], torch.zeros(max(0, len(w) - 63))]))
no_relu = _make(relu=_same)
relu_after_sum = _make(relu=_same, row=lambda x, row, n: torch.relu(x))
weights_bf16 = _make(weight=_bf16)
dot_bf16 = _make(dot=_bf16)
logits_bf16 = _make(row=lambda x, row, n: _bf16(x))
times_1001 = _make(row=lambda x, row, n: x * 1.001)
nan_in_one_cell = _make(row=lambda x, row, n: torch.where(torch.arange(n) == n - 1, torch.nan, x) if row == 1 else x)
tail_unwritten = _make(tail=None)
tail_zero = _make(tail=0.0)
row_0_table = _make(table=lambda table, b: table[0])
table_ignored = _make(keys=lambda kv, t, n: _keys(kv, torch.arange(len(t)) % kv.shape[0], n))
nan_lost = _make(relu=lambda x: torch.relu(x).nan_to_num(0.0))


def _fp8_keys(kv_cache, table_row, length):
    k, s = _keys(kv_cache, table_row, length)
    scale = k.abs().amax(1, keepdim=True).clamp(min=1e-4) / 448
    return (k / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale, s


fp8_keys = _make(keys=_fp8_keys)


def length_of_row_0(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    same = context_lens.flatten()[:1].expand(context_lens.shape) if context_lens.numel() else context_lens
    return _logits(q, kv_cache, weights, same, block_table, max_context_len, clean_logits)


_calls = 0


def nondeterministic(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    global _calls
    _calls += 1
    found = _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)
    return torch.nextafter(found, found + 1) if _calls % 2 else found


def gathers(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    """Correct, but first gathers every row's pages."""
    if block_table.shape[1]:
        kv_cache[block_table.clamp(0, kv_cache.shape[0] - 1).repeat_interleave(q.shape[1], 0).long()].clone()
    return _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)


def writes_inputs(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    weights.mul_(1.0 + 2.0**-20)
    return _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)


def wrong_shape(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    return torch.zeros(weights.shape[0], max_context_len + 1)


def wrong_dtype(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    return torch.zeros(weights.shape[0], max_context_len, dtype=torch.float64)


def returns_none(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    return None


def raises(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    raise RuntimeError("no luck today")


def exits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    sys.exit(3)


def leaves(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    print("last words")
    sys.stdout.flush()
    os._exit(7)


def segfaults(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(60)


def hangs(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    time.sleep(3600)


def chatty(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    """Correct, prints a lot, and reads stdin."""
    print("noise " * 1000)
    print(sys.stdin.read(), file=sys.stderr)
    return _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)


def needs_meta(q, kv_cache, weights, context_lens, block_table, schedule_meta, max_context_len, clean_logits):
    assert schedule_meta.shape == (context_lens.numel() + 1,)
    return _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)


def build_meta(context_lens, page, processors):
    assert page == PAGE and processors >= 1
    return torch.zeros(context_lens.numel() + 1)


needs_meta.parity_contract = {"layout": "bf16", "schedule_meta": f"{os.path.abspath(__file__)}:build_meta"}  # type: ignore[attr-defined]
logits_bf16_declared = _make(row=lambda x, row, n: _bf16(x))
logits_bf16_declared.parity_contract = {"layout": "bf16", "out_dtype": "bf16"}  # type: ignore[attr-defined]
no_function = 3


# ------------------------------------------------------------------------------------------------------------- top-k


def _topk(logits, context_lens, block_table, k, *, pick=None, fill=-1, slot=None):
    rows, next_n = logits.shape[0], context_lens.shape[1]
    slots = torch.full((rows, k), fill, dtype=torch.int32)
    positions = torch.full((rows, k), fill, dtype=torch.int32)
    for r in range(rows):
        n = int(context_lens.flatten()[r])
        order = (pick or _order)(logits[r], n)[: min(k, n)]
        table = block_table[r // next_n]
        where = slot(block_table, r // next_n, order) if slot else table[order // PAGE] * PAGE + order % PAGE
        slots[r, : len(order)] = where.int()
        positions[r, : len(order)] = order.int()
    return slots, positions


def _order(scores, n):
    return torch.sort(scores[:n], descending=True, stable=True).indices


def topk_correct(logits, context_lens, block_table, k):
    return _topk(logits, context_lens, block_table, k)


def topk_ignores_length(logits, context_lens, block_table, k):
    return _topk(
        *(logits, context_lens, block_table, k),
        pick=lambda scores, n: torch.sort(scores[: len(scores)], descending=True).indices.clamp(max=max(0, n - 1)),
    )


def topk_half_precision(logits, context_lens, block_table, k):
    return _topk(logits, context_lens, block_table, k, pick=lambda scores, n: _order(scores.half(), n))


def topk_pads_zero(logits, context_lens, block_table, k):
    return _topk(logits, context_lens, block_table, k, fill=0)


def topk_row_0_table(logits, context_lens, block_table, k):
    return _topk(
        *(logits, context_lens, block_table, k),
        slot=lambda table, b, order: table[0, order // PAGE] * PAGE + order % PAGE,
    )


for _function in (topk_correct, topk_ignores_length, topk_half_precision, topk_pads_zero, topk_row_0_table):
    _function.parity_contract = {"op": "topk"}  # type: ignore[attr-defined]

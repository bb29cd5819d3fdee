"""Third-party functions whose results depend on the calls before, or on their process; and some that only look so.

Handed to the suite like those of `faulty.py`, by `path/to/stateful.py:name`. Whatever they keep, a process keeps."""

import functools
import os
from pathlib import Path

import torch

from parity.selftest.faulty import _logits, topk_correct

PAGE = 64
NAMES = ("q", "kv_cache", "weights", "context_lens", "block_table", "max_context_len", "clean_logits")
_kept: dict = {}


def _logits_of(named):
    return _logits(*(named[name] for name in NAMES))


def _spoiled(found, lens):
    """One visible cell of the longest row is wrong."""
    lens = lens.flatten()
    if lens.numel() and int(lens.max()):
        found[int(lens.argmax()), 0] += 1.0
    return found


def _buffer(name, result):
    kept = _kept.get(name)
    if kept is None or kept.numel() < result.numel():
        kept = _kept[name] = torch.zeros(result.numel() + 1)
    return kept[: result.numel()].view(result.shape)


# -------------------------------------------------------------------------------------------------------------- faulty


def shared_buffer(**named):
    found = _logits_of(named)
    return _buffer("shared", found).copy_(found)


def fifth_call_of_a_shape(**named):
    shape = (*named["q"].shape, named["max_context_len"])
    count = _kept[shape] = _kept.get(shape, 0) + 1
    found = _logits_of(named)
    return _spoiled(found, named["context_lens"]) if count > 4 else found


def larger_call_left(**named):
    found = _logits_of(named)
    buffer = _buffer("left", found)
    whole = buffer.as_strided((buffer.untyped_storage().nbytes() // 4,), (1,), 0)
    left = whole[found.numel()].clone()
    buffer.copy_(found)
    return found + left if torch.isfinite(left) else found


def tall_first(**named):
    """A process whose first call has three rows and more takes the kernel of tall batches, wrong on one row."""
    rows = named["context_lens"].numel()
    tall = _kept.setdefault("tall", rows > 2)
    found = _logits_of(named)
    return _spoiled(found, named["context_lens"]) if tall and rows == 1 else found


def many_heads_first(**named):
    """A process whose first call has the most heads keeps tiles of 64, which are wrong for fewer."""
    heads = named["q"].shape[2]
    wide = _kept.setdefault("heads", heads == 64)
    found = _logits_of(named)
    return _spoiled(found, named["context_lens"]) if wide and heads < 64 else found


def one_process_of_three(**named):
    """Chosen when it is imported."""
    found = _logits_of(named)
    return _spoiled(found, named["context_lens"]) if IMPORTED % 3 == 2 else found


def _imported():
    """How many processes have imported this file; each gets another number."""
    counter = Path(os.environ.get("STATEFUL_COUNTER", os.devnull))
    if counter == Path(os.devnull):
        return 0
    with counter.open("ab") as file:
        file.write(b".")
    return counter.stat().st_size


IMPORTED = _imported()


def dies_in_a_fresh_process(**named):
    if os.getpid() != os.getpgid(0):
        os._exit(5)
    return _logits_of(named)


def _restored(name, view):
    def function(**named):
        part = view(named[name])
        held = part.clone()
        part.zero_()
        part.copy_(held)
        return _logits_of(named)

    return function


weights_restored = _restored("weights", lambda x: x[:1])
pool_view_restored = _restored("kv_cache", lambda x: x.view(torch.uint8)[-1:])
lens_detached_restored = _restored("context_lens", lambda x: x.detach())


def _beside(place):
    def function(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, out=None):
        found = _logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)
        if out is None:
            return found
        out.copy_(found)
        whole = out.as_strided((out.untyped_storage().nbytes() // 4,), (1,), 0)
        at = place(out)
        if at is not None and out.numel():
            whole[out.storage_offset() + at] = float("-inf")
        return out

    return function


row_after_the_last = _beside(lambda out: out.shape[0] * out.stride(0))
row_before_the_first = _beside(lambda out: -out.stride(0))
gap_written = _beside(lambda out: out.shape[1] if out.stride(0) > out.shape[1] else None)
stays_inside = _beside(lambda out: None)


def topk_shared_buffers(logits, context_lens, block_table, k):
    found = topk_correct(logits, context_lens, block_table, k)
    if "topk" not in _kept:
        _kept["topk"] = torch.empty(2, 1 << 16, dtype=torch.int32)
    return tuple(_kept["topk"][i, : x.numel()].view(x.shape).copy_(x) for i, x in enumerate(found))


topk_shared_buffers.parity_contract = {"op": "topk"}  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------------------------- correct


@functools.cache
def _columns(width):
    return torch.arange(width)


def cached_by_shape(**named):
    """What the shape decides is kept by the shape, and the result is new."""
    visible = _columns(named["max_context_len"]) < named["context_lens"].reshape(-1, 1)
    found = _logits_of(named)
    return torch.where(visible, found, float("-inf")) if named["clean_logits"] else found


def workspace_kept(**named):
    """Sums in a workspace that is kept, and returned as a copy."""
    found = _logits_of(named)
    return _buffer("workspace", found).zero_().add_(found).clone()

"""Faults of integer widths, of lengths, and of what stands past a length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.paged_logits.faults import staged as ok
from parity.ops.paged_logits.faults.rows import at, first_draft, last_draft, lens_of
from parity.ops.paged_logits.faults.staged import PAGE, Call

MODELS, fault = collector("paged_logits")


# ------------------------------------------------------------------------------------------------------- integer width
def _wrapped(bits: int, signed: bool, unit: int) -> Callable[[Call, Tensor], Tensor]:
    """Page addresses whose offset, counted in units of so many bytes, is kept in so many bits."""

    def address(c: Call, page: Tensor) -> Tensor:
        stride = c.kv_cache.stride(0) * c.kv_cache.element_size() // unit
        offset = (page * stride) & ((1 << bits) - 1)
        if signed:
            offset = torch.where(offset >= 1 << (bits - 1), offset - (1 << bits), offset)
        return offset * unit // 4

    return address


fault(
    "offset-int32 (gather, integers): the byte offset of a page wraps at 2^31 "
    "[vllm-project/vllm#52109, flagos-ai/FlagGems#6241]"
).by(address=_wrapped(32, True, 1))
fault("offset-uint32 (gather, integers): the byte offset of a page wraps at 2^32").by(address=_wrapped(32, False, 1))
fault("offset-int32-elements (gather, integers): the offset of a page, counted in bf16 elements, wraps at 2^31").by(
    address=_wrapped(32, True, 2)
)
fault("page-id-int16 (page-table, integers): page numbers are kept in 16 bits").by(
    pages=lambda c, r, key: ok.pages(c, r, key) & 0x7FFF
)
fault("page-id-uint8 (page-table, integers): page numbers are kept in 8 bits").by(
    pages=lambda c, r, key: ok.pages(c, r, key) & 0xFF
)
fault("offset-float32 (gather, integers): the byte offset of a page passes through float32").by(
    address=lambda c, page: (
        (page.to(torch.float32) * float(c.kv_cache.stride(0) * c.kv_cache.element_size())).to(torch.int64) // 4
    )
)
fault("length-int8 (mask, integers): context lengths are kept in 8 bits").by(
    lengths=lambda c, rows: ok.lengths(c, rows) & 0xFF
)


# --------------------------------------------------------------------------------------------------- lengths and masks
def _tail(value: float) -> Callable[..., None]:
    def write(c: Call, out: Tensor, rows: Tensor, logits: Tensor, lens: Tensor) -> None:
        ok.write(c, out, rows, logits, lens)
        if c.clean:
            out[rows] = torch.where(torch.arange(c.width) < lens[:, None], out[rows], value)

    return write


def _written_to(limit: Callable[[Call, Tensor], Tensor]) -> Callable[..., None]:
    """-inf is written up to a limit [R] only; what is behind stays as it was allocated."""

    def write(c: Call, out: Tensor, rows: Tensor, logits: Tensor, lens: Tensor) -> None:
        before = out[rows]
        ok.write(c, out, rows, logits, lens)
        out[rows] = torch.where(torch.arange(c.width) < limit(c, lens)[:, None], out[rows], before)

    return write


def _masked_by_product(c: Call, rows: Tensor, logits: Tensor) -> Tensor:
    visible = (torch.arange(logits.shape[1]) < ok.lengths(c, rows)[:, None]).to(torch.float32)
    return logits * visible - (1 - visible) * 3.0e38


fault(
    "length-row-0 (mask, rows): every row has the length of row 0 "
    "[PrimeIntellect-ai/prime-rl#3504, flagos-ai/FlagGems-vllm#724]"
).by(lengths=lambda c, rows: lens_of(c, rows * 0))
fault(
    "length-last-draft (mask, rows): all draft rows have the last one's length "
    "[deepseek-ai/DeepGEMM#324, ROCm/aiter#4661]"
).by(lengths=lambda c, rows: lens_of(c, last_draft(c, rows)))
fault("length-first-draft (mask, rows): all draft rows have the first one's length").by(
    lengths=lambda c, rows: lens_of(c, first_draft(c, rows))
)
fault("length-of-request (mask, rows): lengths are indexed by request as if there were one a request").by(
    lengths=lambda c, rows: lens_of(c, rows // c.next_n)
)
fault("length-counted-back (mask, rows): draft rows' lengths are counted back from the last one's, a key a token").by(
    lengths=lambda c, rows: (lens_of(c, last_draft(c, rows)) - (c.next_n - 1 - rows % c.next_n)).clamp_min(0)
)
fault("length-stride (mask, rows): lengths are read as if they were contiguous").by(
    lengths=lambda c, rows: at(c.context_lens, rows).to(torch.int64)
)
fault("length-longest (mask, rows): every row has the longest length of the batch").by(
    lengths=lambda c, rows: c.context_lens.max().to(torch.int64).expand(len(rows))
)
fault(
    "length-one-less (mask, padding): the newest key is not seen: pos // 4 instead of (pos + 1) // 4 "
    "[vllm-project/tpu-inference#3536]"
).by(lengths=lambda c, rows: (ok.lengths(c, rows) - 1).clamp_min(0))
fault(
    "length-one-more (mask, padding): one key too many is seen: the quotient is rounded up "
    "[vllm-project/tpu-inference#3536]"
).by(lengths=lambda c, rows: (ok.lengths(c, rows) + 1).clamp_max(c.width))
fault("length-at-least-one (mask, padding): rows without keys are taken to have one").by(
    lengths=lambda c, rows: ok.lengths(c, rows).clamp_min(1)
)
fault("length-full-pages (mask, padding): lengths are rounded up to whole pages").by(
    lengths=lambda c, rows: ((ok.lengths(c, rows) + PAGE - 1) // PAGE * PAGE).clamp_max(c.width)
)
fault("length-of-prompt (mask, rows): compressed lengths are divided by the ratio once more").by(
    lengths=lambda c, rows: ok.lengths(c, rows) // 4
)
fault(
    "last-partial-page-skipped (gather, padding): the last, partly filled page is skipped "
    "[ROCm/aiter#4028, vllm-project/vllm#51252]"
).by(lengths=lambda c, rows: ok.lengths(c, rows) // PAGE * PAGE)
fault("last-full-page-skipped (gather, padding): a last page that is exactly full is skipped").by(
    lengths=lambda c, rows: torch.where(
        ok.lengths(c, rows) % PAGE == 0, (ok.lengths(c, rows) - PAGE).clamp_min(0), ok.lengths(c, rows)
    )
)
fault("partial-page-zeroed (gather, padding): keys of the last, partly filled page score zero").by(
    write=lambda c, out, rows, logits, lens: ok.write(
        c, out, rows, torch.where(torch.arange(logits.shape[1]) < (lens // PAGE * PAGE)[:, None], logits, 0.0), lens
    )
)
fault("no-vector-remainder (gather, padding): keys past the last multiple of 4 are left out").by(
    lengths=lambda c, rows: ok.lengths(c, rows) // 4 * 4
)
fault(
    "tail-unwritten (mask, padding): cells past the length are never written [vllm-project/vllm#51252, ROCm/aiter#4244]"
).by(write=_written_to(lambda c, lens: lens))
fault("tail-to-page-end (mask, padding): cells past the length are cleaned up to the end of its page only").by(
    write=_written_to(lambda c, lens: (lens + PAGE - 1) // PAGE * PAGE)
)
fault("tail-to-longest (mask, padding): cells past the length are cleaned up to the longest row of the batch only").by(
    write=_written_to(lambda c, lens: lens.max().expand(len(lens)) if len(lens) else lens)
)
fault("tail-zero (mask, padding): cells past the length are 0.0 [NVIDIA/cudnn-frontend#1154]").by(write=_tail(0.0))
fault("tail-lowest (mask, padding): cells past the length are the lowest finite number").by(
    write=_tail(torch.finfo(torch.float32).min)
)
fault("tail-nan (mask, padding): cells past the length are NaN").by(write=_tail(torch.nan))
fault("tail-plus-inf (mask, padding): cells past the length are +inf").by(write=_tail(torch.inf))
fault("mask-multiplied (mask, stale): the mask is a product with zero, which keeps the NaN of unwritten slots").by(
    lengths=lambda c, rows: c.context_lens.max().to(torch.int64).expand(len(rows)),
    write=lambda c, out, rows, logits, lens: ok.write(c, out, rows, _masked_by_product(c, rows, logits), lens),
)
fault("mask-by-zero-keys (mask, padding): invisible keys are read as zero and keep the logit 0").by(
    lengths=lambda c, rows: c.context_lens.max().to(torch.int64).expand(len(rows)),
    write=lambda c, out, rows, logits, lens: ok.write(
        c, out, rows, torch.where(torch.arange(logits.shape[1]) < ok.lengths(c, rows)[:, None], logits, 0.0), lens
    ),
)

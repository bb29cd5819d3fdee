"""Plain-torch reader and writer of paged key caches in the bf16, fp8 and fp4 layouts.

Only the named slots are touched, so a pool may be lazily mapped or poisoned; pages may lie further apart than
their size.
"""

import torch
from torch import Tensor

from reference import formats

PAGE = 64
"""Slots in a page."""
DIM = 128
"""Channels of a key."""

_SLOT_BYTES = {"bf16": 2 * DIM, "fp8": DIM + 4, "fp4": DIM // 2 + DIM // formats.BLOCK}
_PAYLOAD = {"bf16": 2 * DIM, "fp8": DIM, "fp4": DIM // 2}


def slot_bytes(layout: str) -> int:
    """Bytes of one key: 256 (bf16), 132 (fp8) or 68 (fp4)."""
    if layout not in _SLOT_BYTES:
        raise ValueError(f"layout must be one of {', '.join(_SLOT_BYTES)}, got {layout!r}")
    return _SLOT_BYTES[layout]


def page_bytes(layout: str) -> int:
    """Bytes of one page of 64 keys, without padding between pages."""
    return PAGE * slot_bytes(layout)


def byte_pages(kv_cache: Tensor, layout: str) -> Tensor:
    """View of a cache as uint8 [pages, page_bytes(layout)], keeping its page stride; no byte is read.

    Accepts bfloat16 [pages, 64, 1, 128] (bf16), uint8 [pages, 64, 1, 132] (fp8), uint8 [pages, 64, 1, 68] (fp4) and,
    for every layout, uint8 [pages, page_bytes]. A page itself must be contiguous; the stride between pages is free.
    """
    size = page_bytes(layout)
    dtype, width = (torch.bfloat16, DIM) if layout == "bf16" else (torch.uint8, slot_bytes(layout))
    shape, strides = tuple(kv_cache.shape), kv_cache.stride()
    paged = kv_cache.dtype == dtype and shape[1:] == (PAGE, 1, width) and (strides[1], strides[3]) == (width, 1)
    flat = kv_cache.dtype == torch.uint8 and shape[1:] == (size,) and strides[1] == 1
    if not (paged or flat):
        raise ValueError(
            f"kv_cache: the {layout} layout wants {dtype} [pages, {PAGE}, 1, {width}] or torch.uint8 [pages, {size}] "
            f"with contiguous pages, got {kv_cache.dtype} {list(shape)} with strides {list(strides)}"
        )
    page_stride = strides[0] * kv_cache.element_size()
    offset = kv_cache.storage_offset() * kv_cache.element_size()
    # A dtype view of the smallest legal tensor is enough: as_strided then addresses the whole storage in bytes.
    head = kv_cache.as_strided((min(1, shape[0]) * size // kv_cache.element_size(),), (1,)).view(torch.uint8)
    return head.as_strided((shape[0], size), (page_stride, 1), offset)


def read_keys(kv_cache: Tensor, layout: str, slots: Tensor) -> tuple[Tensor, Tensor | None]:
    """Keys stored at `slots` (int64 [n], page * 64 + offset), exactly as stored.

    bf16: (bfloat16 [n, 128], None). fp8: (float8_e4m3fn [n, 128], float32 scales [n]). fp4: (float32 [n, 128] holding
    e2m1 * 2**e, exact wherever that is in float32's range, None). Raises ValueError for a slot outside the cache.
    """
    pages = byte_pages(kv_cache, layout)
    payload, tail = _regions(pages, layout)
    page, offset = _split(slots, pages.shape[0])
    raw = payload[page, offset]
    if layout == "bf16":
        return raw.view(torch.bfloat16), None
    if layout == "fp8":
        return raw.view(torch.float8_e4m3fn), tail[page, offset].view(torch.float32)[:, 0]
    scale = formats.ue8m0_decode(tail[page, offset]).to(torch.float64)
    values = formats.e2m1_decode(formats.e2m1_unpack(raw)).to(torch.float64)
    # float64 keeps 2**-127 * 0.5 and NaN scales right; the narrowing is exact (or inf past float32's range).
    return (values * scale.repeat_interleave(formats.BLOCK, dim=1)).to(torch.float32), None


def write_keys(kv_cache: Tensor, layout: str, slots: Tensor, values: Tensor, scales: Tensor | None = None) -> None:
    """Store keys at `slots` (int64 [n], distinct) in place; no other byte changes.

    bf16: values bfloat16 [n, 128]. fp8: values float8_e4m3fn or uint8 [n, 128] with scales float32 [n]. fp4: values
    floating [n, 128] already on the grid, with integer exponents [n, 4] as scales or None for the published rule; or
    packed bytes uint8 [n, 64] with uint8 [n, 4] scale bytes. Raises ValueError for anything else.
    """
    pages = byte_pages(kv_cache, layout)
    payload, tail = _regions(pages, layout)
    page, offset = _split(slots, pages.shape[0])
    if torch.unique(slots).numel() != slots.numel():
        raise ValueError("slots: write_keys wants distinct slots, got a repeated one")
    count = slots.numel()
    if layout == "bf16":
        _expect("values", values, torch.bfloat16, (count, DIM))
        if scales is not None:
            raise ValueError("scales: the bf16 layout stores none, got a tensor")
        payload[page, offset] = values.contiguous().view(torch.uint8)
        return
    if layout == "fp8":
        if scales is None:
            raise ValueError("scales: the fp8 layout wants float32 [n], got None")
        raw = values.view(torch.uint8) if values.dtype == torch.float8_e4m3fn else values
        _expect("values", raw, torch.uint8, (count, DIM))
        _expect("scales", scales, torch.float32, (count,))
        payload[page, offset] = raw
        tail[page, offset] = scales.contiguous()[:, None].view(torch.uint8)
        return
    packed, scale_bytes = _fp4_bytes(values, scales, count)
    payload[page, offset] = packed
    tail[page, offset] = scale_bytes


def _regions(pages: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """The payload [pages, 64, payload bytes] and the scale bytes after it [pages, 64, 0 | 4 | 4], as views."""
    width = _PAYLOAD[layout]
    tail = slot_bytes(layout) - width
    count, stride, start = pages.shape[0], pages.stride(0), pages.storage_offset()
    payload = pages.as_strided((count, PAGE, width), (stride, width, 1), start)
    return payload, pages.as_strided((count, PAGE, tail), (stride, tail, 1), start + PAGE * width)


def _split(slots: Tensor, page_count: int) -> tuple[Tensor, Tensor]:
    if slots.dtype != torch.int64 or slots.dim() != 1:
        raise ValueError(f"slots: expected int64 [n], got {slots.dtype} {list(slots.shape)}")
    if slots.numel() and not (int(slots.min()) >= 0 and int(slots.max()) < page_count * PAGE):
        raise ValueError(
            f"slots: expected values in [0, {page_count * PAGE}), got {int(slots.min())} to {int(slots.max())}"
        )
    return slots >> 6, slots & 63


def _fp4_bytes(values: Tensor, scales: Tensor | None, count: int) -> tuple[Tensor, Tensor]:
    blocks = DIM // formats.BLOCK
    if values.dtype == torch.uint8:
        _expect("values", values, torch.uint8, (count, DIM // 2))
        if scales is None:
            raise ValueError("scales: packed fp4 values want uint8 [n, 4] scale bytes, got None")
        _expect("scales", scales, torch.uint8, (count, blocks))
        return values, scales
    _expect("values", values, values.dtype, (count, DIM))
    if scales is None:
        codes, exponents = formats.fp4_encode(values)
    else:
        if scales.is_floating_point() or tuple(scales.shape) != (count, blocks):
            raise ValueError(
                f"scales: fp4 values want integer exponents [{count}, {blocks}], "
                f"got {scales.dtype} {list(scales.shape)}"
            )
        exponents = scales
        inverse = formats.pow2(-exponents.to(torch.int32)).repeat_interleave(formats.BLOCK, dim=1)
        codes = formats.e2m1_encode(values.to(torch.float64) * inverse)
    if not torch.equal(formats.fp4_decode(codes, exponents), values.to(torch.float64)):
        raise ValueError(
            "values: fp4 values must lie on the e2m1 grid times the block's power of two, got one that does not"
        )
    return formats.e2m1_pack(codes), formats.ue8m0_encode(exponents)


def _expect(name: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if x.dtype != dtype or tuple(x.shape) != shape:
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {x.dtype} {list(x.shape)}")

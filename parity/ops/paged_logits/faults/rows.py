"""Faults of the logits' bookkeeping: which row, which table entry, which byte."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.paged_logits.faults import staged as ok
from parity.ops.paged_logits.faults.staged import PAGE, Call

MODELS, fault = collector("paged_logits")
fp8 = partial(fault, layout="fp8")


def flat(x: Tensor) -> Tensor:
    """The memory behind a tensor from its first element on, as a kernel sees it that ignores strides."""
    size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    return x.as_strided((size,), (1,))


def at(x: Tensor, place: Tensor) -> Tensor:
    memory = flat(x)
    return memory[place.remainder(memory.numel())] if memory.numel() else x.new_zeros(place.shape)


def of_rows(x: Tensor, c: Call, row: Tensor) -> Tensor:
    """q of other rows, float32 [R, H, 128]."""
    row = row.clamp(0, max(0, c.rows - 1))
    return x[row // c.next_n, row % c.next_n].to(torch.float32)


def lens_of(c: Call, row: Tensor) -> Tensor:
    return c.context_lens.reshape(-1)[row.remainder(max(1, c.rows))].to(torch.int64)


def first_draft(c: Call, rows: Tensor) -> Tensor:
    return rows // c.next_n * c.next_n


def last_draft(c: Call, rows: Tensor) -> Tensor:
    return first_draft(c, rows) + c.next_n - 1


def transposed(c: Call, rows: Tensor) -> Tensor:
    """Row b * N + n read as n * B + b."""
    return rows % c.next_n * (c.rows // c.next_n) + rows // c.next_n


# ------------------------------------------------------------------------------------------- queries and gates of rows
fault("weight-row-0 (head-weight, rows): every query row uses the gates of row 0 [PrimeIntellect-ai/prime-rl#3504]").by(
    weights=lambda c, rows: c.weights[rows * 0]
)
fault("weight-row-of-request (head-weight, rows): gates are indexed by request, so draft rows share them").by(
    weights=lambda c, rows: c.weights[rows // c.next_n]
)
fault("weight-transposed (head-weight, rows): gates are read as [heads, rows]").by(
    weights=lambda c, rows: at(c.weights, torch.arange(c.heads) * c.rows + rows[:, None])
)
fault("weight-stride (head-weight, rows): the row stride of the gates is taken to be the number of heads").by(
    weights=lambda c, rows: at(c.weights, rows[:, None] * c.heads + torch.arange(c.heads))
)
fault("query-first-draft (dot, rows): all draft rows use the first one's query").by(
    query=lambda c, rows: of_rows(c.q, c, first_draft(c, rows))
)
fault("query-transposed (dot, rows): query rows are read with drafts outermost").by(
    query=lambda c, rows: of_rows(c.q, c, transposed(c, rows))
)
fault("query-stride (dot, rows): the query is read as if it were contiguous").by(
    query=lambda c, rows: (
        at(
            c.q.view(torch.uint8) if c.q.element_size() == 1 else c.q.view(torch.int16),
            (rows[:, None] * c.heads + torch.arange(c.heads))[..., None] * 128 + torch.arange(128),
        )
        .view(c.q.dtype)
        .to(torch.float32)
    )
)
fault("output-transposed (mask, rows): results are written with drafts outermost").by(
    write=lambda c, out, rows, logits, lens: ok.write(c, out, transposed(c, rows), logits, lens)
)

# --------------------------------------------------------------------------------------------------------- block table
fault(
    "table-row-0 (page-table, rows): every row uses table row 0 [ROCm/aiter#4440, PrimeIntellect-ai/prime-rl#3504]"
).by(request=lambda c, rows: rows * 0)
fault(
    "table-row-is-query-row (page-table, rows): the table row is the query row, without division by next_n "
    "[vllm-project/vllm#51555, deepseek-ai/DeepGEMM#324]"
).by(request=lambda c, rows: rows)
fault("table-row-modulo (page-table, rows): the table row is the query row modulo the number of requests").by(
    request=lambda c, rows: rows % max(1, c.block_table.shape[0])
)
fault("table-row-neighbour (page-table, rows): each request uses its neighbour's table row").by(
    request=lambda c, rows: (rows // c.next_n + 1) % max(1, c.block_table.shape[0])
)
fault("table-transposed (page-table, rows): the table is read as [pages, requests]").by(
    pages=lambda c, r, key: at(c.block_table, key // PAGE * c.block_table.shape[0] + r[:, None]).to(torch.int64)
)
fault("table-stride (page-table, rows): the table's row stride is taken to be its width").by(
    pages=lambda c, r, key: at(c.block_table, r[:, None] * c.block_table.shape[1] + key // PAGE).to(torch.int64)
)
fault("table-ignored (page-table, rows): physical pages are taken to lie in logical order").by(
    pages=lambda c, r, key: r[:, None] * c.block_table.shape[1] + key // PAGE
)
fault("table-column-is-token (gather, rows): the key's position is used as the table's column [ROCm/aiter#4440]").by(
    pages=lambda c, r, key: c.entry(r[:, None], key)
)
fault("table-first-page-only (gather, rows): every logical page is read from the first one").by(
    pages=lambda c, r, key: c.entry(r[:, None], key * 0)
)
fault("table-page-late (gather, rows): the table is read one page ahead after the first page").by(
    pages=lambda c, r, key: c.entry(r[:, None], torch.where(key < PAGE, 0, key // PAGE + 1))
)
fault("table-pages-of-32 (gather, bytes): pages are taken to hold 32 slots").by(
    pages=lambda c, r, key: c.entry(r[:, None], key // 32), offsets=lambda c, key: key % 32
)
fault("table-pages-of-128 (gather, bytes): pages are taken to hold 128 slots").by(
    pages=lambda c, r, key: c.entry(r[:, None], key // 128), offsets=lambda c, key: key % 128
)


# ------------------------------------------------------------------------------------------------------ bytes of a page
def _tiled(c: Call, first: Tensor) -> Tensor:
    """Payload read as the store of 16 x 16 tiles would have written it: 16 slots x 16 bytes are contiguous."""
    offset_words = torch.arange(32)
    # A key's address is its page's base plus 32 words a slot; the slot shows in the low bits only relative to the page,
    # so permute inside aligned groups of 16 slots.
    slot = (first // 32) % 16
    group = first - slot * 32
    tile, inner = offset_words // 4, offset_words % 4
    return c.load(group[..., None] + tile * 64 + slot[..., None] * 4 + inner)


fault("slot-shifted (gather, bytes): each key is read from the next slot of its page").by(
    offsets=lambda c, key: (key + 1) % PAGE
)
fault("slot-reversed (gather, bytes): slots of a page are counted from its end").by(
    offsets=lambda c, key: PAGE - 1 - key % PAGE
)
fault("slots-interleaved (gather, bytes): even and odd slots of a page are read as two halves").by(
    offsets=lambda c, key: (key % PAGE) % 2 * 32 + key % PAGE // 2
)
fault("page-gap-ignored (gather, rows): pages are taken to follow each other without gaps").by(
    address=lambda c, page: page * (c.layout.page_bytes // 4)
)
fp8(
    "rows-of-132-bytes (store-layout, bytes): slots are read as 128 bytes of payload and 4 of scale side by side "
    "[vllm-project/vllm#50576, vllm-project/vllm#51555]"
).by(
    payload=lambda c, base, offset: base + offset * 33,
    scales=lambda c, base, offset: c.load(base + offset * 33 + 32).view(torch.float32),
)
fp8(
    "values-tiled-16x16 (store-layout, bytes): values are read from 16 by 16 tiles, the page being linear "
    "[vllm-project/vllm#52109]"
).by(keys=_tiled)
fp8("values-big-endian (gather, bytes): the bytes of a 4-byte word are taken in the opposite order").by(
    keys=lambda c, first: (
        ok.keys(c, first).view(torch.uint8).unflatten(-1, (-1, 4)).flip(-1).flatten(-2).view(torch.int32)
    )
)
fault("values-halves-swapped (gather, bytes): the two bf16 of a 4-byte word are exchanged").by(
    keys=lambda c, first: (
        ok.keys(c, first).view(torch.int16).unflatten(-1, (-1, 2)).flip(-1).flatten(-2).view(torch.int32)
    )
)
fp8(
    "scale-neighbour (k-scale, bytes): each key takes the scale of the next slot "
    "[hw-native-sys/pypto-lib#170, flagos-ai/FlagGems#6241]"
).by(scales=lambda c, base, offset: ok.scales(c, base, (offset + 1) % PAGE))
fp8(
    "scale-first-page (k-scale, bytes): all keys of a request take their scales from its first page [ROCm/ATOM#1466]"
).by(scales=lambda c, base, offset: ok.scales(c, base[:, :1].expand_as(base), offset))
fp8("scale-first-of-page (k-scale, bytes): one scale a page, its first, is used for all its slots").by(
    scales=lambda c, base, offset: ok.scales(c, base, offset * 0)
)
fp8("scale-every-32 (k-scale, bytes): scales repeat after 32 slots").by(
    scales=lambda c, base, offset: ok.scales(c, base, offset % 32)
)
fp8("scale-before-payload (k-scale, bytes): the scale plane is looked for in front of the payload").by(
    payload=lambda c, base, offset: base + PAGE + offset * 32,
    scales=lambda c, base, offset: c.load(base + offset).view(torch.float32),
)

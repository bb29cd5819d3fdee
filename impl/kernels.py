"""The two Triton kernels of the paged logits, for bf16 and fp8 pages: `decode` streams keys past a few resident rows,
`prefill` streams rows past a resident tile of keys. Row groups lie on grid axis 0, key chunks on axis 1.

Loops run to a run-time bound on a GPU, so that one compiled kernel serves every call. Some versions of the interpreter
cannot do that: TILES and STEPS hold the same bounds for it (written in place, since an assignment makes them tensors).
"""

import triton
import triton.language as tl

from impl.tiles import (
    BF16_UNIT,
    FP8_UNIT,
    PAGE_SLOTS,
    dots,
    head_sum,
    load_keys,
    load_lengths,
    load_page,
    load_queries,
    load_scales,
    load_weights,
    pair_base,
    store_dots,
    store_rows,
    tile_base,
)

# Sizes that change from call to call with the lengths or the table are not specialised, or each would compile anew.
_SIZES = ["next_n", "groups", "limit", "fill", "tiles", "steps", "table_stride"]


@triton.jit(do_not_specialize=[name for name in _SIZES if name != "steps"])
def decode(
    q,
    kv_cache,
    weights,
    context_lens,
    block_table,
    out,
    next_n,
    groups,
    limit,
    fill,
    tiles,
    q_stride_b,
    q_stride_n,
    q_stride_h,
    page_stride,
    w_stride_row,
    w_stride_h,
    len_stride_b,
    len_stride_n,
    table_stride,
    out_stride,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    TILES: tl.constexpr,
    DOTS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program: ROW_TILE rows of a request against `tiles` tiles of BLOCK keys; queries are loaded once."""
    UNIT: tl.constexpr = FP8_UNIT if FP8 else BF16_UNIT
    request = (tl.program_id(0) // groups).to(tl.int64)
    row0 = (tl.program_id(0) % groups) * ROW_TILE
    first = tl.program_id(1) * (tiles * BLOCK)
    lengths = load_lengths(context_lens + request * len_stride_b, row0, next_n, limit, len_stride_n, ROW_TILE)
    longest = tl.max(lengths, axis=0)
    table = block_table + request * table_stride
    row_out = out + request * next_n * (HEADS if DOTS else 1) * out_stride
    if first < longest:
        queries = load_queries(q + request * q_stride_b, row0, next_n, q_stride_n, q_stride_h, ROW_TILE, HEADS)
        w_base = weights + request * next_n * w_stride_row
        head_weights = load_weights(w_base, row0, next_n, w_stride_row, w_stride_h, ROW_TILE, HEADS)
        # Page ids are carried from trip to trip: a load that waits for another load in the same trip is not pipelined.
        page = load_page(table, first, longest)
        second = load_page(table, first + PAGE_SLOTS, longest) if BLOCK > PAGE_SLOTS else page
        scales = tl.zeros([BLOCK], dtype=tl.float32)
        if FP8:
            scales = load_scales(kv_cache, pair_base(page, second, page_stride, UNIT, BLOCK), first, longest, BLOCK)
        for tile in tl.range(0, TILES if INTERPRET else tiles):
            key0 = first + tile * BLOCK
            base = pair_base(page, second, page_stride, UNIT, BLOCK)
            keys = load_keys(kv_cache, base, key0, longest, FP8, BLOCK, INTERPRET)
            s = dots(keys, queries, FP8, INTERPRET)
            if DOTS:
                store_dots(row_out, s, lengths, row0, next_n, key0, out_stride, BLOCK, ROW_TILE, HEADS)
            else:
                total = head_sum(s, head_weights, scales, FP8, BLOCK, ROW_TILE, HEADS)
                store_rows(row_out, total, lengths, row0, next_n, key0, fill, out_stride, BLOCK, ROW_TILE)
            page = load_page(table, key0 + BLOCK, longest)
            second = load_page(table, key0 + BLOCK + PAGE_SLOTS, longest) if BLOCK > PAGE_SLOTS else page
            if FP8:
                # Scales do not feed the dot, so the compiler does not pipeline them: fetch the next tile's by hand, and
                # only after the last use of this tile's, so that they can land in the same registers.
                ahead = pair_base(page, second, page_stride, UNIT, BLOCK)
                scales = load_scales(kv_cache, ahead, key0 + BLOCK, longest, BLOCK)
    else:
        if fill > 0:
            nothing = tl.zeros([BLOCK, ROW_TILE], dtype=tl.float32)
            for tile in tl.range(0, TILES if INTERPRET else tiles):
                key0 = first + tile * BLOCK
                store_rows(row_out, nothing, lengths, row0, next_n, key0, fill, out_stride, BLOCK, ROW_TILE)


@triton.jit(do_not_specialize=[name for name in _SIZES if name != "tiles"])
def prefill(
    q,
    kv_cache,
    weights,
    context_lens,
    block_table,
    out,
    next_n,
    groups,
    limit,
    fill,
    steps,
    q_stride_b,
    q_stride_n,
    q_stride_h,
    page_stride,
    w_stride_row,
    w_stride_h,
    len_stride_b,
    len_stride_n,
    table_stride,
    out_stride,
    FP8: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    DOTS: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """One program: a tile of BLOCK keys, loaded once, against `steps` steps of ROW_TILE rows (at most ROWS in all)."""
    UNIT: tl.constexpr = FP8_UNIT if FP8 else BF16_UNIT
    request = (tl.program_id(0) // groups).to(tl.int64)
    first = (tl.program_id(0) % groups) * (steps * ROW_TILE)
    last = tl.minimum(next_n, first + steps * ROW_TILE)
    key0 = tl.program_id(1) * BLOCK
    lens = context_lens + request * len_stride_b
    longest = tl.max(load_lengths(lens, first, last, limit, len_stride_n, ROWS), axis=0)
    table = block_table + request * table_stride
    row_out = out + request * next_n * (HEADS if DOTS else 1) * out_stride
    if key0 < longest:
        base = tile_base(table, key0, longest, page_stride, UNIT, BLOCK)
        keys = load_keys(kv_cache, base, key0, longest, FP8, BLOCK, INTERPRET)
        scales = tl.zeros([BLOCK], dtype=tl.float32)
        if FP8:
            scales = load_scales(kv_cache, base, key0, longest, BLOCK)
        w_base = weights + request * next_n * w_stride_row
        for step in tl.range(0, STEPS if INTERPRET else steps):
            row0 = first + step * ROW_TILE
            queries = load_queries(q + request * q_stride_b, row0, next_n, q_stride_n, q_stride_h, ROW_TILE, HEADS)
            lengths = load_lengths(lens, row0, next_n, limit, len_stride_n, ROW_TILE)
            # Before the dot, which does not need them, so that they arrive while it runs.
            head_weights = load_weights(w_base, row0, next_n, w_stride_row, w_stride_h, ROW_TILE, HEADS)
            s = dots(keys, queries, FP8, INTERPRET)
            if DOTS:
                store_dots(row_out, s, lengths, row0, next_n, key0, out_stride, BLOCK, ROW_TILE, HEADS)
            else:
                total = head_sum(s, head_weights, scales, FP8, BLOCK, ROW_TILE, HEADS)
                store_rows(row_out, total, lengths, row0, next_n, key0, fill, out_stride, BLOCK, ROW_TILE)
    else:
        if fill > 0:
            nothing = tl.zeros([BLOCK, ROW_TILE], dtype=tl.float32)
            for step in tl.range(0, STEPS if INTERPRET else steps):
                row0 = first + step * ROW_TILE
                lengths = load_lengths(lens, row0, next_n, limit, len_stride_n, ROW_TILE)
                store_rows(row_out, nothing, lengths, row0, next_n, key0, fill, out_stride, BLOCK, ROW_TILE)

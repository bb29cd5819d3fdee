"""Device code that both Triton kernels share: where a tile of keys lies, its dot with the queries, the head sum.

A tile is `[BLOCK keys, 128] x [128, N]` with N = ROW_TILE * HEADS columns: keys along M, heads along N. On wgmma the
head sum then runs inside a thread and inside a quad of lanes, never across warps, so that its order depends on the
number of heads only, and a row has the same bits under every launch configuration.
"""

import triton
import triton.language as tl

# Fixed when triton builds the kernels below: interpreted kernels widen their operands before the dot, because the
# interpreter multiplies bf16 bit patterns as integers. A compiled kernel must never take that branch (an IEEE float32
# dot is slow and spills).
INTERPRETED: bool = triton.knobs.runtime.interpret

PAGE_SLOTS = tl.constexpr(64)
D = tl.constexpr(128)
FP8_PAYLOAD = tl.constexpr(64 * 128)
# A page's stride comes in units of 16 bytes, so that the compiler knows every key row to be 16-byte aligned.
BF16_UNIT = tl.constexpr(8)
FP8_UNIT = tl.constexpr(16)


@triton.jit
def load_page(table, key, longest):
    """Physical page of logical key `key`; past `longest` the entry may be anything and is not loaded."""
    return tl.load(table + key // PAGE_SLOTS, mask=key < longest, other=0)


# Both functions choose among page ids and multiply afterwards: through a choice among offsets the compiler would lose
# sight of their alignment.
@triton.jit
def pair_base(page, second, page_stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Element offset of the page behind each key, int64 [BLOCK], of a tile of one page or of two."""
    pages = tl.zeros([BLOCK], dtype=tl.int32) + page
    if BLOCK > PAGE_SLOTS:
        pages = tl.where(tl.arange(0, BLOCK) < PAGE_SLOTS, pages, second)
    return pages.to(tl.int64) * (page_stride * UNIT)


@triton.jit
def tile_base(table, key0, longest, page_stride, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """The same for a tile of any number of pages, read from the block table on the spot."""
    slot = tl.arange(0, BLOCK)
    pages = tl.zeros([BLOCK], dtype=tl.int32) + load_page(table, key0, longest)
    for i in tl.static_range(1, BLOCK // PAGE_SLOTS):
        pages = tl.where(slot >= i * PAGE_SLOTS, load_page(table, key0 + i * PAGE_SLOTS, longest), pages)
    return pages.to(tl.int64) * (page_stride * UNIT)


@triton.jit
def load_keys(kv_cache, base, key0, longest, FP8: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):
    """Keys of the tile as stored, [BLOCK, 128]; rows at and past `longest` are not read."""
    slot = tl.arange(0, BLOCK)
    offset = base + (slot % PAGE_SLOTS) * D
    mask = key0 + slot < longest
    if FP8:
        if INTERPRET:
            pointer = kv_cache
        else:
            pointer = kv_cache.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    else:
        pointer = kv_cache
    return tl.load(pointer + offset[:, None] + tl.arange(0, D)[None, :], mask=mask[:, None], other=0.0)


@triton.jit
def load_scales(kv_cache, base, key0, longest, BLOCK: tl.constexpr):
    """Float32 scale of each key of an fp8 tile, [BLOCK]."""
    slot = tl.arange(0, BLOCK)
    pointer = (kv_cache + base + FP8_PAYLOAD).to(tl.pointer_type(tl.float32), bitcast=True)
    return tl.load(pointer + slot % PAGE_SLOTS, mask=key0 + slot < longest, other=0.0)


@triton.jit
def widen(x, FP8: tl.constexpr):
    """Float32 value of bf16 operands or of e4m3 bytes; for the interpreter, whose own cast loses the NaN bytes."""
    if FP8:
        value = x.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        return tl.where((x & 0x7F) == 0x7F, float("nan"), value)
    else:
        return x.to(tl.float32)


@triton.jit
def dots(keys, queries, FP8: tl.constexpr, INTERPRET: tl.constexpr):
    """`keys [BLOCK, 128] @ queries [N, 128]^T` in float32."""
    if INTERPRET:
        return tl.dot(widen(keys, FP8), tl.trans(widen(queries, FP8)), input_precision="ieee")
    else:
        return tl.dot(keys, tl.trans(queries))


@triton.jit
def head_sum(s, weights, scales, FP8: tl.constexpr, BLOCK: tl.constexpr, ROW_TILE: tl.constexpr, HEADS: tl.constexpr):
    """`scale_j * sum_h w_h relu(s_jh)` for each key and row of the tile, [BLOCK, ROW_TILE]. NaN passes the ReLU."""
    s = tl.maximum(s, 0.0, propagate_nan=tl.PropagateNan.ALL) * weights[None, :]
    total = tl.sum(tl.reshape(s, [BLOCK, ROW_TILE, HEADS]), axis=2)
    if FP8:
        total = total * scales[:, None]
    return total


@triton.jit
def load_queries(q, row0, next_n, stride_n, stride_h, ROW_TILE: tl.constexpr, HEADS: tl.constexpr):
    """Queries of ROW_TILE rows of one request from row0 on, [ROW_TILE * HEADS, 128]; rows past next_n are zero."""
    column = tl.arange(0, ROW_TILE * HEADS)
    row = row0 + column // HEADS
    offset = row.to(tl.int64) * stride_n + (column % HEADS).to(tl.int64) * stride_h
    return tl.load(q + offset[:, None] + tl.arange(0, D)[None, :], mask=(row < next_n)[:, None], other=0.0)


@triton.jit
def load_weights(weights, row0, next_n, stride_row, stride_h, ROW_TILE: tl.constexpr, HEADS: tl.constexpr):
    """Head weights of the same rows, float32 [ROW_TILE * HEADS]."""
    column = tl.arange(0, ROW_TILE * HEADS)
    row = row0 + column // HEADS
    offset = row.to(tl.int64) * stride_row + (column % HEADS).to(tl.int64) * stride_h
    return tl.load(weights + offset, mask=row < next_n, other=0.0)


@triton.jit
def load_lengths(context_lens, row0, next_n, limit, stride_n, ROWS: tl.constexpr):
    """Context lengths of ROWS rows clamped to [0, limit], int32 [ROWS]; 0 past next_n."""
    row = row0 + tl.arange(0, ROWS)
    length = tl.load(context_lens + row.to(tl.int64) * stride_n, mask=row < next_n, other=0)
    return tl.minimum(tl.maximum(length, 0), limit)


@triton.jit
def store_rows(out, value, lengths, row0, next_n, key0, fill, stride_row, BLOCK: tl.constexpr, ROW_TILE: tl.constexpr):
    """Write [BLOCK, ROW_TILE] logits of rows row0.. of one request, and -inf from a row's length up to `fill`."""
    row = row0 + tl.arange(0, ROW_TILE)
    key = key0 + tl.arange(0, BLOCK)
    value = tl.where(key[:, None] < lengths[None, :], value, -float("inf"))
    mask = (key[:, None] < tl.maximum(lengths, fill)[None, :]) & (row < next_n)[None, :]
    tl.store(out + row.to(tl.int64)[None, :] * stride_row + key[:, None], value, mask=mask)


@triton.jit
def store_dots(
    out, s, lengths, row0, next_n, key0, stride_row, BLOCK: tl.constexpr, ROW_TILE: tl.constexpr, HEADS: tl.constexpr
):
    """Write the tile's dots [BLOCK, ROW_TILE * HEADS] to out [rows, HEADS, width]; `stride_row` is one head's width."""
    column = tl.arange(0, ROW_TILE * HEADS)
    row = row0 + column // HEADS
    key = key0 + tl.arange(0, BLOCK)
    length = tl.max(
        tl.where((column // HEADS)[:, None] == tl.arange(0, ROW_TILE)[None, :], lengths[None, :], 0), axis=1
    )
    mask = (key[:, None] < length[None, :]) & (row < next_n)[None, :]
    place = row.to(tl.int64) * HEADS + column % HEADS
    tl.store(out + place[None, :] * stride_row + key[:, None], s, mask=mask)

"""The fused store against a copy of the same bytes, and small calls against an empty launch.

Large calls go through several times the cache; small ones find their inputs in it, as after the pooling that makes
them, and stand next to a kernel that only moves the same bytes. Bars: `BARS`.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from impl import fused_store
from impl.store_modes import Mode
from parity.bench.timing import judged, medians, row
from parity.pages.layout import find

PART = "store"
"""Its name among the parts of `parity bench`."""
BARS = {"copy": 1.25, "launch_us": 1.5}
CHUNKS = 32  # of four channels, in a key
LARGE, SMALL = 262144, (1, 64, 512, 2048, 4096, 8191)
MODES = (Mode("fp8", "fused"), Mode("bf16", "fused"))
DTYPES = (torch.float32, torch.bfloat16)
EXTRA = (Mode("fp8_pow2", "published", True), Mode("fp4", "fused"))
EMPTY = """
extern "C" __global__ void __launch_bounds__(128) empty(int) {}
"""
# The store's loads and writes in its own pattern, and between them only what keeps the compiler from dropping them.
MOVE = """
__device__ float sum(float4 v) { return v.x + v.y + v.z + v.w; }
__device__ float sum(uint2 v) { return __uint_as_float(v.x ^ v.y); }
extern "C" __global__ void __launch_bounds__(128)
    move(const CHUNK* __restrict__ pooled, const float4* __restrict__ weight, const int* __restrict__ positions,
         const float4* __restrict__ rope, const long long* __restrict__ out_loc, unsigned char* pool,
         long long page_stride, int n) {
    const int token = (int)((blockIdx.x * 128 + threadIdx.x) / LANES), lane = (int)(threadIdx.x % LANES);
    if (token >= n) return;
    const long long slot = out_loc[token], position = positions[token];
    unsigned char* page = pool + (slot >> 6) * page_stride;
    float word[32 / LANES];
#pragma unroll
    for (int c = 0; c < 32 / LANES; ++c) {
        const int chunk = c * LANES + lane;
        word[c] = sum(pooled[(long long)token * 32 + chunk]) + sum(weight[chunk]);
        if ((c + 1) * LANES > 16 && chunk >= 16) word[c] += sum(rope[position * 16 + chunk - 16]);
    }
#pragma unroll
    for (int c = 0; c < 32 / LANES; ++c) {
        WRITTEN* payload = reinterpret_cast<WRITTEN*>(page + (slot & 63) * 32 * sizeof(WRITTEN));
        payload[c * LANES + lane] = WRITTEN(word[c]);
    }
    if (SCALED && lane == 0) reinterpret_cast<float*>(page + 64 * 128)[slot & 63] = word[0];
}
"""


def inputs(mode: Mode, tokens: int, dtype: torch.dtype, seed: int) -> dict[str, Any]:
    """Operands of one call on the current device: prefill-like positions, slots scattered by page."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    pages = -(-tokens // 64) + 1
    order = torch.randperm(pages, generator=generator, device=device)
    places = torch.arange(tokens, device=device)
    slots = order[places // 64] * 64 + places % 64
    return {
        "pooled": torch.randn(tokens, 128, generator=generator, device=device).to(dtype),
        "norm_weight": torch.rand(128, generator=generator, device=device) + 0.5,
        "eps": 1e-6,
        "positions": (torch.arange(tokens, dtype=torch.int32, device=device) * 4),
        "rope_table": torch.rand(tokens * 4, 64, generator=generator, device=device),
        "out_loc": slots,
        "kv_cache": find(mode.layout).empty_cache(pages, device),
    }


def moved_bytes(mode: Mode, tokens: int, dtype: torch.dtype) -> int:
    """Bytes that a call must read and write: keys, position, slot, one rotary row, and the stored slot."""
    return tokens * (128 * dtype.itemsize + 4 + 8 + 256 + find(mode.layout).slot_bytes)


def large_row(mode: Mode, dtype: torch.dtype, rounds: int, bar: float | None) -> dict[str, Any]:
    """A prefill of 262,144 tokens against a copy that reads and writes as many bytes in all."""
    total, lanes = moved_bytes(mode, LARGE, dtype), fused_store.lanes_for(LARGE)
    sets = [inputs(mode, LARGE, dtype, seed) for seed in range(2)]
    source = [torch.empty(total // 2, dtype=torch.uint8, device="cuda").fill_(seed) for seed in range(2)]
    target = [torch.empty_like(each) for each in source]
    calls = [partial(fused_store.store, mode, **one, lanes=lanes) for one in sets] * 4
    copies = [partial(b.copy_, a) for a, b in zip(source, target, strict=True)] * 4
    store, copy = medians((calls, copies), rounds)
    figures = {"microseconds": store, "copy_microseconds": copy, "bytes": total}
    found = row("store", mode.layout, shape(LARGE, dtype), f"{mode.name} x{lanes}", target=bar, **figures)
    return judged(found | {"value": store / copy, "unit": "x a copy"}, most=True)


def shape(tokens: int, dtype: torch.dtype) -> str:
    """Of a call, as the rows say it."""
    return f"{tokens} tokens {str(dtype).removeprefix('torch.')}"


@functools.cache
def compiled(text: str, name: str) -> Any:
    """A kernel of this file for the present GPU."""
    from cuda.core import Program, ProgramOptions

    major, minor = torch.cuda.get_device_capability()
    return Program(text, "c++", ProgramOptions(arch=f"sm_{major}{minor}")).compile("cubin").get_kernel(name)


def move_text(mode: Mode, dtype: torch.dtype, lanes: int) -> str:
    """`MOVE` for a layout (fp8 or bf16), the dtype of the pooled keys and the lanes that share a token."""
    layout = find(mode.layout)
    words = {
        "LANES": str(lanes),
        "CHUNK": "float4" if dtype == torch.float32 else "uint2",
        "WRITTEN": {8: "double", 4: "float"}[layout.payload // CHUNKS],
        "SCALED": str(int(layout.scale > 0)),
    }
    return "".join(f"#define {name} {value}\n" for name, value in words.items()) + MOVE


def small_rows(mode: Mode, dtype: torch.dtype, rounds: int) -> Iterator[dict[str, Any]]:
    """Small calls against an empty launch of the same grid, with the time that only their bytes would take."""
    from cuda.core import LaunchConfig, launch

    def start(kernel: Any, tokens: int, lanes: int, *words: Any) -> None:
        config = LaunchConfig(grid=-(-tokens * lanes // fused_store.THREADS), block=fused_store.THREADS)
        launch(fused_store._TorchStream(torch.cuda.current_stream().cuda_stream), config, kernel, *words)

    for tokens in SMALL:
        lanes = fused_store.lanes_for(tokens)
        one = inputs(mode, tokens, dtype, tokens)
        pool = one["kv_cache"]
        moved = [one[name].data_ptr() for name in ("pooled", "norm_weight", "positions", "rope_table", "out_loc")]
        moved += [pool.data_ptr(), ctypes.c_longlong(pool.stride(0) * pool.element_size()), ctypes.c_int(tokens)]
        calls = (
            partial(fused_store.store, mode, **one, lanes=lanes),
            partial(start, compiled(EMPTY, "empty"), tokens, lanes, ctypes.c_int(0)),
            partial(start, compiled(move_text(mode, dtype, lanes), "move"), tokens, lanes, *moved),
        )
        store, nothing, moving = medians([[call] * 50 for call in calls], rounds)
        figures = {"microseconds": store, "empty_microseconds": nothing, "bytes_above_microseconds": moving - nothing}
        figures |= {"bytes": moved_bytes(mode, tokens, dtype)}
        more = {"target": BARS["launch_us"], "value": store - nothing, "unit": "us of its own"}
        found = row("store", mode.layout, shape(tokens, dtype), f"{mode.name} x{lanes}", **figures, **more)
        yield judged(found, most=True)


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    """All rows of the store."""
    for modes, bar in ((MODES, BARS["copy"]), (EXTRA, None)):
        for mode in modes:
            for dtype in DTYPES:
                yield large_row(mode, dtype, rounds, bar)
    for mode in MODES:
        for dtype in DTYPES:
            yield from small_rows(mode, dtype, rounds)

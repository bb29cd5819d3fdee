"""Times the fused store on a GPU against a copy of the same bytes, and small calls against an empty launch.

`parity bench --store`. Every number is a median over CUDA graph replays, the two sides of a
comparison interleaved in the same rounds. Large calls go through several times the cache; small ones find their inputs
in it, as after the pooling that makes them, and stand beside a kernel that only moves the same bytes. Bars: `BARS`.
"""

import functools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from impl import fused_store
from impl.store_modes import Mode
from parity.pages.layout import find
from parity.run.device import provenance

BARS = {"copy": 1.25, "launch_us": 1.5}
LARGE, SMALL = 262144, (1, 64, 512, 2048, 4096, 8191)
MODES = (Mode("fp8", "fused"), Mode("bf16", "fused"))
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


class Timed:
    """A CUDA graph of `calls` calls, replayed and timed in microseconds a call."""

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = len(calls)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in calls:
                call()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()

    def once(self) -> float:
        """Time of one replay, divided by its calls."""
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) * 1e3 / self.calls


def medians(timed: Sequence[Timed], rounds: int) -> list[float]:
    """Median time of each, their replays interleaved."""
    for each in timed:
        each.once()
    found: list[list[float]] = [[] for _ in timed]
    for _ in range(rounds):
        for place, each in enumerate(timed):
            found[place].append(each.once())
    return [statistics.median(times) for times in found]


def large_row(mode: Mode, dtype: torch.dtype, lanes: int, rounds: int) -> dict[str, Any]:
    """A prefill of 262,144 tokens against a copy that reads and writes as many bytes in all."""
    total = moved_bytes(mode, LARGE, dtype)
    sets = [inputs(mode, LARGE, dtype, seed) for seed in range(2)]
    source = [torch.empty(total // 2, dtype=torch.uint8, device="cuda").fill_(seed) for seed in range(2)]
    target = [torch.empty_like(each) for each in source]
    calls = [partial(fused_store.store, mode, **one, lanes=lanes) for one in sets] * 4
    copies = [partial(b.copy_, a) for a, b in zip(source, target, strict=True)] * 4
    store, copy = medians((Timed(calls), Timed(copies)), rounds)
    return {
        "mode": mode.name,
        "tokens": LARGE,
        "pooled": str(dtype).removeprefix("torch."),
        "lanes": lanes,
        "bytes": total,
        "store_us": round(store, 2),
        "copy_us": round(copy, 2),
        "ratio": round(store / copy, 4),
        "terabytes_per_second": round(total / store * 1e-6, 3),
        "bar": BARS["copy"],
        "passed": store / copy <= BARS["copy"],
    }


@functools.cache
def compiled(text: str, name: str) -> Any:
    """A kernel of this file for the present card."""
    from cuda.core import Program, ProgramOptions

    major, minor = torch.cuda.get_device_capability()
    return Program(text, "c++", ProgramOptions(arch=f"sm_{major}{minor}")).compile("cubin").get_kernel(name)


def move_text(mode: Mode, dtype: torch.dtype, lanes: int) -> str:
    """`MOVE` for a layout (fp8 or bf16), the dtype of the pooled keys and the lanes that share a token."""
    words = {
        "LANES": str(lanes),
        "CHUNK": "float4" if dtype == torch.float32 else "uint2",
        "WRITTEN": "double" if mode.layout == "bf16" else "float",
        "SCALED": str(int(mode.layout == "fp8")),
    }
    return "".join(f"#define {name} {value}\n" for name, value in words.items()) + MOVE


def small_rows(mode: Mode, dtype: torch.dtype, width: int | None, rounds: int) -> list[dict[str, Any]]:
    """Small calls against an empty launch of the same grid, beside the time that their bytes alone would take."""
    import ctypes

    from cuda.core import LaunchConfig, launch

    rows = []

    def start(kernel: Any, tokens: int, lanes: int, *words: Any) -> None:
        config = LaunchConfig(grid=-(-tokens * lanes // fused_store.THREADS), block=fused_store.THREADS)
        launch(fused_store._TorchStream(torch.cuda.current_stream().cuda_stream), config, kernel, *words)

    for tokens in SMALL:
        lanes = width or fused_store.lanes_for(tokens)
        one = inputs(mode, tokens, dtype, tokens)
        pool = one["kv_cache"]
        moved = [one[name].data_ptr() for name in ("pooled", "norm_weight", "positions", "rope_table", "out_loc")]
        moved += [pool.data_ptr(), ctypes.c_longlong(pool.stride(0) * pool.element_size()), ctypes.c_int(tokens)]
        calls = (
            partial(fused_store.store, mode, **one, lanes=lanes),
            partial(start, compiled(EMPTY, "empty"), tokens, lanes, ctypes.c_int(0)),
            partial(start, compiled(move_text(mode, dtype, lanes), "move"), tokens, lanes, *moved),
        )
        store, nothing, moving = medians([Timed([call] * 50) for call in calls], rounds)
        rows.append(
            {
                "mode": mode.name,
                "tokens": tokens,
                "pooled": str(dtype).removeprefix("torch."),
                "lanes": lanes,
                "store_us": round(store, 3),
                "empty_us": round(nothing, 3),
                "above_us": round(store - nothing, 3),
                "bytes": moved_bytes(mode, tokens, dtype),
                "bytes_alone_above_us": round(moving - nothing, 3),
                "bar": BARS["launch_us"],
                "passed": store - nothing <= BARS["launch_us"],
            }
        )
    return rows


def run(rounds: int = 60, lanes: Sequence[int] = ()) -> dict[str, Any]:
    """All rows, with provenance; JSON types. `lanes` a token to try; none: those that a call of the size takes."""
    large, small = [], []
    for width in lanes or (None,):
        for mode in MODES + EXTRA:
            for dtype in (torch.float32, torch.bfloat16):
                large.append(large_row(mode, dtype, width or fused_store.lanes_for(LARGE), rounds))
                print(large[-1], flush=True)
        for mode in MODES:
            for dtype in (torch.float32, torch.bfloat16):
                small += small_rows(mode, dtype, width, rounds)
    for row in small:
        print(row, flush=True)
    barred = [row for row in large if row["mode"] in {mode.name for mode in MODES}] + small
    return {
        "kind": "bench store",
        "provenance": provenance(torch.device("cuda")),
        "bars": BARS,
        "large": large,
        "small": small,
        "passed": all(row["passed"] for row in barred if row["lanes"] == fused_store.lanes_for(row["tokens"])),
    }

"""`parity sweep memory`: peak bytes and time of every path against rows x context, predicted, and measured on CUDA."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parity.pages.layout import DIM, PAGE, find
from parity.run import memory

KIND, FORMAT = "indexer-parity/sweep-memory", 1
PATHS = ("gather-bf16", "torch-bf16", "torch-fp8", "triton-bf16", "triton-fp8")
GPUS = (16, 24, 48, 96)  # GB, 10^9 bytes, the whole GPU for this one layer's cache and call
ROWS = (1, 64, 1024, 4096)
KEYS = (1127, 5500, 22016, 131072, 262144)
STORY = (4096, 22016)  # rows and keys (344 pages) of the call that would not fit
# Rates that bound the time from below: measured on an H200 (a copy, and a large bf16 product).
BYTES_PER_SECOND, FLOPS = 4.28e12, 756e12


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Bytes beyond inputs and result at the peak, bytes of result and of the pages, least seconds on an H200."""

    workspace: int
    result: int
    pages: int
    seconds: float

    @property
    def total(self) -> int:
        """What a GPU must hold at once."""
        return self.workspace + self.result + self.pages


def predicted(path: str, rows: int, keys: int, heads: int = 64) -> Predicted:
    """By formula. The gather holds every row's keys, then the scores in bf16 and again in float32; the torch path keeps
    its temporaries under a budget; the kernels need nothing besides the result."""
    layout = path.rpartition("-")[2]
    pages = -(-keys // PAGE)
    pool, result = pages * find(layout).page_bytes, memory.result_bytes(rows, keys)
    cells = rows * heads * pages * PAGE
    work = 2 * cells * DIM / FLOPS
    if path.startswith("gather"):
        gathered = memory.gather_bytes(rows, pages, find("bf16").page_bytes)
        workspace = gathered + 2 * cells + 4 * cells
        # Written and read: the gathered keys, the scores in bf16, the scores in float32 (the ReLU passes twice).
        moved = 2 * gathered + 2 * 2 * cells + 4 * 4 * cells
    elif path.startswith("torch"):
        workspace = memory.WORKSPACE
        moved = pool + result + 4 * 4 * cells
    else:
        workspace, moved = 0, pool + result
    return Predicted(workspace, result, pool, max(moved / BYTES_PER_SECOND, work))


def longest(path: str, rows: int, gpu: int, heads: int = 64) -> int:
    """Keys of the longest context, in whole pages, for which one call with its pages fits into `gpu` GB; 0 if none."""
    fixed, one = (predicted(path, rows, pages * PAGE, heads).total for pages in (0, 1))
    return max(0, gpu * 10**9 - fixed) // (one - fixed) * PAGE  # every page takes as much as the first


def sweep(
    device: torch.device,
    rows: Sequence[int] = ROWS,
    keys: Sequence[int] = KEYS,
    heads: int = 64,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """{kind, format, rows: [{path, rows, keys, predicted, measured or the reason why not}], gpus}, JSON types."""
    points = []
    for path, count, length in itertools.product(PATHS, rows, keys):
        guess = predicted(path, count, length, heads)
        point: dict[str, Any] = {"path": path, "rows": count, "keys": length}
        point |= {"predicted_workspace": guess.workspace, "result": guess.result, "pages": guess.pages}
        point |= {"predicted_seconds": guess.seconds, "workspace": None, "seconds": None}
        point["not_measured"] = reason(device, guess)
        if point["not_measured"] is None:
            point |= measured(path, count, length, heads, device)
            say(f"parity sweep memory: {path}, {count:,} rows, {length:,} keys")
        points.append(point)
    gpus = [
        {"gpu": gpu, "path": path, "rows": count, "longest_keys": longest(path, count, gpu, heads)}
        for gpu, path, count in itertools.product(GPUS, PATHS, rows)
    ]
    return {"kind": KIND, "format": FORMAT, "heads": heads, "rows": points, "gpus": gpus, "device": device.type}


def reason(device: torch.device, guess: Predicted) -> str | None:
    """Why a point is predicted only."""
    if device.type != "cuda":
        return "measured on CUDA only"
    free, _ = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if guess.total > 0.9 * free:
        return f"needs {guess.total / 1e9:.1f} GB, the GPU has {free / 1e9:.1f} GB free"
    return None


def measured(path: str, rows: int, keys: int, heads: int, device: torch.device, *, repeats: int = 5) -> dict[str, Any]:
    """{workspace: peak bytes beyond inputs and result, seconds: median of `repeats` on CUDA, of one call elsewhere}."""
    function, named = call(path, rows, keys, heads, device)
    out = function(**named)  # compiles, and fills the libraries' own workspaces
    del out
    with memory.peak_bytes(device) as peak:
        out = function(**named)
    size = out.numel() * out.element_size()
    del out
    if device.type != "cuda":
        return {"workspace": peak.bytes - size, "seconds": None}
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        out = function(**named)
        end.record()
        torch.cuda.synchronize(device)
        del out
        times.append(start.elapsed_time(end) / 1000)
    return {"workspace": peak.bytes - size, "seconds": statistics.median(times)}


def call(
    path: str, rows: int, keys: int, heads: int, device: torch.device
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """(function, keyword arguments) of one path: one request whose rows all see `keys` keys, pages in reverse order.

    Values do not change bytes or time: every byte 0x38, a small positive number in every format.
    """
    kernel, _, layout = path.rpartition("-")
    pages = -(-keys // PAGE)
    pool = torch.full((pages, find(layout).page_bytes), 0x38, dtype=torch.uint8, device=device)
    named = {
        "q": torch.ones((1, rows, heads, DIM), device=device).to(find(layout).query_dtype),
        "kv_cache": find(layout).cache_view(pool),
        "weights": torch.full((rows, heads), 1 / 64, device=device),
        "context_lens": torch.full((1, rows), keys, dtype=torch.int32, device=device),
        "block_table": torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=device)[None],
        "max_context_len": keys,
    }
    return function_of(kernel, layout), named


def function_of(kernel: str, layout: str) -> Callable[..., Any]:
    """The logits function of a path."""
    from impl import torch_path

    if kernel == "gather":
        return torch_path.materialising_gather_paged_mqa_logits
    if kernel == "torch":
        return getattr(torch_path, f"torch_{layout}_paged_mqa_logits")
    from importlib import import_module

    return getattr(import_module(f"impl.logits_{layout}"), f"{layout}_paged_mqa_logits")


def table(report: dict[str, Any]) -> list[str]:
    """The report as lines for a terminal: the call of the incident, then what fits into which GPU."""
    count, length = STORY
    lines = [f"{count:,} rows x {length:,} keys:"]
    for point in report["rows"]:
        if (point["rows"], point["keys"]) == STORY:
            real = point["workspace"]
            said = f"{real / 1e9:.2f} GB measured" if real is not None else f"not measured: {point['not_measured']}"
            if point["seconds"] is not None:
                said += f", {point['seconds'] * 1e3:.2f} ms"
            guess = point["predicted_workspace"] / 1e9
            lines.append(f"  {point['path']:12s} {guess:7.2f} GB beyond inputs and result, {said}")
    most = max(entry["rows"] for entry in report["gpus"])
    lines.append(f"longest context (keys) of one call with {most:,} rows, its pages and result included:")
    lines.append("  path         " + "".join(f"{f'{gpu} GB':>14s}" for gpu in GPUS))
    for path in PATHS:
        found = {e["gpu"]: e["longest_keys"] for e in report["gpus"] if e["path"] == path and e["rows"] == most}
        lines.append(f"  {path:12s} " + "".join(f"{found[gpu]:14,d}" for gpu in GPUS))
    return lines

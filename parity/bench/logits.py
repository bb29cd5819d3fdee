"""Times the Triton kernels against the card's own ceilings, measured in the same rounds, after checking their results.

A rate is only printed for results inside the proved bound. Kernels are timed as replays of a captured CUDA graph, so
that no launch from Python is in the numbers, and as ratios within a round, so that drifting clocks cancel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.bounds import expected
from parity.run import device as devices
from parity.run import memory

PAGE, DIM, HEADS = 64, 128, 64
STORED_BYTES = {"bf16": 2 * DIM, "fp8": DIM + 4}
QUERY_BYTES = {"bf16": 2, "fp8": 1}
TARGET_DEVICE = "H200"
"""The targets below were set for this card; elsewhere the same numbers are printed without a verdict."""


@dataclass(frozen=True)
class Workload:
    """One shape: `requests` x `next_n` rows, the last of each request seeing `keys` keys.

    `ceiling` says what it is held against: the card's copy rate (bytes), its bf16 matrix rate (operations), or nothing
    but `target` in microseconds. In a prefill every row sees the keys before its own token, four tokens a key.
    """

    name: str
    layout: str
    requests: int
    next_n: int
    keys: int
    ceiling: str
    target: float | None

    def lengths(self) -> list[int]:
        return [self.keys - (self.next_n - 1 - row + 3) // 4 for row in range(self.next_n)] * self.requests

    def bytes(self) -> int:
        """Least traffic: stored keys and queries once, the result once."""
        pages = self.requests * -(-self.keys // PAGE)
        queries = self.requests * self.next_n * HEADS * (DIM * QUERY_BYTES[self.layout] + 4)
        return pages * PAGE * STORED_BYTES[self.layout] + queries + 4 * self.requests * self.next_n * self.keys

    def operations(self) -> int:
        return 2 * DIM * HEADS * sum(self.lengths())


WORKLOADS = (
    Workload("decode", "bf16", 64, 1, 131072, "copy", 0.85),
    Workload("decode", "fp8", 64, 1, 131072, "copy", 0.85),
    Workload("prefill", "bf16", 1, 4096, 16384, "matrix", 0.60),
    Workload("prefill", "fp8", 1, 4096, 16384, "matrix", None),
    Workload("speculate", "bf16", 32, 2, 131072, "copy", None),
    Workload("speculate", "fp8", 32, 2, 131072, "copy", None),
    Workload("single", "bf16", 1, 1, 32768, "latency", 15.0),
    Workload("single", "fp8", 1, 1, 32768, "latency", 15.0),
)


def build(work: Workload, device: torch.device, seed: int = 0) -> SimpleNamespace:
    """Operands of a workload: gaussian keys under a random block table, an fp8 scale of its own for every key."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    width = -(-work.keys // PAGE)
    pages = work.requests * width
    if work.layout == "bf16":
        kv_cache = torch.empty(pages, PAGE, 1, DIM, dtype=torch.bfloat16, device=device)
        kv_cache.normal_(generator=generator)
    else:
        pool = torch.empty(pages, PAGE * STORED_BYTES["fp8"], dtype=torch.uint8, device=device)
        for first in range(0, pages, 16384):
            part = pool[first : first + 16384]
            keys = (gaussian(len(part), PAGE * DIM) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
            part[:, : PAGE * DIM] = keys.view(torch.uint8)
            part[:, PAGE * DIM :] = (0.005 + 0.01 * gaussian(len(part), PAGE).abs()).view(torch.uint8)
        kv_cache = pool.view(pages, PAGE, 1, STORED_BYTES["fp8"])
    q = gaussian(work.requests, work.next_n, HEADS, DIM)
    return SimpleNamespace(
        q=q.bfloat16() if work.layout == "bf16" else (q * 60).to(torch.float8_e4m3fn),
        kv_cache=kv_cache,
        weights=gaussian(work.requests * work.next_n, HEADS),
        context_lens=torch.tensor(work.lengths(), dtype=torch.int32, device=device).view(work.requests, work.next_n),
        block_table=torch.randperm(pages, device=device, generator=generator).int().view(work.requests, width),
        max_context_len=work.keys,
    )


def worst_ratio(operands: Any, contract: Contract, result: torch.Tensor, samples: int = 4) -> float:
    """Largest error over bound in sampled rows (first and last among them); inf where the tail is not -inf."""
    count = len(result)
    rows = torch.linspace(0, count - 1, min(samples, count), device=result.device).round().long().unique()
    wanted = expected(operands, contract, rows)
    got = result[rows].double()
    inside = torch.arange(wanted.logits.shape[1], device=result.device) < wanted.lens[:, None]
    error = torch.where(inside, (got[:, : inside.shape[1]] - wanted.logits).abs(), 0.0)
    past = torch.arange(got.shape[1], device=result.device) >= wanted.lens[:, None]
    if not bool((got[past] == -float("inf")).all()):
        return float("inf")
    return float((error / wanted.bound.clamp_min(1e-300)).nan_to_num(nan=float("inf")).max())


def graph_of(call: Callable[[], Any], times: int) -> torch.cuda.CUDAGraph:
    """`times` calls in one captured graph, warmed up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    graph.replay()
    return graph


def milliseconds(call: Callable[[], Any], times: int = 1) -> float:
    """GPU time of one call, by events around `times` of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def ceilings(device: torch.device) -> dict[str, tuple[Callable[[], Any], float]]:
    """Each ceiling as a call and its work: bytes of a copy (read and written), operations of a bf16 matrix product.

    They are called from Python, not replayed: in a graph the copy goes to a copy engine, which is slower.
    """
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    product = torch.empty_like(a)
    return {
        "copy": (lambda: target.copy_(source), 2.0 * source.numel()),
        "matrix": (lambda: torch.matmul(a, b, out=product), 2.0 * 8192**3),
    }


def measure(work: Workload, device: torch.device, against: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Check, then time one workload and its ceiling in turn; a row of the report."""
    from impl.launch import paged_logits
    from impl.logits_bf16 import bf16_paged_mqa_logits
    from impl.logits_fp8 import fp8_paged_mqa_logits

    function: Any = bf16_paged_mqa_logits if work.layout == "bf16" else fp8_paged_mqa_logits
    operands = build(work, device)
    named = vars(operands)
    result, config = paged_logits(work.layout, **named)
    ratio = worst_ratio(operands, Contract.from_dict(function.parity_contract, device), result)
    row: dict[str, Any] = {"name": work.name, "layout": work.layout, "shape": _shape(work), "config": str(config)}
    row |= {"worst_error_over_bound": ratio, "target": work.target}
    if not ratio <= 1:
        return row | {"status": "failed", "reason": f"error is {ratio:.3g} times the bound, not timed"}

    def call() -> None:
        function(**named, out=result)

    if work.ceiling == "latency":
        graph = graph_of(call, 1)
        value = 1e3 * statistics.median(milliseconds(graph.replay, 200) for _ in range(rounds))
        chain = graph_of(call, 20)
        busy = 1e3 * statistics.median(milliseconds(chain.replay, 10) for _ in range(rounds)) / 20
        row |= {"microseconds": value, "microseconds_back_to_back": busy, "value": value, "unit": "us a replay"}
        met = work.target is None or value < work.target
    else:
        reference, amount = against[work.ceiling]
        inner = 8 if work.ceiling == "copy" else 3
        graph = graph_of(call, inner)
        reference()
        mine = work.bytes() if work.ceiling == "copy" else work.operations()
        times = [(milliseconds(reference, inner), milliseconds(graph.replay) / inner) for _ in range(rounds)]
        ratios = [(mine / own) / (amount / base) for base, own in times]
        own, base = (statistics.median(column[i] for column in times) for i in (1, 0))
        value = statistics.median(ratios)
        row |= {
            "milliseconds": own,
            "ceiling": work.ceiling,
            "rate": mine / own * 1e-9,
            "ceiling_rate": amount / base * 1e-9,
        }
        row |= {"value": value, "unit": f"of {work.ceiling}", "ratios": ratios}
        met = work.target is None or value >= work.target
    return row | {"status": "met" if met else "missed", "reason": ""}


def memory_story(device: torch.device) -> list[dict[str, Any]]:
    """Peak bytes beyond the operands for 4,096 rows and a 344-page table: historical gather, torch path, Triton."""
    from impl.logits_bf16 import bf16_paged_mqa_logits
    from impl.torch_path import materialising_gather_paged_mqa_logits, torch_bf16_paged_mqa_logits

    work = Workload("memory", "bf16", 1, 4096, 344 * PAGE, "copy", None)
    operands = vars(build(work, device))
    rows = []
    for function in (materialising_gather_paged_mqa_logits, torch_bf16_paged_mqa_logits, bf16_paged_mqa_logits):
        row: dict[str, Any] = {"path": function.__name__, "shape": _shape(work)}
        torch.cuda.empty_cache()
        needed = 60e9 if "materialising" in function.__name__ else 2e9
        if torch.cuda.mem_get_info(device)[0] < needed:
            rows.append(row | {"status": "not run", "reason": f"needs {needed / 1e9:.0f} GB of free memory"})
            continue
        function(**operands)
        with memory.peak_bytes(device) as peak:
            function(**operands)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function(**operands)
        end.record()
        end.synchronize()
        rows.append(row | {"status": "measured", "peak_bytes": peak.bytes, "milliseconds": start.elapsed_time(end)})
    return rows


def selection_times(device: torch.device, rounds: int) -> list[dict[str, Any]]:
    """`topk_to_slots` beside a bare torch.topk, k = 512, for prefill and decode shapes."""
    from impl.topk import topk_to_slots

    rows = []
    for count, width in ((4096, 344 * PAGE), (64, 262144)):
        logits = torch.randn(count, width, device=device)
        lens = torch.full((count, 1), width, dtype=torch.int32, device=device)
        table = torch.arange(count * (width // PAGE), device=device).int().view(count, -1)

        def bare_topk(logits: torch.Tensor = logits) -> Any:
            return torch.topk(logits, 512)

        def slots(logits: torch.Tensor = logits, lens: torch.Tensor = lens, table: torch.Tensor = table) -> Any:
            return topk_to_slots(logits, lens, table, 512)

        graphs = graph_of(bare_topk, 1), graph_of(slots, 1)
        bare, ours = (statistics.median(milliseconds(graph.replay, 3) for _ in range(rounds)) for graph in graphs)
        rows.append({"rows": count, "width": width, "k": 512, "milliseconds": ours, "torch_topk_milliseconds": bare})
    return rows


def _shape(work: Workload) -> str:
    return f"{work.requests * work.next_n} rows x {work.keys} keys"


def report(device: torch.device, names: Sequence[str], rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything measured, as the JSON holds it."""
    where = devices.provenance(device)
    against = ceilings(device)
    rows = []
    for work in WORKLOADS:
        if names and work.name not in names:
            continue
        row = measure(work, device, against, rounds)
        if TARGET_DEVICE not in where["device"] and row["status"] in ("met", "missed"):
            row |= {"status": "measured", "target": None}
        rows.append(row)
        say(line(row))
        torch.cuda.empty_cache()
    del against
    found: dict[str, Any] = {"provenance": where, "rounds": rounds, "rows": rows, "memory": [], "selection": []}
    if not names or "memory" in names:
        found["memory"] = memory_story(device)
        for entry in found["memory"]:
            gigabytes = f"{entry['peak_bytes'] / 1e9:8.3f} GB" if "peak_bytes" in entry else entry["reason"]
            say(f"peak memory  {entry['path']:<42}{gigabytes}  {entry.get('milliseconds', 0):8.2f} ms")
    if not names or "selection" in names:
        found["selection"] = selection_times(device, rounds)
        for entry in found["selection"]:
            say(
                f"top-k        {entry['rows']} rows x {entry['width']}: {entry['milliseconds']:.3f} ms, "
                f"torch.topk alone {entry['torch_topk_milliseconds']:.3f} ms"
            )
    found["exit"] = 1 if any(row["status"] in ("failed", "missed") for row in rows) else 0
    return found


def line(row: dict[str, Any]) -> str:
    """One row of the printed table."""
    head = f"{row['name']:<11}{row['layout']:<6}{row['shape']:<26}"
    if "value" not in row:
        return f"{head}{row['status']}: {row['reason']}"
    target = "" if row["target"] is None else f" (target {row['target']:g})"
    rate = (
        f"{row['milliseconds']:8.3f} ms"
        if "milliseconds" in row
        else f"{row['microseconds_back_to_back']:8.2f} us busy"
    )
    return f"{head}{row['value']:8.3f} {row['unit']:<12}{rate}  {row['status']}{target}  {row['config']}"

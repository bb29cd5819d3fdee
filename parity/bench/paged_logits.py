"""Paged logits against the ceilings of the GPU that they run on, measured in the same rounds, after checking results.

A rate is only printed for results inside the proved bound.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from impl.topk import topk_to_slots
from impl.torch_path import materialising_gather_paged_mqa_logits, torch_bf16_paged_mqa_logits
from parity.bench.timing import graph_of, in_turn, judged, medians, milliseconds, row
from parity.domain.contract import Contract
from parity.explain.live import Operands
from parity.numerics.bounds import expected
from parity.ops.paged_logits.judge import compare_bounded, compare_tail
from parity.pages.layout import DIM, PAGE, find
from parity.run import memory

HEADS = 64


def kernels() -> dict[str, Any]:
    """The Triton kernels by layout; imports triton, whose import decides on interpretation."""
    from impl.logits_bf16 import bf16_paged_mqa_logits
    from impl.logits_fp8 import fp8_paged_mqa_logits

    return {"bf16": bf16_paged_mqa_logits, "fp8": fp8_paged_mqa_logits}


@dataclass(frozen=True)
class Workload:
    """One shape: `requests` x `next_n` rows, the last of each request seeing `keys` keys.

    `ceiling` says what it is held against: the GPU's copy rate (bytes), its bf16 matrix rate (operations), or nothing
    but `target` in microseconds. In a prefill every row sees the keys before its own token, four tokens per key.
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
        layout = find(self.layout)
        pages = self.requests * -(-self.keys // PAGE)
        queries = self.requests * self.next_n * HEADS * (DIM * layout.query_dtype.itemsize + 4)
        return pages * layout.page_bytes + queries + 4 * self.requests * self.next_n * self.keys

    @property
    def shape(self) -> str:
        return f"{self.requests * self.next_n} rows x {self.keys} keys"

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


def build(work: Workload, device: torch.device) -> Operands:
    """Operands of a workload: gaussian keys, with scales of their own in layouts that have them, and a random table."""
    generator = torch.Generator(device=device).manual_seed(0)

    def gaussian(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    width = -(-work.keys // PAGE)
    pages = work.requests * width
    layout = find(work.layout)
    kv_cache = layout.empty_cache(pages, device)
    if layout.scale:
        pool, values = kv_cache.view(pages, layout.page_bytes), layout.slots * layout.payload
        for part in pool.split(16384):
            keys = (gaussian(len(part), PAGE * DIM) * 100).clamp(-448, 448).to(layout.query_dtype)
            part[:, :values] = keys.view(torch.uint8)
            part[:, values:] = (0.005 + 0.01 * gaussian(len(part), PAGE).abs()).view(torch.uint8)
    else:
        kv_cache.normal_(generator=generator)
    q = gaussian(work.requests, work.next_n, HEADS, DIM)
    return Operands(
        q=(q * 60 if layout.scale else q).to(layout.query_dtype),
        kv_cache=kv_cache,
        weights=gaussian(work.requests * work.next_n, HEADS),
        context_lens=torch.tensor(work.lengths(), dtype=torch.int32, device=device).view(work.requests, work.next_n),
        block_table=torch.randperm(pages, device=device, generator=generator).int().view(work.requests, width),
        max_context_len=work.keys,
    )


def worst_ratio(operands: Operands, contract: Contract, result: torch.Tensor) -> float:
    """Largest error over bound in four rows (first and last among them); inf where a tail is not -inf."""
    count = len(result)
    rows = torch.linspace(0, count - 1, min(4, count), device=result.device).round().long().unique()
    verdict = compare_bounded(result, expected(operands, contract, rows), operands, contract=contract)
    if verdict.ratio is None or not compare_tail(result, operands, contract).passed:
        return float("inf")
    return verdict.ratio


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

    function = kernels()[work.layout]
    operands = build(work, device)
    named = operands.kwargs()
    result, config = paged_logits(work.layout, **named)
    ratio = worst_ratio(operands, Contract.from_dict(function.parity_contract, device), result)
    found = row(work.name, work.layout, work.shape, str(config), worst_error_over_bound=ratio, target=work.target)
    if not ratio <= 1:
        return found | {"status": "failed", "reason": f"error is {ratio:.3g} times the bound, not timed"}

    def call() -> None:
        function(**named, out=result)

    if work.ceiling == "latency":
        single, chain = graph_of([call]), graph_of([call] * 20)
        one, many = (statistics.median(t) for t in in_turn([(single.replay, 200), (chain.replay, 10)], rounds))
        found |= {"microseconds": 1e3 * one, "microseconds_back_to_back": 1e3 * many / 20}
        return judged(found | {"value": 1e3 * one, "unit": "us per replay"}, most=True)
    reference, amount = against[work.ceiling]
    inner = 8 if work.ceiling == "copy" else 3
    graph = graph_of([call] * inner)
    mine = work.bytes() if work.ceiling == "copy" else work.operations()
    bases, owns = in_turn([(reference, inner), (graph.replay, 1)], rounds)
    ratios = [(mine * inner / own) / (amount / base) for base, own in zip(bases, owns, strict=True)]
    base, own = statistics.median(bases), statistics.median(owns) / inner
    found |= {
        "milliseconds": own,
        "ceiling": work.ceiling,
        "rate": mine / own * 1e-9,
        "ceiling_rate": amount / base * 1e-9,
    }
    found |= {"value": statistics.median(ratios), "unit": f"of {work.ceiling}", "ratios": ratios}
    return judged(found, most=False)


def rows(device: torch.device, names: Container[str], rounds: int) -> Iterator[dict[str, Any]]:
    """Rows of the workloads of these names."""
    wanted = [work for work in WORKLOADS if work.name in names]
    against = ceilings(device) if wanted else {}
    for work in wanted:
        yield measure(work, device, against, rounds)
        torch.cuda.empty_cache()


def peaks(device: torch.device) -> Iterator[dict[str, Any]]:
    """Peak bytes beyond the operands for 4,096 rows and a 344-page table: historical gather, torch path, Triton."""
    work = Workload("memory", "bf16", 1, 4096, 344 * PAGE, "copy", None)
    operands = build(work, device).kwargs()
    for function in (materialising_gather_paged_mqa_logits, torch_bf16_paged_mqa_logits, kernels()["bf16"]):
        found = row(work.name, work.layout, work.shape, function.__name__, target=None)
        torch.cuda.empty_cache()
        needed = 60e9 if "materialising" in function.__name__ else 2e9
        if torch.cuda.mem_get_info(device)[0] < needed:
            yield found | {"status": "not run", "reason": f"needs {needed / 1e9:.0f} GB of free memory"}
            continue
        function(**operands)
        with memory.peak_bytes(device) as peak:
            function(**operands)
        figures = {"peak_bytes": peak.bytes, "milliseconds": milliseconds(partial(function, **operands))}
        yield found | figures | {"value": peak.bytes / 1e9, "unit": "GB"}


def selections(device: torch.device, rounds: int) -> Iterator[dict[str, Any]]:
    """`topk_to_slots` next to a bare torch.topk, k = 512, for prefill and decode shapes."""
    for count, width in ((4096, 344 * PAGE), (64, 262144)):
        logits = torch.randn(count, width, device=device)
        lens = torch.full((count, 1), width, dtype=torch.int32, device=device)
        table = torch.arange(count * (width // PAGE), device=device).int().view(count, -1)
        calls = partial(torch.topk, logits, 512), partial(topk_to_slots, logits, lens, table, 512)
        bare, ours = (each / 1e3 for each in medians([[call] for call in calls], rounds))
        found = row("selection", "", f"{count} rows x {width}", "topk_to_slots, k 512", target=None)
        figures = {"milliseconds": ours, "torch_topk_milliseconds": bare}
        yield found | figures | {"value": ours / bare, "unit": "x torch.topk"}

"""How a call is timed, and what a row of a benchmark holds.

Replays of a captured CUDA graph keep launches from Python out of the numbers; the sides of a comparison take turns
within each round, so that drifting clocks cancel.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]


def graph_of(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The calls in one captured graph, warmed up."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            for call in calls[:3]:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return graph


def milliseconds(call: Call, times: int = 1) -> float:
    """GPU time of one call, by events around `times` of them."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def in_turn(sides: Sequence[tuple[Call, int]], rounds: int) -> list[list[float]]:
    """Milliseconds of one call of each side, (call, how often it is repeated), in every round."""
    for call, _ in sides:
        call()
    found = [[milliseconds(call, times) for call, times in sides] for _ in range(rounds)]
    return [list(times) for times in zip(*found, strict=True)]


def medians(calls: Sequence[Sequence[Call]], rounds: int) -> list[float]:
    """Median microseconds per call of each side, a list of calls that are captured together."""
    sides = [(graph_of(each).replay, 1) for each in calls]
    times = in_turn(sides, rounds)
    return [1e3 * statistics.median(each) / len(side) for each, side in zip(times, calls, strict=True)]


def row(name: str, layout: str, shape: str, config: str, **more: Any) -> dict[str, Any]:
    """A row of a benchmark.

    name, layout, shape, config  what was timed
    value, unit, target          the figure, and what it is held against (None: nothing); `judged` sets status from them
    status, reason               met, missed, measured (no target here), or failed: a wrong result, which is not timed
    """
    return {"name": name, "layout": layout, "shape": shape, "config": config, "status": "measured", "reason": ""} | more


def judged(found: dict[str, Any], *, most: bool) -> dict[str, Any]:
    """The row with the status of its value: met at the target, or on the right side of it (`most`: it is a ceiling)."""
    value, target = found["value"], found["target"]
    met = target is None or (value <= target if most else value >= target)
    return found | {"status": "met" if met else "missed"}


def line(found: dict[str, Any]) -> str:
    """One row of the printed table."""
    head = f"{found['name']:<11}{found['layout']:<6}{found['shape']:<26}"
    if "value" not in found:
        return f"{head}{found['status']}: {found['reason']}"
    target = "" if found["target"] is None else f" (target {found['target']:g})"
    if "milliseconds" in found:
        time = f"{found['milliseconds']:8.3f} ms"
    else:
        time = f"{found.get('microseconds_back_to_back', found['microseconds']):8.2f} us"
    return f"{head}{found['value']:8.3f} {found['unit']:<14}{time}  {found['status']}{target}  {found['config']}"

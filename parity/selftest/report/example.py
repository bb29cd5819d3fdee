"""A small gate report with every status, and reports of the other kinds, for the tests of the page."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

from parity.explain import sweep_memory, sweep_recall
from parity.explain.choices import preset
from parity.explain.explain import Settings, explain
from parity.results import MUTANTS, Report, Row
from parity.vocabulary import Status


def row(implementation: str, level: str, check: str, status: str = "passed", **more: Any) -> Row:
    """One row of a gate report."""
    return Row(implementation, level, check, Status(status), **{"examples": 200, "op": "paged_logits", **more})


def gate() -> Report:
    """A gate report."""
    repro = "parity run --case 'v1 logits bf16 h8 n=65 data=exact seed=3' --impl mine:logits"
    rows = (
        row("triton-bf16", "layout", "exact"),
        row("triton-bf16", "rounding", "ordinary", ratio=0.0041, resolution=3e-5, where={"request": 0, "key": 65}),
        row("triton-fp8", "rounding", "ordinary", ratio=0.0029, resolution=4e-4, case="v1 logits fp8 h8 n=65"),
        row("triton-fp8", "resources", "graph", "not run", examples=0, message="CUDA graphs need a CUDA device"),
        row("mine:logits", "layout", "exact", "failed", ratio=math.inf, message="got <b>3</b>, wanted 5", repro=repro),
        row("mine:logits", "rounding", "ordinary", "vacuous", ratio=0.2),
        row("mine:logits", "selection", "own", "error", examples=1, message="the process died"),
        row("mine:logits", "invariance", "again", "unsupported", examples=0, message="its contract lacks it"),
    )
    provenance = {"device": "x86_64", "architecture": "cpu", "torch": "2.13.0", "commit": "0123abc"}
    return Report(rows, head={"profile": "ci", "started": "2026-01-01T00:00:00Z", "provenance": provenance})


def better() -> Report:
    """The same gate later: one failure mended, one check slower to its bound, one gone, one new."""
    mended: dict[tuple[str, str], dict[str, Any]] = {
        ("mine:logits", "exact"): {"status": Status.PASSED, "ratio": 0.0, "message": "", "repro": ""},
        ("triton-bf16", "ordinary"): {"ratio": 0.41},
    }
    rows = [
        replace(each, **mended.get((each.implementation, each.check), {}))
        for each in gate().rows
        if each.check != "graph"
    ]
    rows.append(row("triton-fp8", "invariance", "again", "failed"))
    head = {**gate().head, "provenance": {**gate().head["provenance"], "torch": "2.14.0"}}
    return Report(tuple(rows), head=head)


@cache
def explained() -> dict[str, Any]:
    """An explanation at a tiny shape."""
    settings = Settings(heads=16, topk=32, tokens=1031, rows=4, cases=2, q_lora_rank=128, contexts=(131, 515))
    return {"preset": "seed-before", **explain(preset("published"), preset("seed-before"), settings)}


@cache
def swept() -> dict[str, Any]:
    """A sweep of recall at a tiny shape."""
    settings = Settings(heads=16, topk=32, cases=2, rows=4, q_lora_rank=128, margins=(0.0, 0.1, 1.0))
    return sweep_recall.sweep((131, 515, 1031), ("seed-before", "seed-after"), ("gaussian",), settings)


@cache
def remembered() -> dict[str, Any]:
    """A sweep of memory, with one point as a GPU would have measured it."""
    import torch

    report = sweep_memory.sweep(torch.device("cpu"))
    report["rows"][0].update(workspace=123_000_000, seconds=0.0015, not_measured=None)
    return report


def others() -> list[dict[str, Any]]:
    """Reports of story, compile gate, benchmark and fault models."""
    step: dict[str, Any] = {
        "title": "Short prompts",
        "lines": ["512 of 512 keys"],
        "figures": {},
        "not_run": None,
        "seconds": 0.1,
    }
    model = row(
        "last-page-skipped",
        "faults",
        "padding",
        kills=(row("last-page-skipped", "layout", "exact", "failed"),),
        facts={"outcome": "killed", "step": "gather", "sentence": "the last partly filled page is left out"},
    )
    story = {"kind": "indexer-parity/story", "format": 1, "passed": True}
    return [
        {**story, "steps": [step, {**step, "title": "The flag", "not_run": "triton is not installed"}]},
        {
            "rows": [
                {"arch": 90, "config": "a", "status": "passed", "registers": 128, "shared": 1024, "reason": ""},
                {"arch": 120, "config": "b", "status": "failed", "registers": 255, "shared": 99, "reason": "spills"},
            ],
            "counts": {},
        },
        {
            "rounds": 9,
            "provenance": {"device": "NVIDIA H200"},
            "rows": [{"name": "decode", "layout": "bf16", "shape": "64 rows", "value": 0.9, "unit": "of copy"}],
            "memory": [{"path": "gather", "peak_bytes": 57_700_000_000}],
            "selection": [],
        },
        Report((model,), MUTANTS).to_json(),
    ]

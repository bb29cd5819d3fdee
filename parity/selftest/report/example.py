"""A small gate report with every status, and reports of the other kinds, for the tests of the page."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from parity.explain import sweep_memory, sweep_recall
from parity.explain.choices import preset
from parity.explain.explain import Settings, explain
from parity.gate import summary


def row(implementation: str, level: str, check: str, status: str = "passed", **more: Any) -> dict[str, Any]:
    """One row of a gate report."""
    return {
        "implementation": implementation,
        "stage": "logits",
        "layout": "bf16",
        "level": level,
        "check": check,
        "status": status,
        "examples": 200,
        "worst_ratio": None,
        "resolution": None,
        "message": "",
        "case": None,
        "repro": None,
        "where": {},
        **more,
    }


def gate(**changes: Any) -> dict[str, Any]:
    """A gate report; `changes` maps "implementation level/check" with / and - as _ to fields of that row."""
    repro = "parity run --case 'v1 logits bf16 h8 n=65 data=exact seed=3' --impl mine:logits"
    rows = [
        row("triton-bf16", "layout", "exact"),
        row(
            "triton-bf16", "rounding", "ordinary", worst_ratio=0.0041, resolution=3e-5, where={"request": 0, "key": 65}
        ),
        row("triton-fp8", "rounding", "ordinary", worst_ratio=0.0029, resolution=4e-4, case="v1 logits fp8 h8 n=65"),
        row("triton-fp8", "resources", "graph", "not run", examples=0, message="CUDA graphs need a CUDA device"),
        row(
            "mine:logits", "layout", "exact", "failed", worst_ratio="inf", message="got <b>3</b>, wanted 5", repro=repro
        ),
        row("mine:logits", "rounding", "ordinary", "vacuous", worst_ratio=0.2),
        row("mine:logits", "selection", "own", "error", examples=1, message="the process died"),
        row("mine:logits", "invariance", "again", "unsupported", examples=0, message="its contract lacks it"),
    ]
    for each in rows:
        each.update(changes.get(f"{each['implementation']} {each['level']}/{each['check']}", {}))
    status, code, line = summary.verdict(rows)
    head = {"kind": summary.KIND, "format": summary.FORMAT, "verdict": status, "exit": code, "sentence": line}
    provenance = {"device": "x86_64", "architecture": "cpu", "torch": "2.13.0", "commit": "0123abc"}
    return {**head, "profile": "ci", "started": "2026-01-01T00:00:00Z", "provenance": provenance, "rows": rows}


def better() -> dict[str, Any]:
    """The same gate later: one failure mended, one check slower to its bound, one gone, one new."""
    report = copy.deepcopy(gate())
    by_name = {(each["implementation"], each["check"]): each for each in report["rows"]}
    by_name["mine:logits", "exact"].update(status="passed", worst_ratio=0.0, message="", repro=None)
    by_name["triton-bf16", "ordinary"].update(worst_ratio=0.41)
    report["rows"] = [each for each in report["rows"] if each["check"] != "graph"]
    report["rows"].append(row("triton-fp8", "invariance", "again", "failed"))
    report["verdict"], report["exit"], report["sentence"] = summary.verdict(report["rows"])
    report["provenance"]["torch"] = "2.14.0"
    return report


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
    """A sweep of memory, with one point as a card would have measured it."""
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
        {
            "rows": [
                {
                    "id": "last-page-skipped",
                    "stage": "gather",
                    "outcome": "killed",
                    "kills": [{"level": "layout", "check": "exact"}],
                    "sentence": "the last partly filled page is left out",
                }
            ]
        },
    ]

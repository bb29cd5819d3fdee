"""Floors of level semantics: recall and regret of every mode of our store at every length, over seeds of their own.

A floor is the mean minus `DEVIATIONS` standard deviations between seeds and `ALLOWANCE`; the ceiling of regret is the
mean plus both.
"""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from parity.command import say
from parity.golden.stored import Truth, as_json
from parity.ops.store.digests import TRUTH as DIGESTS
from parity.ops.store.digests import outputs
from parity.ops.store.semantics import FILE, ROWS, TOKENS, TOPK, case_of, key_of, measure, tokens_of
from parity.run.device import provenance, resolve

SEEDS = tuple(range(100, 112))  # the check itself draws another
DEVIATIONS = 6.0
# The reference sums a row's mean of squares in an order that depends on the CPU; that changes about one key in 13,000.
ALLOWANCE = {"recall": 1e-3, "regret": 1e-5}


def record(device: torch.device) -> dict[str, Any]:
    """Recall and regret of every mode of our store at every length, and floors from them; minutes on a GPU."""
    results: dict[str, dict[str, list[dict[str, float]]]] = {}
    every = [(tokens, seed) for tokens in TOKENS for seed in SEEDS]
    for impl, operands, _ in outputs(
        device, lambda impl: [case_of(tokens, impl.layout, seed) for tokens, seed in every]
    ):
        rows = results.setdefault(key_of(impl.contract), {}).setdefault(str(tokens_of(operands.case)), [])
        rows.append(measure(operands))
        if len(rows) == len(SEEDS):
            say(f"{impl.name:<36}{tokens_of(operands.case):>7}  recall {summary(rows)['recall']:.4f}")
    about = (
        f"mean over seeds {SEEDS[0]}..{SEEDS[-1]} minus {DEVIATIONS:g} standard deviations between seeds "
        f"and {ALLOWANCE['recall']:g}"
    )
    floors = {key: {tokens: summary(rows) for tokens, rows in found.items()} for key, found in results.items()}
    return {"about": about, "topk": TOPK, "rows": ROWS, "provenance": provenance(device), "floors": floors}


def summary(results: list[dict[str, float]]) -> dict[str, float]:
    """Means over seeds, what lies between seeds, and the floor and the ceiling from both."""
    mean = {name: statistics.fmean(result[name] for result in results) for name in ("recall", "regret")}
    deviation = {name: statistics.stdev(result[name] for result in results) for name in ("recall", "regret")}
    free = statistics.fmean(result["recall_unquantised"] for result in results)
    return {
        "recall": round(mean["recall"], 6),
        "recall_unquantised": round(free, 6),
        "recall_deviation": round(deviation["recall"], 6),
        "recall_floor": round(mean["recall"] - DEVIATIONS * deviation["recall"] - ALLOWANCE["recall"], 6),
        "worst_row": round(min(result["worst_row"] for result in results), 6),
        "regret": mean["regret"],
        "regret_ceiling": mean["regret"] + DEVIATIONS * deviation["regret"] + ALLOWANCE["regret"],
    }


def _make(folder: Path) -> Iterator[tuple[str, bytes]]:
    yield FILE, as_json(record(resolve("auto")))


TRUTH = Truth("floors", "truth", _make)
TRUTHS = (DIGESTS, TRUTH)

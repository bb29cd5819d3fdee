"""`parity bench`: every measurement, as one list of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from parity.bench import paged_logits, store
from parity.bench.timing import line
from parity.run import device as devices

STORE = store.PART
PARTS = (*dict.fromkeys(work.name for work in paged_logits.WORKLOADS), "memory", "selection", STORE)
TARGET_DEVICE = "H200"
"""Targets were set for this GPU; elsewhere the same numbers are printed without a verdict."""
ROUNDS, STORE_ROUNDS = 9, 60  # calls of the store are short


def report(
    device: torch.device, names: Sequence[str] = (), rounds: int | None = None, say: Callable[[str], None] = print
) -> dict[str, Any]:
    """The parts of these names (none: all): {provenance, rounds, rows, exit}, JSON types. Each row is said as it comes.

    exit is 1 where a result was wrong or a target missed, else 0.
    """
    where = devices.provenance(device)
    rows = []
    for found in _rows(device, names or PARTS, rounds):
        if TARGET_DEVICE not in where["device"] and found["status"] in ("met", "missed"):
            found |= {"status": "measured", "target": None}
        rows.append(found)
        say(line(found))
    code = 1 if any(found["status"] in ("failed", "missed") for found in rows) else 0
    return {"command": "parity bench", "provenance": where, "rounds": rounds or ROUNDS, "rows": rows, "exit": code}


def _rows(device: torch.device, names: Sequence[str], rounds: int | None) -> Iterator[dict[str, Any]]:
    yield from paged_logits.rows(device, names, rounds or ROUNDS)
    if "memory" in names:
        yield from paged_logits.peaks(device)
    if "selection" in names:
        yield from paged_logits.selections(device, rounds or ROUNDS)
    if STORE in names:
        yield from store.rows(rounds or STORE_ROUNDS)

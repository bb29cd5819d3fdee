"""How well the diagnosis works: every model's own fault, planted on a random case, must be named first."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Sequence
from typing import Any

import torch

from parity.command import say, write_json
from parity.faults.catalogue import BY_ID, MODELS
from parity.faults.drawing import visible_case
from parity.faults.explaining import equals, rank
from parity.vocabulary import FAILED, PASSED

Row = dict[str, Any]
WANTED = 0.95
"""Share of the models whose fault must be named first, alone or among equals."""


def measurable() -> list[str]:
    """Models whose fault can show in a result at all: no equivalent ones, none that a compiler or a route shows."""
    return [m.id for m in MODELS if not m.equivalent and not {"compile", "route"} & set(m.extra)]


def measure_one(id: str, seed: int = 0) -> Row:
    """Plant one model on a random case and diagnose it: `first`, `equal` (among indistinguishable ones), `wrong`, or
    `hidden` where no drawn case shows the fault."""
    torch.set_num_threads(1)
    found = visible_case(BY_ID[id], seed)
    if found is None:
        return {"id": id, "outcome": "hidden", "named": [], "case": ""}
    problem, observed, case = found
    ranked = rank(problem, observed)
    named = [each.name for each in equals(problem, ranked)]
    outcome = "wrong" if id not in named else "first" if len(named) == 1 else "equal"
    place = [each.name for each in ranked].index(id) + 1
    return {"id": id, "outcome": outcome, "named": named, "place": place, "case": str(case)}


def measure(ids: Sequence[str], seed: int = 0, workers: int | None = None) -> list[Row]:
    """Rows of all ids, in their order."""
    count = workers or min(8, os.cpu_count() or 1)
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    rows = []
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool:
        for at, row in enumerate(pool.map(measure_one, ids, [seed] * len(ids)), 1):
            rows.append(row)
            if row["outcome"] == "wrong" or at % 25 == 0:
                say(f"[{at}/{len(ids)}] {row['id']}: {row['outcome']} {', '.join(row['named'][:3])}")
    return rows


def share(rows: Sequence[Row]) -> float:
    """Of the models whose fault shows, those that are named first, alone or among equals."""
    shown = [row for row in rows if row["outcome"] != "hidden"]
    return sum(row["outcome"] != "wrong" for row in shown) / max(1, len(shown))


def run_measure(seed: int, json_file: str | None) -> int:
    """`parity diagnose --measure`."""
    started = time.monotonic()
    rows = measure(measurable(), seed)
    report: Row = {"kind": "indexer-parity/confusion", "format": 1, "seed": seed, "rows": rows, "share": share(rows)}
    report["duration"] = round(time.monotonic() - started, 1)
    write_json(json_file, report)
    print(markdown(rows))
    return PASSED if share(rows) >= WANTED else FAILED


def markdown(rows: Sequence[Row]) -> str:
    """The confusion matrix as what it differs from the diagonal in, and its sums by step."""
    lines = [
        "| step | models | first alone | first among equals | wrong | not shown by a result |",
        "|---|" + "--:|" * 5,
    ]
    steps = list(dict.fromkeys(BY_ID[row["id"]].step for row in rows))
    for step in [*steps, "all"]:
        mine = [row for row in rows if step in ("all", BY_ID[row["id"]].step)]
        counts = [sum(row["outcome"] == what for row in mine) for what in ("first", "equal", "wrong", "hidden")]
        lines.append(f"| {step} | {len(mine)} | " + " | ".join(map(str, counts)) + " |")
    lines += ["", f"Named first, alone or among equals: {share(rows):.1%} of the models whose fault shows.", ""]
    lines += ["Off the diagonal (fault planted: faults named instead, or beside it):", ""]
    for row in rows:
        others = [name for name in row["named"] if name != row["id"]]
        if row["outcome"] in ("equal", "wrong"):
            mark = "" if row["outcome"] == "equal" else f" **(own place {row['place']})**"
            lines.append(f"- {row['id']}: {', '.join(others[:6])}{' ...' if len(others) > 6 else ''}{mark}")
    hidden = [row["id"] for row in rows if row["outcome"] == "hidden"]
    lines += ["", "No drawn case shows these in a result: " + (", ".join(hidden) or "none") + "."]
    return "\n".join(lines)

"""How well the diagnosis works: every model's own fault, planted on a random case, must be named first.

    python tools/diagnosis_confusion.py [--seed N] [--json FILE]

Prints the confusion matrix of docs/faults.md; exit code 1 where fewer than 95 % are named first. The record of the last
run is fixtures/faults/confusion.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from parity.command import say, write_json
from parity.faults.building import diagnosis_of, staged
from parity.faults.catalogue import BY_ID, MODELS
from parity.faults.explaining import Problem, Ruler, distance, equals, observe, problem_of, rank
from parity.ops.fault import Fault
from parity.ops.paged_logits.faults import staged as logits
from parity.vocabulary import FAILED, PASSED

Row = dict[str, Any]
WANTED = 0.95
"""Share of the models whose fault must be named first, by itself or among equals."""
TRIES = 60
RACING = 8  # runs in which a race has to show
REORDERED: dict[str, dict[str, Callable[..., Any]]] = {
    "paged_logits": {
        "dot": lambda c, q, k: logits.dot(c, q.flip(-1).contiguous(), k.flip(-1).contiguous()),
        "head_sum": lambda c, x: logits.head_sum(c, x.flip(1).contiguous()),
    }
}
"""Steps as somebody else would have written them: sums run backwards. Real kernels do not add in the models' order."""


def measurable() -> list[str]:
    """Models whose fault can show in a result at all: no equivalent ones, none that a compiler or a route shows."""
    return [m.id for m in MODELS if not m.equivalent and not {"compile", "route"} & set(m.extra)]


def planted(fault: Fault) -> Callable[..., Any]:
    """The faulty function with sums in another order where the fault does not touch them; its memory is empty."""
    change = REORDERED.get(fault.op, {}) | dict(fault.change)
    function = staged(fault.op, fault.layout, fault.extra.get("contract"), change)
    return function if fault.wrap is None else fault.wrap(function)


def visible_case(fault: Fault, seed: int = 0) -> tuple[Problem, list[Any], Any] | None:
    """(problem, observed results, case) of the first drawn case on which the fault shows, or None."""
    source, facts = random.Random(f"{fault.id} {seed}"), fault.extra.get("contract")
    for _ in range(TRIES):
        case = diagnosis_of(fault.op).draw(fault, source)
        problem = problem_of(case, facts)
        problem = replace(problem, runs=RACING) if fault.kind == "race" else problem
        observed, right = observe(problem, planted(fault)), observe(problem, staged(fault.op, fault.layout, facts))
        if distance(Ruler(problem), observed, right).wrong:
            return problem, observed, case
    return None


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


def measure(ids: Sequence[str], seed: int = 0) -> list[Row]:
    """Rows of all ids, in their order."""
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    rows = []
    with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=context) as pool:
        for at, row in enumerate(pool.map(measure_one, ids, [seed] * len(ids)), 1):
            rows.append(row)
            if row["outcome"] == "wrong" or at % 25 == 0:
                say(f"[{at}/{len(ids)}] {row['id']}: {row['outcome']} {', '.join(row['named'][:3])}")
    return rows


def share(rows: Sequence[Row]) -> float:
    """Of the models whose fault shows, those that are named first, by themselves or among equals."""
    shown = [row for row in rows if row["outcome"] != "hidden"]
    return sum(row["outcome"] != "wrong" for row in shown) / max(1, len(shown))


def markdown(rows: Sequence[Row]) -> str:
    """The confusion matrix as what it differs from the diagonal in, and its sums by step."""
    lines = [
        "| step | models | first alone | first among equals | wrong | not shown by a result |",
        "|---|" + "--:|" * 5,
    ]
    for step in [*dict.fromkeys(BY_ID[row["id"]].step for row in rows), "all"]:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seed", type=int, default=0, help="draw other cases (default: 0)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON too")
    options = parser.parse_args()
    started = time.monotonic()
    rows = measure(measurable(), options.seed)
    report: Row = {"kind": "indexer-parity/confusion", "format": 1, "seed": options.seed, "rows": rows}
    write_json(options.json, report | {"share": share(rows), "duration": round(time.monotonic() - started, 1)})
    print(markdown(rows))
    return PASSED if share(rows) >= WANTED else FAILED


if __name__ == "__main__":
    sys.exit(main())

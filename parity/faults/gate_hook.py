"""What the gate takes from fault models: rows of the smoke selection, and the diagnosis of its first failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.command import read_json, say
from parity.ops.fault import STAGES

LEVEL = "faults"
Row = dict[str, Any]
JUDGED = ("layout", "rounding", "selection", "invariance")
"""Levels whose failures show in a result, which is what models can explain."""


def smoke_rows(folder: Path) -> list[Row]:
    """One row for each kind of fault: passed where the suite rejects the kind's model."""
    from parity.gate import gate
    from parity.ops.fault import KINDS

    out = folder / "mutants.json"
    say("parity gate: one fault model of every kind must be rejected")
    command = [sys.executable, "-m", "parity", "mutants", "--smoke", "--json", str(out)]
    with open(os.devnull, "wb") as nowhere:
        code = gate.call(command, gate.suite_environment(os.environ), output=nowhere.fileno())
    if not out.is_file():
        message = f"`parity mutants --smoke` ended with exit code {code} and left no report"
        return [{**gate.suite_error(message), "level": LEVEL, "check": "mutants"}]
    report = read_json(out)
    rows = [as_row(row) for row in report["rows"]]
    missing = set(KINDS) - {str(row["check"]) for row in rows}
    lost = [{**gate.suite_error(text), "level": LEVEL, "check": "mutants"} for text in report["lost"]]
    lost += [{**gate.suite_error("no row"), "level": LEVEL, "check": kind} for kind in sorted(missing) if not lost]
    return rows + lost


def as_row(row: Mapping[str, Any]) -> Row:
    """A model's row as the gate's report has rows."""
    killed = row["outcome"] == "killed"
    message = "" if killed else f"the fault model {row['id']} {row['outcome']}: {row['sentence']}"
    return {
        "implementation": "suite",
        "stage": STAGES[row["op"]],
        "layout": None,
        "level": LEVEL,
        "check": row["kind"],
        "status": "passed" if killed else "failed",
        "examples": row["examples"],
        "message": message,
        "case": None,
        "repro": "" if killed else f"parity mutants {row['id']}",
    }


def first_failure(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The first failed row that a diagnosis can work on: it names an implementation and a case, at the earliest level.

    A pair of invariance comes last: its case alone may be answered correctly."""
    known = [row for row in rows if row["status"] == "failed" and row.get("level") in JUDGED and row.get("case")]
    return min(known, key=lambda row: JUDGED.index(str(row["level"])), default=None)


def show_diagnosis(rows: Sequence[Mapping[str, Any]], device: str, contract: str | None) -> None:
    """Print which fault explains the first failure; nothing where there is none to explain."""
    from parity.gate import gate

    row = first_failure(rows)
    if row is None:
        return
    name, case = str(row["implementation"]), str(row.get("first_case") or row["case"])
    print(f"\ndiagnosis of {row['level']}/{row['check']} of {name}", flush=True)
    command = [sys.executable, "-m", "parity", "diagnose", "--impl", name, "--case", case, "--device", device]
    if ":" in name and row.get("layout") and not contract:
        command += ["--layout", str(row["layout"])]
    if ":" in name and not contract:
        command += ["--stage", str(row["stage"])]
    if contract:
        command += ["--contract", contract]
    gate.call(command, gate.suite_environment(os.environ), output=1)

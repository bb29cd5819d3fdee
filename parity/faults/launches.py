"""Faults that only a compiler for the target sees: they are judged by the resource check of compiled kernels."""

from __future__ import annotations

import time
from typing import Any

from parity.ops.fault import Fault


def score_compile(fault: Fault) -> dict[str, Any]:
    """The row of a model that gives a launch configuration: `parity compile`'s verdict on it, for its architecture."""
    from impl.configs import Config
    from parity.build import compile_kernels
    from parity.faults.score import described

    started = time.monotonic()
    arch, config = int(fault.extra["arch"]), Config(*fault.extra["compile"])
    (row,) = compile_kernels.compile_in_children([(arch, config)], 300.0).values()
    kills, crashes = [], []
    if row["status"] == "failed" and row.get("shared", 0) > row.get("shared_limit", 0) > 0:
        case = f"sm_{arch} {config}"
        kills.append(
            {"level": "resources", "check": "compile", "examples": 1, "case": case, "message": str(row["reason"])}
        )
    elif row["status"] != "passed":
        crashes.append(f"resources/compile: {row['status']}: {row.get('reason')}")
    return described(fault.id, fault, kills, crashes, 1, time.monotonic() - started)

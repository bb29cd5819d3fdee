"""Faults that only a compiler for the target sees: they are judged by the resource check of compiled kernels."""

from __future__ import annotations

from impl.configs import Config
from parity.build.compile_kernels import compile_in_children
from parity.ops.fault import Fault
from parity.results import Row
from parity.vocabulary import Grounds, Status


def compiled(fault: Fault) -> Row:
    """`parity compile`'s verdict on the launch configuration of a model; evidence where shared memory is exceeded."""
    arch, config = int(fault.extra["arch"]), Config(*fault.extra["compile"])
    (row,) = compile_in_children([(arch, config)], 300.0).values()
    exceeded = row["status"] == "failed" and row.get("shared", 0) > row.get("shared_limit", 0) > 0
    return Row(
        fault.id,
        "resources",
        "compile",
        Status.PASSED if row["status"] == "passed" else Status.FAILED,
        examples=1,
        message=str(row.get("reason") or row["status"]),
        case=f"sm_{arch} {config}",
        grounds=Grounds.VALUES if exceeded else Grounds.CRASH,
    )

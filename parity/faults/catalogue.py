"""All fault models by id."""

from __future__ import annotations

from parity.ops.fault import KINDS, Fault
from parity.run.operation import all_operations

MODELS: tuple[Fault, ...] = tuple(fault for operation in all_operations() for fault in operation.faults())
BY_ID: dict[str, Fault] = {fault.id: fault for fault in MODELS}
assert len(BY_ID) == len(MODELS), "two fault models have the same id"

SMOKE = (
    "topk-candidates-capped-1024",
    "relu-missing",
    "last-partial-page-skipped",
    "table-row-is-query-row",
    "result-buffer-stale",
    "weight-bf16",
    "store-scale-page-0",
    "weight-one-head-tile",
    "gather-materialised",
    "ring-last-4-of-call",
    "offset-int32",
    "double-buffer-swapped",
    "flag-without-effect",
)
"""One model of every kind, of those that die soon."""


def smoke() -> list[Fault]:
    """The models of SMOKE, in the order of KINDS."""
    found = sorted((BY_ID[id] for id in SMOKE), key=lambda fault: list(KINDS).index(fault.kind))
    assert [fault.kind for fault in found] == list(KINDS), "the smoke selection has one model of every kind"
    return found

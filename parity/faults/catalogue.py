"""All fault models by id."""

from __future__ import annotations

from parity.faults import (
    compressor_models,
    logits_device,
    logits_formula,
    logits_mask,
    logits_rows,
    store_bytes,
    store_layout,
    store_models,
    topk_models,
    topk_slots,
)
from parity.faults.model import KINDS, Fault

MODELS: tuple[Fault, ...] = (
    *logits_formula.MODELS,
    *logits_rows.MODELS,
    *logits_mask.MODELS,
    *logits_device.MODELS,
    *topk_models.MODELS,
    *topk_slots.MODELS,
    *compressor_models.MODELS,
    *store_models.MODELS,
    *store_bytes.MODELS,
    *store_layout.MODELS,
)
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

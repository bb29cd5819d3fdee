"""All fault models by id."""

from __future__ import annotations

from parity.ops.compressor.faults import models as compressor_models
from parity.ops.fault import KINDS, Fault
from parity.ops.paged_logits.faults import device as logits_device
from parity.ops.paged_logits.faults import formula as logits_formula
from parity.ops.paged_logits.faults import mask as logits_mask
from parity.ops.paged_logits.faults import rows as logits_rows
from parity.ops.store.faults import chain as store_models
from parity.ops.store.faults import layout as store_layout
from parity.ops.store.faults import quantise as store_bytes
from parity.ops.topk.faults import members as topk_models
from parity.ops.topk.faults import slots as topk_slots

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

"""All fault models by id."""

from __future__ import annotations

from parity.faults import (
    compressor_models,
    logits_device,
    logits_formula,
    logits_rows,
    store_bytes,
    store_models,
    topk_models,
)
from parity.faults.model import KINDS, Fault

MODELS: tuple[Fault, ...] = (
    *logits_formula.MODELS,
    *logits_rows.MODELS,
    *logits_device.MODELS,
    *topk_models.MODELS,
    *compressor_models.MODELS,
    *store_models.MODELS,
    *store_bytes.MODELS,
)
BY_ID: dict[str, Fault] = {fault.id: fault for fault in MODELS}
assert len(BY_ID) == len(MODELS), "two fault models have the same id"


def smoke() -> list[Fault]:
    """One model of every kind that dies soon: the first of its kind that is no equivalent one."""
    found: dict[str, Fault] = {}
    for fault in MODELS:
        if not fault.equivalent and (fault.kind not in found or fault.extra.get("smoke")):
            found[fault.kind] = fault
    return [found[kind] for kind in KINDS if kind in found]

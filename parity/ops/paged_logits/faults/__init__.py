"""A correct staged implementation of paged logits and its fault models."""

from __future__ import annotations

from parity.ops.fault import Fault
from parity.ops.paged_logits.faults import device, formula, history, mask, rows

MODELS: tuple[Fault, ...] = (*formula.MODELS, *rows.MODELS, *mask.MODELS, *device.MODELS, *history.MODELS)

"""A correct staged implementation of top-k and its fault models."""

from __future__ import annotations

from parity.ops.fault import Fault
from parity.ops.topk.faults import members, slots

MODELS: tuple[Fault, ...] = (*members.MODELS, *slots.MODELS)

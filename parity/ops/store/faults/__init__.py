"""A correct staged implementation of the store and its fault models."""

from __future__ import annotations

from parity.ops.fault import Fault
from parity.ops.store.faults import chain, layout, quantise

MODELS: tuple[Fault, ...] = (*chain.MODELS, *quantise.MODELS, *layout.MODELS)

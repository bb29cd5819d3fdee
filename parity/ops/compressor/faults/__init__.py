"""A correct staged implementation of the compressor and its fault models."""

from __future__ import annotations

from parity.ops.compressor.faults import models
from parity.ops.fault import Fault

MODELS: tuple[Fault, ...] = (*models.MODELS,)

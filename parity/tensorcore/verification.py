"""Which contracts may take a dot as exact: stored models are held against today's unit, and only those that it confirms
sharpen a contract whose dots are known to be theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.arithmetic import Grouped, named_model, stored_models
from parity.run import device as devices
from parity.run import interpreter
from parity.run.implementation import Implementation
from parity.tensorcore.probe import OPERANDS, Verified, usual_models, verify_device_model

MODES = ("auto", "bound")
UNASKED = "not asked (--parity-arithmetic bound); the proved bound serves"


@dataclass(frozen=True)
class Examined:
    """What today's unit said about the stored models.

    mode     "auto", or "bound": nothing was asked, so every dot is judged by its proved bound
    models   one entry a model that was asked about
    seconds  that it took
    """

    mode: str = "auto"
    models: tuple[Verified, ...] = ()
    seconds: float = 0.0
    cuda: bool = False

    def lines(self) -> list[str]:
        """For headers: one line a model, or the reason why a unit was not asked. None on a CPU."""
        if self.mode == "bound":
            return [f"dot arithmetic: {UNASKED}"] if self.cuda else []
        return [f"dot arithmetic: {model}" for model in self.models]

    def as_dict(self) -> dict[str, Any]:
        """JSON types only; ``from_dict`` reads it back."""
        return {
            "mode": self.mode,
            "cuda": self.cuda,
            "seconds": round(self.seconds, 3),
            "models": [
                {
                    "name": model.name,
                    "model": str(model.model),
                    "verified": model.verified,
                    "dots": model.dots,
                    "mismatches": model.mismatches,
                }
                for model in self.models
            ],
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Examined:
        """What another process has found out, so that the unit is asked once a session."""
        models = []
        for item in given["models"]:
            stored = named_model(item["name"])
            counts = (item["verified"], item["dots"], item["mismatches"])
            models.append(Verified(stored.operand, stored.arithmetic, *counts, stored.name))
        return cls(given["mode"], tuple(models), given["seconds"], given["cuda"])


def examine(device: torch.device, implementations: Iterable[Implementation], mode: str = "auto") -> Examined:
    """Ask the unit about every model that could sharpen one of the contracts; nothing on a CPU or in mode "bound".

    ValueError for another mode."""
    if mode not in MODES:
        raise ValueError(f"arithmetic: expected one of {', '.join(MODES)}, got {mode!r}")
    cuda = device.type == "cuda" and not interpreter.interpreting()
    if mode == "bound" or not cuda:
        return Examined(mode, cuda=cuda)
    here = devices.architecture(device)
    names = {name for impl in implementations for name in wanted_models(impl, here)}
    started = time.perf_counter()
    found = verify_device_model(device, names=sorted(names)) if names else []
    return Examined(mode, tuple(found), time.perf_counter() - started, cuda)


def wanted_models(impl: Implementation, architecture: str) -> list[str]:
    """Names of the stored models of an architecture that could be the dots of an implementation.

    Our own Triton kernels use the very instruction that the models are held against. Of any other function nothing is
    known: it may run another instruction, add in another order, or convert its operands first. So its dots are a
    model's only where its contract says so by name (or by the same parameters), never by default."""
    contract = impl.contract
    if impl.arithmetic is None or impl.absent:
        return []
    operand = OPERANDS.get(impl.layout)
    if impl.spec is None and impl.kernel == "triton":
        if contract.named and isinstance(contract.arithmetic, Grouped):
            return _same(contract.arithmetic, operand, architecture)
        usual = usual_models(architecture)
        return [stored.name for stored in stored_models() if stored.name in usual and stored.operand == operand]
    if contract.named and isinstance(contract.arithmetic, Grouped):
        return _same(contract.arithmetic, operand, architecture)
    return []


def _same(arithmetic: Grouped, operand: str | None, architecture: str) -> list[str]:
    return [
        stored.name
        for stored in stored_models()
        if (stored.architecture, stored.operand, stored.arithmetic) == (architecture, operand, arithmetic)
    ]


def sharpened(impl: Implementation, found: Examined, architecture: str) -> Implementation:
    """The implementation with its dots taken as exact where today's unit confirmed the model that they follow."""
    names = wanted_models(impl, architecture)
    for model in found.models:
        if model.verified and model.name in names and not _rounds_operands(impl.contract):
            contract = replace(impl.contract.verified(model.model), arithmetic_name=f"{model.name} {model.model}")
            return replace(impl, contract=contract)
    return impl


def _rounds_operands(contract: Contract) -> bool:
    """Keys that are rounded before the dot are not those that a model would be given."""
    return contract.operand_dtype is not None

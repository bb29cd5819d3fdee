"""Which contracts may take a dot as exact: stored models are compared with today's GPU, and only a model without a
mismatch replaces the bound of a contract whose dots are known to be its own.
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
from parity.tensorcore.probe import Verified, compare_on, operand_of, usual_models

MODES = ("auto", "bound")
NOT_COMPARED = "not compared (--parity-arithmetic bound); the proved bound serves"


@dataclass(frozen=True)
class Verification:
    """How the stored models compare with today's GPU.

    mode     "auto", or "bound": nothing was compared, so every dot is judged by its proved bound
    models   one entry per model that was compared
    seconds  that it took
    """

    mode: str = "auto"
    models: tuple[Verified, ...] = ()
    seconds: float = 0.0
    cuda: bool = False

    def lines(self) -> list[str]:
        """For headers: one line per model, or the reason why none was compared. None on a CPU."""
        if self.mode == "bound":
            return [f"dot arithmetic: {NOT_COMPARED}"] if self.cuda else []
        return [f"dot arithmetic: {model}" for model in self.models]

    def as_dict(self) -> dict[str, Any]:
        """JSON types only; ``from_dict`` reads it back."""
        names = ("name", "verified", "dots", "mismatches")
        models = [{n: getattr(each, n) for n in names} | {"model": str(each.model)} for each in self.models]
        return {"mode": self.mode, "cuda": self.cuda, "seconds": round(self.seconds, 3), "models": models}

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Verification:
        """What another process has found, so that models are compared once per session."""
        models = []
        for item in given["models"]:
            stored = named_model(item["name"])
            counts = (item["verified"], item["dots"], item["mismatches"])
            models.append(Verified(stored.operand, stored.arithmetic, *counts, stored.name))
        return cls(given["mode"], tuple(models), given["seconds"], given["cuda"])


def verify_models(device: torch.device, implementations: Iterable[Implementation], mode: str = "auto") -> Verification:
    """Compare every model that could be the dots of one of these; none on a CPU or in mode "bound".

    ValueError for another mode."""
    if mode not in MODES:
        raise ValueError(f"arithmetic: expected one of {', '.join(MODES)}, got {mode!r}")
    cuda = device.type == "cuda" and not interpreter.interpreting()
    if mode == "bound" or not cuda:
        return Verification(mode, cuda=cuda)
    here = devices.architecture(device)
    names = {name for impl in implementations for name in wanted_models(impl, here)}
    started = time.perf_counter()
    found = compare_on(device, names=sorted(names)) if names else []
    return Verification(mode, tuple(found), time.perf_counter() - started, cuda)


def wanted_models(impl: Implementation, architecture: str) -> list[str]:
    """Names of the stored models of an architecture that could be the dots of an implementation.

    Our own Triton kernels use the very instruction that the models are compared with. Of any other function nothing is
    known: it may run another instruction, add in another order, or convert its operands first. So its dots are a
    model's only where its contract says so by name (or by the same parameters), never by default."""
    contract = impl.contract
    if impl.arithmetic is None or impl.absent:
        return []
    operand = operand_of(impl.layout)
    if contract.named and isinstance(contract.arithmetic, Grouped):
        named = (architecture, operand, contract.arithmetic)
        return [each.name for each in stored_models() if (each.architecture, each.operand, each.arithmetic) == named]
    if impl.spec is None and impl.kernel == "triton":
        usual = usual_models(architecture)
        return [each.name for each in stored_models() if each.name in usual and each.operand == operand]
    return []


def with_verified_dot(impl: Implementation, found: Verification, architecture: str) -> Implementation:
    """The implementation with its dots taken as exact where the model that they follow is verified."""
    names = wanted_models(impl, architecture)
    for model in found.models:
        if model.verified and model.name in names and not _rounds_operands(impl.contract):
            contract = replace(impl.contract.verified(model.model), arithmetic_name=f"{model.name} {model.model}")
            return replace(impl, contract=contract)
    return impl


def _rounds_operands(contract: Contract) -> bool:
    """Keys that are rounded before the dot are not those that a model would be given."""
    return contract.operand_dtype is not None

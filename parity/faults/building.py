"""From a fault model to an implementation that the suite can judge, and the correct ones next to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.ops.diagnosis import Diagnosis
from parity.ops.fault import Fault, Function
from parity.run import registry
from parity.run.implementation import Implementation
from parity.run.operation import find

CPU = torch.device("cpu")


def diagnosis_of(op: str) -> Diagnosis:
    """What an operation provides for fault models; ValueError for one that provides nothing."""
    found: Diagnosis | None = find(op).hook("diagnosis")
    if found is None:
        raise ValueError(f"{op} has no fault models")
    return found


def contract(op: str, layout: str, extra: Mapping[str, Any] | None = None) -> Contract:
    """What faulty and correct functions promise alike: IEEE float32, a clean tail, nothing rounded before the store.

    `extra` may name a store's schedule, scale and fp4 step."""
    pages = {"layout": layout} if find(op).layouts else {}
    return Contract.from_dict({"op": op, **pages, **diagnosis_of(op).promises, **(extra or {})}, CPU)


def staged(
    op: str, layout: str, extra: Mapping[str, Any] | None = None, change: Mapping[str, Function] | None = None
) -> Function:
    """The staged implementation of an operation, with steps replaced; correct without a change. ValueError for an
    operation that has none, or a layout that it does not know."""
    make = find(op).staged
    if make is None:
        raise ValueError(f"{op} has no fault models")
    return make(layout, extra or {}, change or {})


def function(fault: Fault) -> Function:
    """A new faulty function, with an empty memory."""
    correct = staged(fault.op, fault.layout, fault.extra.get("contract"), fault.change)
    return correct if fault.wrap is None else fault.wrap(correct)


def implementation(fault: Fault) -> Implementation:
    """The fault as an implementation under the contract that a correct one has."""
    name = f"faults/{fault.id}"
    if "route" in fault.extra:
        # Our own dispatcher with the flag lost on the way, watched for the route that was chosen.
        known = registry.builtin(CPU)
        chosen, ran = (known[f"{kernel}-{fault.layout}"] for kernel in ("triton", fault.extra["route"]))
        return replace(chosen, name=name, function=ran.function, absent=None, kernel="unknown")
    return _implementation(name, fault.op, fault.layout, function(fault), fault.extra.get("contract"))


def correct_implementation(op: str, layout: str, extra: Mapping[str, Any] | None = None) -> Implementation:
    """The staged implementation, which the suite must accept."""
    # The name seeds what is drawn, so it stays as it was when paged logits were called logits.
    name = f"faults/correct-{op.removeprefix('paged_')}-{layout}"
    return _implementation(name, op, layout, staged(op, layout, extra), extra)


def _implementation(name: str, op: str, layout: str, call: Function, extra: Mapping[str, Any] | None) -> Implementation:
    made = contract(op, layout, extra)
    parameters = frozenset(inspect.signature(call).parameters)
    return Implementation(name, op, made.layout, made, call, parameters, arguments=("--impl", name))

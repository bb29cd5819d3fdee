"""From a fault model to an implementation that the suite can judge, and the correct ones beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.ops.compressor.faults import staged as staged_compressor
from parity.ops.fault import STAGES, Fault
from parity.ops.paged_logits.faults import staged as staged_logits
from parity.ops.store.faults import staged as staged_store
from parity.ops.topk.faults import staged as staged_topk
from parity.run.implementation import Implementation

CPU = torch.device("cpu")
CONTRACTS: dict[str, dict[str, Any]] = {
    "paged_logits": {"arithmetic": "ieee"},
    "topk": {"stage": "topk"},
    "store": {"stage": "store", "batch_invariant": True},
    "compressor": {"stage": "compressor"},
}
"""What faulty and correct functions promise alike: IEEE float32, a clean tail, and nothing rounded before the store."""


def contract(op: str, layout: str, extra: Mapping[str, Any] | None = None) -> Contract:
    """The contract of an operation's functions; a store's may name a schedule, a scale and the fp4 step."""
    return Contract.from_dict({"layout": layout, **CONTRACTS[op], **(extra or {})}, CPU)


def staged(
    op: str, layout: str, extra: Mapping[str, Any] | None = None, change: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The staged implementation of an operation, with steps replaced; correct without a change."""
    if op == "topk":
        return staged_topk.function(change)
    if op == "compressor":
        return staged_compressor.function(change)
    if op == "paged_logits":
        return staged_logits.function(layout, change)
    how: dict[str, Any] = {"schedule": "fused", "scale": "amax", "fake_fp4": False} | dict(extra or {})
    return staged_store.function(layout, how["schedule"], how["scale"], how["fake_fp4"], change)


def function(fault: Fault) -> Callable[..., Any]:
    """A new faulty function, with an empty memory."""
    extra = fault.extra.get("contract")
    if fault.wrap is not None:
        return fault.wrap(staged(fault.op, fault.layout, extra))
    return staged(fault.op, fault.layout, extra, fault.change)


def implementation(fault: Fault) -> Implementation:
    """The fault as an implementation under the contract that a correct one has."""
    if "route" in fault.extra:
        return _misrouted(fault)
    extra = fault.extra.get("contract")
    return _made(f"faults/{fault.id}", fault.op, fault.layout, function(fault), extra)


def correct_implementation(op: str, layout: str, extra: Mapping[str, Any] | None = None) -> Implementation:
    """The staged implementation, which the suite must accept."""
    name = f"faults/correct-{STAGES[op]}-{layout}"
    return _made(name, op, layout, staged(op, layout, extra), extra)


def _made(name: str, op: str, layout: str, call: Callable[..., Any], extra: Mapping[str, Any] | None) -> Implementation:
    return Implementation(
        name=name,
        stage=STAGES[op],
        layout=layout,
        contract=contract(op, layout, extra),
        function=call,
        arguments=("--impl", name),
    )


def _misrouted(fault: Fault) -> Implementation:
    """Our own dispatcher with the flag lost on the way, watched for the route that was asked for."""
    from dataclasses import replace

    from parity.run import registry

    asked = registry.builtin(CPU)[f"triton-{fault.layout}"]
    ran = registry.builtin(CPU)[f"{fault.extra['route']}-{fault.layout}"]
    return replace(asked, name=f"faults/{fault.id}", function=ran.function, absent=None, kernel="unknown")

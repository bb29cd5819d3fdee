"""How a store function is compared with the fault models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.domain.contract import Contract
from parity.ops.diagnosis import Cells, Diagnosis, plain_operands
from parity.ops.fault import Fault, Function
from parity.ops.store.case import StoreCase
from parity.ops.store.faults import staged
from parity.ops.store.strategies import BIG_BYTES

USUAL: dict[str, Any] = {"schedule": "fused", "scale": "amax", "fake_fp4": False}
BEFORE_QUANTISATION = ("norm", "rope", "hadamard", "dispatch")
"""Steps whose faults any layout can have."""


def cells(operands: Any, layout: str) -> Callable[[Tensor], Cells]:
    """The bytes of the pool, each of them exactly."""

    def of(contents: Tensor) -> Cells:
        values = contents.contiguous().view(torch.uint8).reshape(-1).to(torch.float64)
        return Cells(values, torch.zeros_like(values))

    return of


def facts(contract: Contract) -> dict[str, Any]:
    """What a contract says about how keys are stored."""
    return {name: getattr(contract, name) for name in USUAL}


def fits(fault: Fault, layout: str) -> bool:
    """Whether the model can be run on a layout."""
    return fault.layout == layout or fault.step in BEFORE_QUANTISATION


def function(layout: str, facts: Mapping[str, Any], change: Mapping[str, Function]) -> Function:
    """The staged implementation as a contract wants it, with steps replaced."""
    how = USUAL | dict(facts)
    return staged.function(layout, how["schedule"], how["scale"], how["fake_fp4"], change)


def captured(named: Mapping[str, Any]) -> Any:
    """Operands of a captured call, whose whole cache is compared."""
    operands = plain_operands(named)
    operands.contents = lambda: operands.kv_cache.clone()
    operands.restore = lambda: operands.kv_cache.copy_(named["kv_cache"])
    return operands


def draw(fault: Fault, source: random.Random) -> StoreCase:
    """A case of the model's layout; integer faults need a large pool."""
    tokens = source.choice((2, 5, 40, 150))
    return StoreCase(
        ids=tuple(range(tokens)),
        layout=fault.layout,
        data=source.choice(("bell", "octaves", "zeros", "onehot", "tiny", "pairs")),
        seed=source.randrange(1 << 16),
        pooled=source.choice(("f32", "bf16")),
        weights=source.choice(("real", "ties")),
        positions=source.choice(("near", "far")),
        pages=6,
        place=source.choice(("spread", "order", "last")),
        perm=source.randrange(1 << 16),
        skip=source.choice((0, 3)),
        gap=BIG_BYTES // 5 // 16 * 16 if fault.kind == "integers" else source.choice((0, 48)),
    )


DIAGNOSIS = Diagnosis(
    draw=draw,
    cells=cells,
    promises={"batch_invariant": True},
    facts=facts,
    fits=fits,
    tensors=("pooled", "norm_weight", "positions", "rope_table", "out_loc", "kv_cache"),
    numbers={"eps": float},
    results=("output",),
    captured=captured,
)

"""How a logits function is compared with the fault models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.domain.contract import Contract
from parity.numerics.bounds import expected
from parity.ops.diagnosis import Cells, Diagnosis
from parity.ops.fault import Fault, Function
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.faults import pattern, staged
from parity.ops.paged_logits.operands import build_logits
from parity.ops.paged_logits.strategies import BIG_BYTES
from parity.ops.shared.drawing import before, drawn_fields
from parity.pages.layout import find

DATA = ("exact", "exact_wide", "octaves", "outliers", "near_ties", "saturating", "nonfinite", "subnormal", "zeros")
PROMISES = {"arithmetic": "ieee"}
ANY_LAYOUT = "bf16"
"""The layout of models that any layout can have; the others belong to their own."""
RELATIVE = 2.0**-16
"""gamma(2^8) of float32: what a sum of all terms may lose in another order where no bound is known."""


class Ruler:
    """The visible cells of a problem, with -inf behind them where that is promised, and the bound of each."""

    def __init__(self, operands: Any, layout: str) -> None:
        exact = expected(operands, Contract.from_dict({"layout": layout, **PROMISES}))
        lens = operands.context_lens.reshape(-1).to(torch.int64)
        columns = torch.arange(operands.max_context_len)
        visible = columns < lens[:, None]
        bounds = torch.where(torch.isfinite(exact.bound), exact.bound, 0.0)
        self.judged = visible | bool(operands.clean_logits)
        self.right = self._wide(exact.logits, -torch.inf).where(visible, -torch.inf)
        self.free = self._wide(exact.free, False) & visible
        self.bound = self._wide(bounds, 0.0)

    def _wide(self, x: Tensor, value: Any) -> Tensor:
        return torch.nn.functional.pad(x, (0, self.judged.shape[1] - x.shape[1]), value=value)

    def __call__(self, out: Tensor) -> Cells:
        return Cells(out.to(torch.float64)[self.judged], self.bound[self.judged], RELATIVE)

    def wrong(self, out: Tensor) -> Tensor:
        """The judged cells that are not what the oracle has, bool [T, width]."""
        error, size = (out - self.right).abs(), torch.maximum(out.abs(), self.right.abs())
        near = (error <= torch.maximum(self.bound, RELATIVE * size)) & torch.isfinite(error)
        same = (out == self.right) | (out.isnan() & self.right.isnan())
        return self.judged & ~near & ~same & ~self.free


def describe(operands: Any, layout: str, result: Tensor) -> list[str]:
    """What the wrong cells have in common, by the oracle."""
    return pattern.describe(Ruler(operands, layout).wrong(result), operands)


def describe_heads(case: Case, layout: str, run: Callable[[Case], Any]) -> list[str]:
    """Heads that are wrong when all the others have weight zero."""
    if case.data == "nonfinite":
        return []

    def wrong(head: int) -> bool:
        single = replace(case, only_heads=(head,))
        result = run(single)
        return result is None or bool(Ruler(build_logits(single), layout).wrong(result).any())

    heads = range(case.heads) if case.only_heads is None else case.only_heads
    found = [head for head in heads if wrong(head)]
    if not found or len(found) == case.heads:
        return []
    return [f"with one head at a time, heads {pattern.listed(found)} are wrong of {case.heads}"]


def fits(fault: Fault, layout: str) -> bool:
    """Whether the model can be run on a layout."""
    return fault.layout in (ANY_LAYOUT, layout)


def function(layout: str, facts: Mapping[str, Any], change: Mapping[str, Function]) -> Function:
    """The staged implementation, with steps replaced."""
    return staged.function(layout, change)


def draw(fault: Fault, source: random.Random) -> Case:
    """A case of the model's layout; launch faults need longer rows now and then, integer faults a large pool."""
    fields = drawn_fields(source, 320, 4100 if fault.kind == "launch" and source.random() < 0.3 else 70)
    fields |= {"spare": source.choice((2, 5, 40)), "gap": source.choice((0, 16, 4096))}
    if fault.kind == "integers" and source.random() < 0.5:
        fields |= {"spare": BIG_BYTES // find(fault.layout).page_bytes, "gap": 16}
    strides = source.sample(("q", "table", "weights", "lens"), source.randint(0, 3))
    heads, data = source.choice((8, 64)), source.choice(DATA)
    return Case(layout=fault.layout, heads=heads, data=data, strides=tuple(sorted(strides)), **fields)


DIAGNOSIS = Diagnosis(
    draw=draw,
    cells=Ruler,
    promises=PROMISES,
    fits=fits,
    before=before,
    describe=describe,
    describe_parts=describe_heads,
    tensors=("q", "kv_cache", "weights", "context_lens", "block_table"),
    numbers={"max_context_len": int, "clean_logits": bool},
    results=("output",),
)

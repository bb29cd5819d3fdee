"""The float32 sum over heads as a fixed tree of products, fused multiply-adds and additions, evaluated to the bit.

With the dots of a verified model this predicts whole logits. Trees are read off compiled kernels by
``parity/tensorcore/headorder.py``; those on record stand in ``fixtures/truth/head_sums.json``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any

import torch

from parity.golden.stored import read, shipped
from parity.numerics.arithmetic import Grouped
from parity.numerics.blocks import Block, Expected, blocks

Tree = tuple[int, ...] | tuple["Tree", "Tree"]
"""A chain of heads, the first a rounded product and each later one a fused multiply-add onto it; or a sum of two."""

CHUNK_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class HeadSum:
    """An order in which the heads of a logit are added, as text.

    ``1.0.8.9`` is a chain: the product of head 1, rounded, then heads 0, 8 and 9 by fused multiply-add.
    ``(X+Y)`` adds two such parts in float32. Products, sums and the fused operation round to nearest, subnormals are
    kept. The scale of an fp8 key multiplies the whole, rounded once more."""

    text: str

    def __post_init__(self) -> None:
        heads = sorted(self.order)
        if heads != list(range(len(heads))):
            raise ValueError(f"head sum: every head must occur once, from 0 on, got {self.text!r}")

    def __str__(self) -> str:
        return self.text

    @functools.cached_property
    def tree(self) -> Tree:
        """The parsed text; ValueError where it does not parse."""
        found, rest = _parse(self.text, self.text)
        if rest:
            raise ValueError(f"head sum: {rest!r} is left over in {self.text!r}")
        return found

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The heads from left to right."""
        return tuple(_leaves(self.tree))

    @property
    def heads(self) -> int:
        """How many heads it adds."""
        return len(self.order)

    def evaluate(self, dot: torch.Tensor, weights: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        """The logits that a kernel with this order returns, float32 ``[..., S]``.

        dot float32 ``[..., H, S]`` before the ReLU (which passes NaN), weights float32 ``[..., H]``, scale float32
        broadcastable to the result. ValueError for another number of heads."""
        for name, x, axis in (("dot", dot, -2), ("weights", weights, -1)):
            if x.shape[axis] != self.heads:
                raise ValueError(f"{name}: expected {self.heads} heads, got {x.shape[axis]}")
            if x.dtype != torch.float32:
                raise TypeError(f"{name}: expected float32, got {x.dtype}")
        relu = torch.where(dot > 0, dot, torch.where(dot.isnan(), dot, 0.0))
        total = _evaluate(self.tree, relu, weights[..., None])
        return total if scale is None else total * scale


def fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """float32 ``a * b + c`` rounded once, to nearest even, for float32 tensors.

    The product of two float32 is exact in float64. The float64 sum is rounded to odd (its error, found by two-sum,
    decides its last bit), after which rounding to float32's 24 or fewer digits cannot be misled: 53 >= 2 * 24 + 2."""
    product, addend = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = (total.view(torch.int64) & 1) == 0
    inexact = even & (error != 0) & torch.isfinite(total) & torch.isfinite(error)
    odd = torch.nextafter(total, torch.copysign(torch.full_like(error, math.inf), error))
    return torch.where(inexact, odd, total).to(torch.float32)


def predicted_logits(
    operands: Any,
    layout: str,
    arithmetic: Grouped,
    order: HeadSum,
    rows: torch.Tensor | None = None,
    *,
    chunk_bytes: int = CHUNK_BYTES,
) -> Expected:
    """What a kernel with these dots and this order returns; operands and rows as in ``bounds.expected``.

    Only ``logits`` of the result has a meaning: float64 [R, W] holding float32 values, -inf past the length."""
    result = Expected.empty(operands, rows)
    for block in blocks(operands, layout, result, chunk_bytes):
        scale = None if block.s is None else block.s.to(torch.float32)[:, None]
        logits = order.evaluate(predicted_dots(block, arithmetic), block.w.to(torch.float32), scale)
        block.put(result.logits, logits.to(torch.float64))
    return result


def predicted_dots(block: Block, arithmetic: Grouped) -> torch.Tensor:
    """The model's dots of a block, float32 [b, r, H, S]."""
    dots = arithmetic.exact_dot(block.raw_q.flatten(1, 2), block.raw_k)
    return dots.unflatten(1, block.q.shape[1:3])


@dataclasses.dataclass(frozen=True)
class RecordedOrder:
    """The order on record for one kernel: its name, its tree, and where it was read."""

    name: str
    order: HeadSum
    provenance: dict[str, Any]


def recorded_order(architecture: str, triton: str, fused: bool, config: str, heads: int) -> RecordedOrder | str:
    """The one order on record for a launch configuration, or the sentence that says why there is none.

    architecture such as sm_90; triton its full version; fused: whether the compiler may contract products and sums;
    config as ``impl.configs.Config`` prints itself."""
    book = _book()
    for entry in book["records"]:
        if entry["architecture"] != architecture or entry["fp_fusion"] != fused:
            continue
        if triton.split("+")[0] not in entry["triton"]:
            continue
        if entry["exceptions"].get(config, "") is None:
            return f"triton {triton} does not add all logits of {config} in one order"
        name = entry["exceptions"].get(config, entry["orders"].get(str(heads)))
        if name is not None:
            return RecordedOrder(name, HeadSum(book["orders"][name]), book["provenance"])
    fusion = "" if fused else " with fusion off"
    return f"no order of the head sum is on record for {architecture}, triton {triton}{fusion}, {heads} heads"


@functools.cache
def _book() -> dict[str, Any]:
    return read(shipped("head_sums.json"), "record of head sums", format=1)


def _parse(text: str, whole: str) -> tuple[Tree, str]:
    if text.startswith("("):
        left, rest = _parse(text[1:], whole)
        if not rest.startswith("+"):
            raise ValueError(f"head sum: expected '+' before {rest!r} in {whole!r}")
        right, rest = _parse(rest[1:], whole)
        if not rest.startswith(")"):
            raise ValueError(f"head sum: expected ')' before {rest!r} in {whole!r}")
        return (left, right), rest[1:]
    chain = re.match(r"\d+(\.\d+)*", text)
    if chain is None:
        raise ValueError(f"head sum: expected a head or '(' before {text!r} in {whole!r}")
    return tuple(int(head) for head in chain[0].split(".")), text[chain.end() :]


def _leaves(tree: Any) -> list[int]:
    if isinstance(tree, int):
        return [tree]
    return [head for part in tree for head in _leaves(part)]


def _evaluate(tree: Any, relu: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    if not isinstance(tree[0], int):
        return _evaluate(tree[0], relu, weights) + _evaluate(tree[1], relu, weights)
    total = relu[..., tree[0], :] * weights[..., tree[0], :]
    for head in tree[1:]:
        total = fma(relu[..., head, :], weights[..., head, :], total)
    return total

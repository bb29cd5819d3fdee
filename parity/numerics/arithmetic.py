"""Arithmetics of a dot product: IEEE float32 in any order, and the grouped, truncating sums of tensor cores.

Each is a small value object with a proved error bound; ``Grouped`` also predicts the result to the bit. Shapes
throughout: operands q ``[..., M, D]`` and k ``[..., N, D]`` (leading dimensions broadcast), results ``[..., M, N]``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from parity.golden.stored import read, shipped

FLOAT32_ROUNDOFF = 2.0**-24
NO_EXPONENT = -(2**14)  # of a zero: below every exponent that a finite operand can have
_PRECISION = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8, torch.float8_e4m3fn: 4}
_MINIMUM_EXPONENT = {torch.float32: -126, torch.float16: -14, torch.bfloat16: -126, torch.float8_e4m3fn: -6}
_CHUNK_BYTES = 64 << 20


def unit_roundoff(dtype: torch.dtype, conversion: str = "nearest") -> float:
    """Largest relative error of one conversion to ``dtype``; a truncating one can be twice as far off."""
    return 2.0 ** -_PRECISION[dtype] * (2 if conversion == "truncate" else 1)


def underflow_unit(dtype: torch.dtype, conversion: str = "nearest") -> float:
    """Largest absolute error of a conversion below ``dtype``'s normal range: half its smallest subnormal, or all of
    it where the conversion truncates."""
    return 2.0 ** (_MINIMUM_EXPONENT[dtype] - _PRECISION[dtype] + (1 if conversion == "truncate" else 0))


def digits(dtype: torch.dtype) -> int:
    """Binary digits of the significand."""
    return _PRECISION[dtype]


def smallest_normal_exponent(dtype: torch.dtype) -> int:
    """log2 of the smallest normal value."""
    return _MINIMUM_EXPONENT[dtype]


def largest(dtype: torch.dtype) -> float:
    """The largest finite value."""
    return torch.finfo(dtype).max


def gamma(count: int, roundoff: float) -> float:
    """``n u / (1 - n u)``: the relative error that ``count`` successive roundings can build up.

    ValueError where n u reaches 1."""
    if count * roundoff >= 1:
        raise ValueError(
            f"no bound exists for {count} roundings of unit roundoff {roundoff:g}: their product reaches 1"
        )
    return count * roundoff / (1 - count * roundoff)


@dataclasses.dataclass(frozen=True)
class Ieee:
    """A float32 dot that rounds every operation to nearest, in any order, fused or not, scales folded in anywhere."""

    exact = False

    def __str__(self) -> str:
        return "ieee float32"

    def bits(self) -> int:
        """Sums of absolute values up to ``2**bits`` quanta are exact in any order."""
        return 24

    def dot_bound(
        self, q: torch.Tensor, k: torch.Tensor, dot: torch.Tensor, absdot: torch.Tensor, eta: float = 2.0**-149
    ) -> torch.Tensor:
        """Bound on |computed - exact| for each dot, float64 like ``absdot``, the sums of |q||k|.

        Higham's gamma(n): a product, at most D - 1 additions and two scale factors, whatever the order of summation.
        ``eta`` is what one operation can lose to underflow."""
        depth = q.shape[-1]
        return gamma(depth + 2, FLOAT32_ROUNDOFF) * absdot + 2 * depth * eta

    def magnitude(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """|x|, what an operand counts for in the condition of exact data."""
        return x.abs()


IEEE = Ieee()


@dataclasses.dataclass(frozen=True)
class Grouped:
    """A tensor core's dot: terms are added in groups, in fixed point relative to the largest exponent of the group.

    group             terms that are added at once
    kept              addends are cut ``kept`` bits below the group's largest exponent (that bit itself survives)
    final             a group's sum is cut ``final`` bits below its own exponent
    running           True: the running sum is one more addend of each group. False: groups start from zero and are
                      added to the running sum in float32, to nearest
    product_exponent  "operands": a product's exponent is the sum of its operands' exponents; "product": its own
    cut               "zero" or "down": where an addend's lost bits go
    rounding          "zero", "down" or "nearest": the same for the group's sum
    subnormals        exponent of a subnormal operand: "minimum" (the format's smallest), "normalised" (as if it were
                      normal), or "minimum, zeros too" (zeros have it as well and so may lead a group)
    known_order       whether groups are consecutive and taken in order; without it only the order-free bound holds
    """

    group: int
    kept: int
    final: int
    running: bool = True
    product_exponent: str = "operands"
    cut: str = "zero"
    rounding: str = "zero"
    subnormals: str = "minimum"
    known_order: bool = True

    def __post_init__(self) -> None:
        # In units of the last kept bit an addend is below 2**(kept + 2), a product of significands being below 4. So
        # group + 1 addends add up to less than 1025 * 2**42 < 2**53 units under these limits: float64 holds every
        # partial sum exactly, whatever the order of its own summation.
        for name, low, high in (("group", 1, 1024), ("kept", 1, 40), ("final", 1, 40)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        for name, allowed in (
            ("product_exponent", ("operands", "product")),
            ("cut", ("zero", "down")),
            ("rounding", ("zero", "down", "nearest")),
            ("subnormals", ("minimum", "normalised", "minimum, zeros too")),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")

    def __str__(self) -> str:
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.name not in ("group", "kept", "final") and getattr(self, f.name) != f.default
        ]
        return f"grouped({', '.join([str(self.group), str(self.kept), str(self.final), *changed])})"

    def bits(self) -> int:
        """Sums of absolute values up to ``2**bits`` quanta are exact, each group's and the running one.

        With m < 2**(1 + kept) quanta the cut lies at or below one quantum, and the same for the sum; m = 2**(1 + kept)
        is a single power of two. Float32 registers hold 24 bits."""
        return min(self.kept + 1, self.final + 1, 24)

    def exact_dot(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """The dot this core returns, float32 ``[..., M, N]``.

        Operands have one dtype: e4m3, bf16, fp16, or float32 that holds tf32. Groups follow the last dimension and the
        running sum starts at zero. Every intermediate is a multiple of a power of two that float64 holds exactly (see
        ``__post_init__``). A non-finite product gives NaN or the infinity that IEEE addition gives; zero results are
        +0. A group's sum is also cut at 2**-149, float32's last bit, and becomes infinite past float32's range."""
        if q.dtype != k.dtype:
            raise TypeError(f"operands must have one dtype, got {q.dtype} and {k.dtype}")
        wide_q, wide_k = _widen(q), _widen(k)
        finite_q, finite_k = torch.nan_to_num(wide_q, 0.0, 0.0, 0.0), torch.nan_to_num(wide_k, 0.0, 0.0, 0.0)
        exponent_q, exponent_k = self._exponents(finite_q, q.dtype), self._exponents(finite_k, k.dtype)
        lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])  # torch's imports sympy at its first call: 2 seconds
        out = torch.empty(*lead, q.shape[-2], k.shape[-2], dtype=torch.float32, device=q.device)
        row_bytes = max(1, math.prod(lead) * k.shape[-2] * self.group * 8)
        step = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, q.shape[-2], step):
            rows = slice(start, start + step)
            out[..., rows, :] = self._evaluate(finite_q[..., rows, :], finite_k, exponent_q[..., rows, :], exponent_k)
        if not (bool(torch.isfinite(wide_q).all()) and bool(torch.isfinite(wide_k).all())):
            wild = nonfinite_dot(wide_q, wide_k)
            out = torch.where(torch.isfinite(wild), out, wild.to(torch.float32))
        return out

    def _exponents(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        exponent = torch.frexp(x).exponent - 1
        if self.subnormals != "normalised":
            exponent = exponent.clamp_min(_MINIMUM_EXPONENT[dtype])
        if self.subnormals == "minimum, zeros too":
            return torch.where(x == 0, _MINIMUM_EXPONENT[dtype], exponent)
        return torch.where(x == 0, NO_EXPONENT, exponent)

    def _evaluate(self, q: torch.Tensor, k: torch.Tensor, eq: torch.Tensor, ek: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor | None = None
        for part in _groups(q.shape[-1], self.group):
            products = q[..., :, None, part] * k[..., None, :, part]
            top = self._top(products, eq, ek, part)
            if self.running and total is not None:
                top = torch.maximum(top, _own_exponent(total))
            inverse, unit = _power_of_two(self.kept - top), _power_of_two(top - self.kept)
            quanta = self._cut(products.mul_(inverse[..., None])).sum(-1)
            if self.running and total is not None:
                quanta += self._cut(total * inverse)
            group_sum = self._round(quanta * unit)
            if self.running or total is None:
                total = group_sum
            else:
                total = (total.to(torch.float32) + group_sum.to(torch.float32)).to(torch.float64)
        assert total is not None
        return total.to(torch.float32) + 0.0

    def _top(self, products: torch.Tensor, eq: torch.Tensor, ek: torch.Tensor, part: slice) -> torch.Tensor:
        """Largest exponent among the products of a group."""
        if self.product_exponent == "operands":
            return (eq[..., :, None, part] + ek[..., None, :, part]).amax(-1)
        return _own_exponent(products.abs().amax(-1))

    def _cut(self, x: torch.Tensor) -> torch.Tensor:
        return x.trunc_() if self.cut == "zero" else x.floor_()

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        lowest = (_own_exponent(x) - self.final).clamp_min(-149)
        scaled = x * _power_of_two(-lowest)
        whole = {"zero": torch.trunc, "down": torch.floor, "nearest": torch.round}[self.rounding](scaled)
        return whole * _power_of_two(lowest)

    def dot_bound(
        self, q: torch.Tensor, k: torch.Tensor, dot: torch.Tensor, absdot: torch.Tensor, eta: float = 2.0**-149
    ) -> torch.Tensor:
        """Bound on |computed - exact| for each dot, float64 ``[..., M, N]``; ``dot`` and ``absdot`` are the exact sums.

        Non-finite operands count as zero. The proof is in docs/arithmetic.md."""
        wide_q, wide_k = (torch.nan_to_num(_widen(x), 0.0, 0.0, 0.0) for x in (q, k))
        if not self.known_order:
            if self.subnormals != "normalised":
                absdot = self.magnitude(wide_q, q.dtype) @ self.magnitude(wide_k, k.dtype).mT
            return self._order_free_factor(q.shape[-1]) * absdot + math.ceil(q.shape[-1] / self.group) * eta
        exponent_q, exponent_k = self._exponents(wide_q, q.dtype), self._exponents(wide_k, k.dtype)
        lead = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
        row_bytes = max(1, math.prod(lead) * k.shape[-2] * self.group * 8)
        step = max(1, _CHUNK_BYTES // row_bytes)
        parts = [
            self._bound(wide_q[..., i : i + step, :], wide_k, exponent_q[..., i : i + step, :], exponent_k, eta)
            for i in range(0, q.shape[-2], step)
        ]
        return torch.cat(parts, -2) if parts else absdot.new_zeros(*lead, 0, k.shape[-2])

    def magnitude(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What an operand counts for in the condition of exact data: |x|, but no less than its exponent says."""
        if self.subnormals == "normalised":
            return x.abs()
        at_least = x.abs().clamp_min(2.0 ** _MINIMUM_EXPONENT[dtype])
        return at_least if self.subnormals == "minimum, zeros too" else torch.where(x == 0, 0.0, at_least)

    def _order_free_factor(self, depth: int) -> float:
        cut, last, error = 2.0**-self.kept, 2.0**-self.final, 0.0
        for _ in range(math.ceil(depth / self.group)):
            lost = error + (self.group + 1) * cut * (1 + error)
            error = lost + last * (1 + lost)
        between = 0.0 if self.running else gamma(math.ceil(depth / self.group), FLOAT32_ROUNDOFF) * (1 + error)
        return error + between

    def _bound(self, q: torch.Tensor, k: torch.Tensor, eq: torch.Tensor, ek: torch.Tensor, eta: float) -> torch.Tensor:
        shape = (*np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])
        total, error, sizes = q.new_zeros(shape), q.new_zeros(shape), q.new_zeros(shape)
        last = 2.0**-self.final
        for part in _groups(q.shape[-1], self.group):
            products = q[..., :, None, part] * k[..., None, :, part]
            group_sum = products.sum(-1)
            products.abs_()
            before = (total.abs() + error) * (1 + 2.0**-40) if self.running else torch.zeros_like(total)
            top = torch.maximum(self._top(products, eq, ek, part), _own_exponent(before))
            cut = _power_of_two(top - self.kept)
            if self.cut == "zero":  # never moves an addend by more than its own size
                lost = torch.minimum(products, cut[..., None]).sum(-1) + torch.minimum(before, cut)
            else:
                lost = cut * ((products != 0).sum(-1) + (before != 0))
            if self.running:
                total = total + group_sum
                lost = error + lost
                error = lost + last * (total.abs() + lost) + eta
            else:
                error = error + lost + last * (group_sum.abs() + lost) + eta
                sizes = sizes + group_sum.abs() + lost
        if not self.running:
            between = gamma(math.ceil(q.shape[-1] / self.group), FLOAT32_ROUNDOFF)
            error = error + between * (1 + last) * sizes
        # Float64 rounded each of these few operations; 2**-40 of the result covers them.
        return error * (1 + 2.0**-40)


Arithmetic = Ieee | Grouped


def nonfinite_dot(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """NaN, +inf or -inf where IEEE addition of the products ``q k`` ends there, 0 elsewhere; float64 ``[..., M, N]``.

    Counts the offending products with indicator matrices, so that no library's treatment of ``0 * inf`` matters."""

    def count(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a.to(torch.float64) @ b.to(torch.float64).transpose(-1, -2)

    inf = math.inf
    q_inf, k_inf, every_q, every_k = q.abs() == inf, k.abs() == inf, torch.ones_like(q), torch.ones_like(k)
    nan = count(q.isnan(), every_k) + count(every_q, k.isnan()) + count(q_inf, k == 0) + count(q == 0, k_inf)
    up = count(q == inf, k > 0) + count(q == -inf, k < 0) + count(q > 0, k == inf) + count(q < 0, k == -inf)
    down = count(q == inf, k < 0) + count(q == -inf, k > 0) + count(q > 0, k == -inf) + count(q < 0, k == inf)
    result = torch.where(up > 0, inf, 0.0) + torch.where(down > 0, -inf, 0.0)
    return torch.where(nan > 0, math.nan, result).to(torch.float64)


def _groups(depth: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, depth)) for start in range(0, depth, size))


def _widen(x: torch.Tensor) -> torch.Tensor:
    # CPU float8 has no direct path to float64 in every torch; float32 holds each operand dtype exactly.
    return x.to(torch.float32).to(torch.float64)


def _own_exponent(x: torch.Tensor) -> torch.Tensor:
    """floor(log2 |x|) as int32, NO_EXPONENT for zero."""
    return torch.where(x == 0, NO_EXPONENT, torch.frexp(x).exponent - 1)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent as float64, from its bits (exp2 need not be exact), held inside float64's range for zeros' sake."""
    return ((exponent.to(torch.int64).clamp(-1022, 1023) + 1023) << 52).view(torch.float64)


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """One entry of ``fixtures/truth/arithmetic_models.json``: a model, where it holds and how that is known."""

    name: str
    architecture: str
    operand: str
    arithmetic: Grouped
    max_num_imprecise_acc: int | None
    hypothesis: bool
    provenance: dict[str, Any]


@functools.cache
def stored_models() -> tuple[StoredModel, ...]:
    """The models shipped with the package, measured ones first."""
    entries = read(shipped("arithmetic_models.json"), "record of models", format=1)["models"]
    models = [
        StoredModel(
            name=entry["name"],
            architecture=entry["architecture"],
            operand=entry["operand"],
            arithmetic=Grouped(**entry["arithmetic"]),
            max_num_imprecise_acc=entry.get("max_num_imprecise_acc"),
            hypothesis=entry["status"] == "hypothesis",
            provenance=entry["provenance"],
        )
        for entry in entries
    ]
    return tuple(sorted(models, key=lambda model: model.hypothesis))


def named_model(name: str) -> StoredModel:
    """A shipped model by name; ValueError lists the names."""
    for model in stored_models():
        if model.name == name:
            return model
    raise ValueError(f"no arithmetic model is named {name!r}; stored are {', '.join(m.name for m in stored_models())}")

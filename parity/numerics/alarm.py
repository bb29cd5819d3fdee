"""A statistical alarm for arithmetic that stays inside the proved bound but is far worse than an honest kernel's.

An honest float32 kernel uses about a thousandth of the proved bound, so faults hide below it. The alarm compares an
implementation's error with that of a plain emulation of its contract, over independent cases.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from parity.numerics.arithmetic import Grouped
from parity.numerics.blocks import Block, Expected, blocks
from parity.numerics.bounds import expected
from parity.numerics.exactness import round_to
from parity.results import Labels, Status, Verdict

if TYPE_CHECKING:
    from parity.domain.contract import Contract

FACTOR = 4.0
"""An honest order of summation reaches at most about twice the emulator's error; 18-bit dots reach 12 times."""
CASES = 20
"""If an honest kernel exceeds FACTOR in at most half of all cases, it does in all of 20 with probability <= 2**-20."""
LEAST_CELLS = 64
"""Cells below which a root mean square says little; smaller cases are not counted."""
CHUNK_BYTES = 256 << 20


def emulate(
    operands: Any, contract: Contract, rows: torch.Tensor | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> Expected:
    """What a plain kernel under ``contract`` would return: float32 sums in sequence, or the grouped model's dots.

    Only ``logits`` of the result has a meaning (float64 holding float32 values; -inf past the length)."""
    result = Expected.empty(operands, rows)
    for block in blocks(operands, contract.layout, result, chunk_bytes):
        block.put(result.logits, _emulate(block, contract).to(torch.float64))
    return result


def _emulate(block: Block, contract: Contract) -> torch.Tensor:
    """float32 [b, r, S]: products rounded, added in index order, the contract's roundings after each stage."""
    shape = block.q.shape[1:3]
    k, scale = block.k.to(torch.float32), block.s
    if contract.operand_dtype is not None:
        scaled = block.k if scale is None else block.k * scale[..., None]
        k = round_to(scaled, contract.operand_dtype, contract.conversion).to(torch.float32)
        scale = None
    if isinstance(contract.arithmetic, Grouped):
        dot = contract.arithmetic.exact_dot(block.raw_q.flatten(1, 2), block.raw_k)
    else:
        q = block.q.to(torch.float32).flatten(1, 2)
        dot = q.new_zeros(*q.shape[:2], k.shape[1])
        for d in range(q.shape[-1]):
            dot += q[..., d, None] * k[:, None, :, d]
    dot = _round(dot.unflatten(1, shape), contract, contract.dot_dtype)
    product = block.w.to(torch.float32)[..., None] * torch.where(dot < 0, 0.0, dot)
    product = _round(product, contract, contract.product_dtype)
    total = product.new_zeros(*product.shape[:2], product.shape[-1])
    for head in range(product.shape[2]):
        total = _round(total + product[:, :, head], contract, contract.sum_unit)
    if scale is not None:
        total = total * scale.to(torch.float32)[:, None]
    return _round(total, contract, contract.out_dtype)


def _round(x: torch.Tensor, contract: Contract, dtype: torch.dtype | None) -> torch.Tensor:
    if dtype in (None, torch.float32):
        return x
    return round_to(x.to(torch.float64), dtype, contract.conversion).to(torch.float32)


@dataclasses.dataclass
class Alarm:
    """Collects (x, y) of independent cases, x = rms(error / bound) of an implementation and y the emulator's."""

    pairs: list[tuple[float, float]] = dataclasses.field(default_factory=list)

    def add(
        self, out: torch.Tensor, operands: Any, contract: Contract, rows: torch.Tensor | None = None
    ) -> tuple[float, float] | None:
        """Counts one case, ``out`` float32 [T, max_context_len] being the answer to ``operands``; returns its (x, y).

        None, and not counted, if it was too small, or if the emulator made no error to compare with."""
        return self.compare(out, expected(operands, contract, rows), emulate(operands, contract, rows))

    def compare(self, out: torch.Tensor, exact: Expected, emulated: Expected) -> tuple[float, float] | None:
        """``add`` with both evaluations at hand, of the same rows."""
        width, device = exact.logits.shape[1], exact.logits.device
        got = out[exact.rows.to(out.device), :width].to(device).to(torch.float64)
        cells = exact.visible() & torch.isfinite(exact.logits) & torch.isfinite(got)
        cells &= torch.isfinite(emulated.logits) & torch.isfinite(exact.bound) & (exact.bound > 0)
        if int(cells.sum()) < LEAST_CELLS:
            return None
        wanted, bound = exact.logits[cells], exact.bound[cells]
        x, y = (float(((z[cells] - wanted) / bound).square().mean().sqrt()) for z in (got, emulated.logits))
        if y == 0:
            return None
        self.pairs.append((x, y))
        return x, y

    @property
    def ratios(self) -> list[float]:
        """x / y of every counted case."""
        return [x / y for x, y in self.pairs]

    @property
    def fired(self) -> bool:
        """Whether all of at least CASES cases exceed FACTOR."""
        return len(self.pairs) >= CASES and min(self.ratios) > FACTOR

    @property
    def possible(self) -> bool:
        """Whether it can still fire: no counted case has cleared the implementation."""
        return not self.pairs or min(self.ratios) > FACTOR

    def verdict(
        self, *, case: object = "", impl: str = "NAME", level: str = "rounding", check: str = "alarm"
    ) -> Verdict:
        """FAILED when it fired, PASSED when a case has cleared the implementation, else NOT_RUN (too few cases)."""
        labels = Labels(level=level, check=check, case=str(case), impl=impl)
        count = len(self.pairs)
        if self.fired:
            middle = sorted(self.ratios)[count // 2]
            note = (
                f"in all of {count} independent cases the error exceeds {FACTOR:g} times that of a plain emulation of "
                f"the contract, {middle:.3g} times in the median"
            )
            return labels.failed(note=note, got=f"error ratio {min(self.ratios):.3g} or more", wanted=f"{FACTOR:g}")
        if not self.possible:
            return labels.verdict(Status.PASSED, cells=count)
        return labels.verdict(Status.NOT_RUN, message=f"only {count} of the {CASES} cases that the alarm needs")

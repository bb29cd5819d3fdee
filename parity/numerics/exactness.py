"""Exact data: operands on which every order of summation gives the same bits, and the logits that it must then give.

All values are multiples of known powers of two ("quanta") and all sums of absolute values fit the digits that the
arithmetic keeps, so no rounding happens but at the contract's own rounding points.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from parity.numerics.arithmetic import digits, largest, smallest_normal_exponent
from parity.numerics.blocks import Block, Expected, blocks

if TYPE_CHECKING:
    from parity.domain.contract import Contract

CHUNK_BYTES = 256 << 20
NO_QUANTUM = 1 << 14
"""Exponent of the quantum of a zero: any multiple will do."""


def exact_expected(
    operands: Any, contract: Contract, rows: torch.Tensor | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> Expected:
    """The logits of exact data, rounded where the contract rounds; bounds are zero, every value is a float32.

    Meaningful only where ``is_exact_data`` holds, which is not checked here. Rows as in ``bounds.expected``."""
    result = Expected.empty(operands, rows)
    for block in blocks(operands, contract.layout, result, chunk_bytes):
        dot = (block.q.flatten(1, 2) @ block.k.mT).unflatten(1, block.q.shape[1:3])
        product = _product(dot, block, contract)
        logits = _times_scale(product.sum(2), block)
        block.put(result.logits, round_to(logits, contract.out_dtype, contract.conversion))
    return result


def is_exact_data(
    operands: Any, contract: Contract, rows: torch.Tensor | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> bool:
    """Whether every order of summation under the contract's arithmetic is exact on these very operands.

    Asks, for each visible cell: sum_d |q||k| within ``2**arithmetic.bits()`` quanta of q k; sum_h |w| abs_h (and the
    sum of rounded products) within the digits of the head sum; a power of two (or zero) as scale; and everything, with
    the scale folded in anywhere, inside the normal range of every declared dtype."""
    result = Expected.empty(operands, rows)
    for block in blocks(operands, contract.layout, result, chunk_bytes):
        if not block.finite or not bool((_exact_cells(block, contract) | ~block.real).all()):
            return False
    return True


def quantum(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """Exponent z (int64) of the largest power of two that divides every entry along ``dim``; NO_QUANTUM for zeros."""
    # By the bits of a float64, in which every float32 is normal; several times as fast as frexp.
    bits = x.to(torch.float64).contiguous().view(torch.int64)
    whole = (bits & ((1 << 52) - 1)) | (1 << 52)
    lowest = ((whole & -whole).to(torch.float64).view(torch.int64) >> 52) - 1023
    return torch.where(x == 0, NO_QUANTUM, ((bits >> 52) & 0x7FF) - 1075 + lowest).amin(dim)


def round_to(x: torch.Tensor, dtype: torch.dtype | None, conversion: str = "nearest") -> torch.Tensor:
    """float64 ``x`` (values of float32) rounded once to ``dtype``, float64; None leaves it. "truncate": toward zero."""
    if dtype is None:
        return x
    rounded = x.to(torch.float32).to(dtype)
    if conversion == "truncate":
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        too_far = rounded.to(torch.float64).abs() > x.abs()
        # The bits of a float, read as an integer, grow with its magnitude: one less is its neighbour toward zero.
        rounded = (rounded.view(integers) - too_far.to(integers)).view(dtype)
    return rounded.to(torch.float64)


def _product(dot: torch.Tensor, block: Block, contract: Contract) -> torch.Tensor:
    """Each head's share of the logit but for the scale, [b, r, H, S], after the contract's roundings of it."""
    dot = round_to(dot, contract.dot_dtype, contract.conversion)
    return round_to(block.w[..., None] * dot.clamp_min(0.0), contract.product_dtype, contract.conversion)


def _times_scale(total: torch.Tensor, block: Block) -> torch.Tensor:
    return total if block.s is None else total * block.s[:, None]


def _exact_cells(block: Block, contract: Contract) -> torch.Tensor:
    """bool [b, r, S]: cells on which nothing but the declared roundings can round."""
    shape = block.q.shape[1:3]
    head_quantum, key_quantum, weight_quantum = quantum(block.q), quantum(block.k), quantum(block.w)
    least = head_quantum.amin(2)  # [b, r]
    dot_quantum = least[..., None] + key_quantum[:, None]  # [b, r, S]: divides every head's dot
    cell_quantum = dot_quantum + weight_quantum[..., None]

    # Sums of absolute values counted in quanta: each head's own for its dot, the common one for the sum over heads.
    counted_q = contract.arithmetic.magnitude(block.q, block.raw_q.dtype) * _power(-head_quantum)[..., None]
    counted_k = contract.arithmetic.magnitude(block.k, block.raw_k.dtype) * _power(-key_quantum)[..., None]
    absdot = (counted_q.flatten(1, 2) @ counted_k.mT).unflatten(1, shape)
    good = (absdot <= 2.0 ** contract.arithmetic.bits()).all(2)
    size = block.w.abs()
    relative = torch.where(head_quantum == NO_QUANTUM, 0.0, _power(head_quantum - least[..., None]))
    weight = size * _power(-weight_quantum)[..., None] * relative
    weighted = (weight[..., None, :] @ absdot)[..., 0, :]
    good &= weighted <= 2.0 ** min(24, digits(contract.sum_unit))
    if contract.rounds:
        dot = (block.q.flatten(1, 2) @ block.k.mT).unflatten(1, shape)
        rounded = _product(dot, block, contract).abs().sum(2)
        good &= (weighted <= 2.0**24) & (rounded <= _power(cell_quantum + digits(contract.sum_unit)))

    scale = torch.ones_like(block.k[..., 0]) if block.s is None else block.s
    mantissa, exponent = torch.frexp(scale)
    good &= ((mantissa == 0.5) | (scale == 0))[:, None]
    shift = torch.where(scale == 0, 0, exponent.to(torch.int64) - 1)[:, None]  # log2 of the scale, [b, 1, S]
    declared = [contract.operand_dtype, contract.dot_dtype, contract.product_dtype, contract.sum_unit]
    dtypes = [dtype for dtype in [*declared, contract.out_dtype, torch.float32] if dtype is not None]
    smallest = max(smallest_normal_exponent(dtype) for dtype in dtypes)
    ceiling = min(largest(dtype) for dtype in dtypes)
    down = shift.clamp_max(0)
    operand_quantum = torch.minimum(least[..., None], key_quantum[:, None])
    for lowest in (dot_quantum, cell_quantum, weight_quantum[..., None], operand_quantum):
        good &= lowest + down >= smallest
    weight = size.clamp_min(1.0) * _power_or_zero(head_quantum)
    reach = (weight[..., None, :] @ absdot)[..., 0, :] * _power_or_zero(key_quantum)[:, None]
    reach = scale.clamp_min(1.0)[:, None] * torch.maximum(reach, size.amax(2)[..., None])
    good &= reach < ceiling / 2
    if contract.operand_dtype is not None:
        # The keys are rounded after dequantisation: exact data must pass that unchanged.
        scaled = block.k * (1.0 if block.s is None else block.s[..., None])
        unchanged = round_to(scaled, contract.operand_dtype, contract.conversion) == scaled
        good &= unchanged.all(-1)[:, None]
    return good


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2**exponent in float64, infinite past its range (a zero's quantum puts no limit)."""
    bits = (exponent.clamp(-1022, 1023) + 1023) << 52
    return torch.where(exponent > 1023, math.inf, bits.view(torch.float64))


def _power_or_zero(exponent: torch.Tensor) -> torch.Tensor:
    """The quantum itself, 0 for the quantum of a zero."""
    return torch.where(exponent == NO_QUANTUM, 0.0, _power(exponent))

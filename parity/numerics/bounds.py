"""The exact logits of a case and the proved bound of each, in float64, under a contract.

With dot_h = sum_d q k and abs_h = sum_d |q||k| of operands as stored, a logit is L = s sum_h w_h relu(dot_h). The
bound follows the errors through the contract's rounding points: dot, weight, head sum, scale, output. The derivation
is in docs/bounds.md.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import torch

from parity.numerics.arithmetic import (
    FLOAT32_ROUNDOFF,
    Grouped,
    gamma,
    largest,
    nonfinite_dot,
    underflow_unit,
    unit_roundoff,
)
from parity.numerics.blocks import Block, Expected, blocks
from parity.numerics.exactness import exact_expected, is_exact_data

if TYPE_CHECKING:
    from parity.domain.contract import Contract

__all__ = ["Expected", "exact_expected", "expected", "is_exact_data"]

CHUNK_BYTES = 256 << 20
SMALLEST_NORMAL = 2.0**-126
SMALLEST_SUBNORMAL = 2.0**-149


def expected(
    operands: Any, contract: Contract, rows: torch.Tensor | None = None, *, chunk_bytes: int = CHUNK_BYTES
) -> Expected:
    """Exact logits and bounds of ``operands`` under ``contract``, for all rows or those numbered in ``rows`` (int64).

    ``operands`` has q [B, next_n, H, D], kv_cache, weights [B * next_n, H], context_lens [B, next_n] and block_table
    [B, max_pages]; it is evaluated where it lies, within about ``chunk_bytes`` beside the result. Where the contract's
    grouped arithmetic is verified, "exact" means that model's dot. ValueError for a negative scale in a readable slot,
    or for a contract whose roundings have no bound."""
    result = Expected.empty(operands, rows)
    for block in blocks(operands, contract.layout, result, chunk_bytes):
        logits, bound, free, nan_ok = _evaluate(block, contract)
        block.put(result.logits, logits)
        block.put(result.bound, bound)
        block.put(result.free, free)
        if nan_ok is not None:
            block.put(result.nan_ok, nan_ok)
    return result


def _evaluate(block: Block, contract: Contract) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(logits, bound, free, nan_ok), each [b, r, S]; non-finite operands count as zero but for the class of a logit."""
    if block.finite:
        logits, bound, free, _ = _finite(block, contract, None)
        return logits, bound, free, None
    wild = nonfinite_dot(block.q.flatten(1, 2), block.k).unflatten(1, block.q.shape[1:3])
    sane = dataclasses.replace(
        block,
        raw_q=_tamed(block.raw_q),
        raw_k=_tamed(block.raw_k),
        q=_tamed(block.q),
        k=_tamed(block.k),
        w=_tamed(block.w),
        # Under an infinite scale the sign of the head sum is the logit's class: the sum is evaluated without it.
        s=None if block.s is None else torch.where(block.s.isinf(), 1.0, _tamed(block.s)),
    )
    logits, bound, free, relu = _finite(sane, contract, wild)
    # The class: elementwise IEEE arithmetic on the infinities and NaN, and on the other dots as they are judged, by the
    # model's where it is verified: their sum decides the sign under an infinite scale. One that overflows is no class.
    relu = torch.nan_to_num(relu, nan=0.0, posinf=largest(torch.float32))
    kind = (block.w[..., None] * torch.where(wild == 0, relu, _relu(wild))).sum(2)
    nan_ok = torch.zeros_like(free)
    either = torch.zeros_like(free)
    if block.s is not None:
        # A head sum within its bound of zero may have either sign, or be zero.
        either = block.s.isinf()[:, None] & torch.isfinite(kind) & (logits.abs() <= bound)
        kind = kind * block.s[:, None]
        folded = block.s.isinf() | ((block.s == 0) & block.k.isinf().any(-1))  # 0 * inf if the scale goes in first
        nan_ok = folded[:, None].expand_as(free)
    odd = ~torch.isfinite(kind)
    logits = torch.where(odd, kind, logits)
    return logits, bound.masked_fill(odd, 0.0), (free & ~odd) | either, nan_ok


def _finite(
    block: Block, contract: Contract, wild: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(logits, bound, free, relu of the dots) of finite operands; ``wild`` marks dots that end non-finite: 0 here."""
    heads, depth = block.q.shape[2], block.q.shape[3]
    eta = SMALLEST_NORMAL if contract.flush_to_zero else SMALLEST_SUBNORMAL
    dot, absdot, error, float64_error = _dot(block, contract, eta)
    if wild is not None:
        for part in (dot, absdot, error):
            part.masked_fill_(wild != 0, 0.0)
    if contract.dot_dtype is not None:
        error += unit_roundoff(contract.dot_dtype, contract.conversion) * (dot.abs() + error)
        error += underflow_unit(contract.dot_dtype, contract.conversion)
    relu = dot.clamp_min_(0.0)
    w, size = block.w, block.w.abs()
    scale = torch.ones_like(block.k[..., 0]) if block.s is None else block.s
    scale = scale[:, None]  # [b, 1, S]

    total = _over_heads(w, relu)
    sizes = _over_heads(size, relu)
    product_error = _over_heads(size, error)
    if contract.product_dtype is not None:
        roundoff = unit_roundoff(contract.product_dtype, contract.conversion)
        product_error += roundoff * (sizes + product_error)
        product_error += heads * underflow_unit(contract.product_dtype, contract.conversion)
    summing = gamma(heads + 3, _sum_roundoff(contract))
    sum_error = product_error + summing * (sizes + product_error)
    if contract.sum_unit != torch.float32:
        sum_error += (1 + summing) * heads * underflow_unit(contract.sum_unit, contract.conversion)
    logits = scale * total
    bound = scale * sum_error + _operand_underflow(block, contract, summing)
    if contract.out_dtype is not None:
        bound += unit_roundoff(contract.out_dtype, contract.conversion) * (logits.abs() + bound)
        bound += underflow_unit(contract.out_dtype, contract.conversion)
    # Float32 underflow: of each product and partial sum (relu, error, 1), of s * w before it meets the dot (1 + |w|),
    # and of s * q or s * k when the scale is folded into an operand.
    weight = size.sum(-1)[..., None]
    under = relu.sum(2) + error.sum(2) + weight + scale * (heads + weight) + heads
    under += 0.5 * (_over_heads(size, block.q.abs().sum(-1)[..., None]) + weight * block.k.abs().sum(-1)[:, None])
    bound += 2 * eta * under
    bound += (heads + 8 + float64_error * depth) * 2.0**-53 * scale * _over_heads(size, absdot)

    reach = scale.clamp_min(1.0) * _over_heads(size.clamp_min(1.0), absdot.add_(error))
    weight_reach = size.amax(-1)[..., None] * scale
    reach = torch.maximum(reach, weight_reach)
    limits = [contract.operand_dtype, contract.dot_dtype, contract.product_dtype, contract.sum_unit, contract.out_dtype]
    free = reach >= min(largest(dtype) for dtype in [*limits, torch.float32] if dtype is not None)
    # A partial sum that overflows to -inf becomes 0 in the ReLU, so past float32's range even finite values are free.
    bound = bound.masked_fill(reach >= largest(torch.float32), math.inf)
    return logits, bound, free, relu


def _dot(block: Block, contract: Contract, eta: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(dot, absdot, error), each [b, r, H, S], and 1 if the float64 evaluation of dot is itself inexact, else 0."""
    shape = block.q.shape[1:3]
    q = block.q.flatten(1, 2)
    arithmetic = contract.arithmetic
    absdot = (q.abs() @ block.k.abs().mT).unflatten(1, shape)
    if isinstance(arithmetic, Grouped) and contract.dot_verified:
        dot = arithmetic.exact_dot(block.raw_q.flatten(1, 2), block.raw_k).to(torch.float64).unflatten(1, shape)
        return dot, absdot, torch.zeros_like(dot), 0.0
    dot = (q @ block.k.mT).unflatten(1, shape)
    if isinstance(arithmetic, Grouped):
        raw_q = block.raw_q.flatten(1, 2)
        error = arithmetic.dot_bound(raw_q, block.raw_k, dot.flatten(1, 2), absdot.flatten(1, 2), eta)
        error = error.unflatten(1, shape)
    else:
        error = arithmetic.dot_bound(block.q, block.k, dot, absdot, eta)
    if contract.operand_dtype is not None:  # the dot then sums rounded operands, whose sizes have grown by as much
        roundoff = unit_roundoff(contract.operand_dtype, contract.conversion)
        error += roundoff * (absdot + error)
    return dot, absdot, error, 1.0


def _operand_underflow(block: Block, contract: Contract, summing: float) -> torch.Tensor | float:
    """What keys lose, in the logit, when s * k falls below the normal range of ``operand_dtype``: [b, r, 1]."""
    if contract.operand_dtype is None:
        return 0.0
    unit = underflow_unit(contract.operand_dtype, contract.conversion)
    lost = _over_heads(block.w.abs(), block.q.abs().sum(-1)[..., None]) * unit
    depth = gamma(block.q.shape[-1] + 2, FLOAT32_ROUNDOFF)
    for dtype in (contract.dot_dtype, contract.product_dtype):
        depth += 0.0 if dtype is None else unit_roundoff(dtype, contract.conversion) * (1 + depth)
    return lost * (1 + depth) * (1 + summing)


def _sum_roundoff(contract: Contract) -> float:
    return unit_roundoff(contract.sum_unit, contract.conversion if contract.sum_unit != torch.float32 else "nearest")


def _over_heads(weight: torch.Tensor, per_head: torch.Tensor) -> torch.Tensor:
    """sum_h weight [b, r, H] * per_head [b, r, H, S] -> [b, r, S]."""
    return (weight[..., None, :] @ per_head)[..., 0, :]


def _relu(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x > 0, x, torch.where(x.isnan(), x, 0.0))


def _tamed(x: torch.Tensor) -> torch.Tensor:
    """Non-finite values as zero."""
    return torch.where(torch.isfinite(x.to(torch.float32)), x.to(torch.float64), 0.0).to(x.dtype)

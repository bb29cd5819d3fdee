"""What may stand in a slot: intervals for scales and payload values of stored keys, by rounding schedule.

For the fused schedule in float32, in any order: with z the exact key and A its sum of absolute terms,
E = gamma(70) |z| + (1 + gamma(70)) gamma(13) A + 2^-140 (2^-117 where results may be flushed to zero). Seventy
roundings at most reach the normed value through the mean (127 of them halved by the root); thirteen the rotary step,
the seven butterflies, the last factor and the float64 evaluation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from parity.numerics import published
from parity.pages.intervals import Allowed
from parity.pages.layout import find
from reference import exact

if TYPE_CHECKING:
    from parity.domain.contract import Contract

U = 2.0**-24
LARGEST = 2.0**60  # rows beyond it are not judged: their squares leave float32
# Last places by which the inverse root can differ from the exact one: (127 + 2) / 2 through the mean, and its own.
STEPS = 70


def largest_judged(pooled: Tensor) -> Tensor:
    """bool [n]: rows that the bound covers."""
    return pooled.abs().amax(dim=1).to(torch.float64) <= LARGEST


def gamma(n: int) -> float:
    """n u / (1 - n u) for float32."""
    return n * U / (1.0 - n * U)


def bound(z: Tensor, terms: Tensor, flush: bool) -> Tensor:
    """E, float64 of z's shape; terms is A."""
    least = 2.0**-117 if flush else 2.0**-140
    return gamma(70) * z.abs() + (1.0 + gamma(70)) * gamma(13) * terms + least


def allowed_fused(
    payload: Tensor,
    scales: Tensor,
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    contract: Contract,
) -> Allowed:
    """The fused schedule's intervals against stored bytes: payload uint8 [n, bytes], scales uint8 [n, bytes]."""
    z, terms = exact.key_chain(pooled, norm_weight, eps, positions, rope_table)
    e = bound(z, terms, contract.flush_to_zero)
    found = _judge(payload, scales, z - e, z + e, contract)
    size = float(z.abs().median()) if z.numel() else 0.0
    return found._replace(resolution=float(e.median()) / size if size else None)


def allowed_published(
    payload: Tensor,
    scales: Tensor,
    pooled: Tensor,
    norm_weight: Tensor,
    eps: float,
    positions: Tensor,
    rope_table: Tensor,
    contract: Contract,
) -> Allowed:
    """The published schedule where the order of the mean is free: each row must fit one inverse root that an order of
    128 float32 additions can give. The last interval reported is that of the store's own order."""
    a = pooled.to(torch.bfloat16).to(torch.float32)
    root = published.inverse_root(published.mean_square(a), eps)
    z = published.rows_from_root(pooled, norm_weight, root, positions, rope_table).to(torch.float64)
    found = _judge(payload, scales, z, z, contract)
    wrong = found.bad.any(1) | found.bad_scale.any(1)
    for step in [sign * size for size in range(1, 2 * STEPS + 1) for sign in (1, -1)]:
        left = wrong.nonzero()[:, 0]
        if not left.numel():
            break
        moved = (root[left].view(torch.int32) + step).view(torch.float32)
        z = published.rows_from_root(pooled[left], norm_weight, moved, positions[left], rope_table).to(torch.float64)
        again = _judge(payload[left], scales[left], z, z, contract)
        wrong[left] = again.bad.any(1) | again.bad_scale.any(1)
    keep = wrong[:, None]
    return found._replace(bad=found.bad & keep, bad_scale=found.bad_scale & keep)


def _judge(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor, contract: Contract) -> Allowed:
    """Stored bytes against keys known to lie between low and high, float64 [n, 128]."""
    return find(contract.layout).allowed(payload, scales, low, high, contract.scale, contract.fake_fp4)

"""What may stand in a slot: intervals for scales and payload values of stored keys, by format and rounding schedule.

For the fused schedule in float32, in any order: with z the exact key and A its sum of absolute terms,
E = gamma(70) |z| + (1 + gamma(70)) gamma(13) A + 2^-140 (2^-117 where results may be flushed to zero). Seventy
roundings at most reach the normed value through the mean (127 of them halved by the root); thirteen the rotary step,
the seven butterflies, the last factor and the float64 evaluation.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parity.domain.contract import Contract
from parity.numerics import published
from reference import exact, formats

U = 2.0**-24
LARGEST = 2.0**60  # rows beyond it are not judged: their squares leave float32
FP8_FLOOR = float(torch.tensor(1e-4, dtype=torch.float32))
BLOCK = 32
# Last places by which the inverse root can differ from the exact one: (127 + 2) / 2 through the mean, and its own.
STEPS = 70


class Allowed(NamedTuple):
    """Wrong cells, the values found and their intervals, for the payload [n, 128] and the scales [n, 0, 1 or 4]."""

    bad: Tensor
    got: Tensor
    low: Tensor
    high: Tensor
    bad_scale: Tensor
    got_scale: Tensor
    low_scale: Tensor
    high_scale: Tensor
    resolution: float | None = None

    def lines(self) -> Iterator[tuple[str, Tensor, Tensor, Tensor, Tensor]]:
        """(name, wrong, found, low, high), the scales first: a payload is judged under the stored scale."""
        yield "scale", self.bad_scale, self.got_scale, self.low_scale, self.high_scale
        yield "value", self.bad, self.got, self.low, self.high


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
    found = _by_format(payload, scales, z - e, z + e, contract)
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
    found = _by_format(payload, scales, z, z, contract)
    wrong = found.bad.any(1) | found.bad_scale.any(1)
    for step in [sign * size for size in range(1, 2 * STEPS + 1) for sign in (1, -1)]:
        left = wrong.nonzero()[:, 0]
        if not left.numel():
            break
        moved = (root[left].view(torch.int32) + step).view(torch.float32)
        z = published.rows_from_root(pooled[left], norm_weight, moved, positions[left], rope_table).to(torch.float64)
        again = _by_format(payload[left], scales[left], z, z, contract)
        wrong[left] = again.bad.any(1) | again.bad_scale.any(1)
    keep = wrong[:, None]
    return found._replace(bad=found.bad & keep, bad_scale=found.bad_scale & keep)


def _by_format(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor, contract: Contract) -> Allowed:
    """Stored bytes against keys known to lie between low and high, float64 [n, 128]."""
    if contract.layout == "fp4":
        return _fp4(payload, scales, low, high)
    if contract.layout == "bf16":
        return _bf16(payload, low, high, contract.fake_fp4)
    if contract.fake_fp4:
        low, high = _fake(low, high)
    return _fp8(payload, scales, low, high, contract.scale)


def to_bf16(x: Tensor) -> Tensor:
    """float64 rounded once to bfloat16's grid, nearest and ties to even, as float64; overflow becomes inf."""
    binade = torch.frexp(x)[1] - 1
    binade = torch.where(x == 0, -126, binade).clamp(min=-126)
    quantum = formats.pow2(binade - 7)
    rounded = torch.round(x / quantum) * quantum
    return torch.where(rounded.abs() >= 2.0**128, torch.copysign(torch.full_like(x, torch.inf), x), rounded)


def _amax(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of the largest magnitude of the last dimension."""
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    return least.amax(-1), torch.maximum(low.abs(), high.abs()).amax(-1)


def _exponents(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest published fp4 exponent of each block, int32 [n, 4]; the rule is monotone in a float32 amax."""
    least, most = _amax(low.unflatten(1, (4, BLOCK)), high.unflatten(1, (4, BLOCK)))
    return tuple(formats.fp4_exponent(x.to(torch.float32)).to(torch.int32) for x in (least, most))  # type: ignore


def _e2m1(x: Tensor, exponents: Tensor) -> Tensor:
    """The e2m1 value nearest to x / 2^e, float64 [n, 128], with its scale put back; exponents int32 [n, 4]."""
    wide = exponents.repeat_interleave(BLOCK, 1)
    codes = formats.e2m1_encode(x * formats.pow2(-wide))
    return formats.e2m1_decode(codes).to(torch.float64) * formats.pow2(wide)


def _fake(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The interval after fp4 quantisation and back; where two exponents are possible, the hull of both."""
    first, last = _exponents(low, high)
    ends = [_e2m1(x, exponents) for x in (low, high) for exponents in (first, last)]
    return torch.minimum(ends[0], ends[1]), torch.maximum(ends[2], ends[3])


def _bf16(payload: Tensor, low: Tensor, high: Tensor, fake_fp4: bool) -> Allowed:
    got = payload.contiguous().view(torch.bfloat16).to(torch.float64)
    none = got[:, :0]
    if not fake_fp4:
        low, high = to_bf16(low), to_bf16(high)
        return Allowed(_outside(got, low, high), got, low, high, none != none, none, none, none)
    choices = []
    for exponents in _exponents(low, high):
        least, most = to_bf16(_e2m1(low, exponents)), to_bf16(_e2m1(high, exponents))
        # On the grid of this exponent, not merely between two of its values.
        bad = _outside(got, least, most) | (to_bf16(_e2m1(got, exponents)) != got)
        choices.append((bad, least, most))
    (bad, least, most), (other, _, _) = choices
    per_block = other.unflatten(1, (4, BLOCK)).any(-1).repeat_interleave(BLOCK, 1)
    return Allowed(bad & per_block, got, least, most, none != none, none, none, none)


def _fp8(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor, rule: str | None) -> Allowed:
    scale = scales.contiguous().view(torch.float32).to(torch.float64)
    least, most = _amax(low, high)
    if rule == "pow2":
        ends = [_pow2_scale(x) for x in (least, most)]
        first, last = (end[:, None] for end in ends)
        bad_scale = (scale != first) & (scale != last)
    else:
        first = (least.clamp(min=FP8_FLOOR) * (1 - 2 * U) / formats.E4M3_MAX)[:, None]
        last = (most.clamp(min=FP8_FLOOR) * (1 + 2 * U) / formats.E4M3_MAX)[:, None]
        bad_scale = _outside(scale, first, last)
    usable = torch.where(bad_scale, 1.0, scale)
    low, high = low / usable, high / usable
    slack = 0.0 if rule == "pow2" else 3 * U  # of the quotient, which is exact where the scale is a power of two
    low, high = _e4m3(low - slack * low.abs()), _e4m3(high + slack * high.abs())
    got = formats.e4m3_decode(payload).to(torch.float64)
    bad = _outside(got, low, high) & ~bad_scale  # under a wrong scale the scale is the complaint
    return Allowed(bad, got, low, high, bad_scale, scale, first, last)


def _pow2_scale(amax: Tensor) -> Tensor:
    """The published power-of-two scale of a largest magnitude; monotone, so the ends of an interval suffice."""
    return formats.fp8_pow2_scale(amax.to(torch.float32)[:, None]).to(torch.float64)


def _e4m3(x: Tensor) -> Tensor:
    return formats.e4m3_decode(formats.e4m3_encode(x)).to(torch.float64)


def _fp4(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor) -> Allowed:
    exponents = scales.to(torch.int32) - 127
    first, last = _exponents(low, high)
    bad_scale = (exponents < first) | (exponents > last)
    usable = torch.where(bad_scale, 0, exponents)
    least, most = _e2m1(low, usable), _e2m1(high, usable)
    values = formats.e2m1_decode(formats.e2m1_unpack(payload)).to(torch.float64)
    got = values * formats.pow2(usable.repeat_interleave(BLOCK, 1))
    bad = _outside(got, least, most) & ~bad_scale.repeat_interleave(BLOCK, 1)
    return Allowed(bad, got, least, most, bad_scale, exponents, first, last)


def _outside(got: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """NaN is outside of everything."""
    return ~((got >= low) & (got <= high))

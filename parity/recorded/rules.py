"""The comparisons of recorded tensors: bits, one rounding of a float64 interval, reachable keys, top-k by value.

No rule has a budget. Where the published order of summation is free, a value must be what one rounding makes of some
number within the proved distance of the float64 result; rounding is monotone, so that is an interval test.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from reference import exact, formats, rope
from reference.hadamard import hadamard

UNIT = 2.0**-24
NORM_STEPS = 72
"""Roundings in RMSNorm, in units: 128 for the mean (product and sums) and 1 for eps, both halved by the root; 4 for a
reciprocal root within two last places; 2 products; rounded up."""
_EXP_STEPS = 4  # exp within two last places
# How far the search for a reachable key goes: it can fail to find one, never accept an unreachable one.
_CANDIDATES = 512
_NORM_CANDIDATES = 64
_SEARCHED_ROWS = 32


class Judged(NamedTuple):
    """Counts of one comparison: values, those that differ from the float64 (or published) result, those not allowed."""

    values: int
    differing: int
    rejected: int
    detail: str = ""


class Approximate(NamedTuple):
    """A float64 result and the proved distance within which any order of float32 arithmetic stays."""

    value: Tensor
    error: Tensor


def gamma(steps: Tensor | float) -> Tensor:
    """Relative error of `steps` float32 roundings, n u / (1 - n u)."""
    n = torch.as_tensor(steps, dtype=torch.float64) * UNIT
    return n / (1 - n)


def bits(got: Tensor, wanted: Tensor) -> Judged:
    """The same bits, signs of zero included; NaN equals NaN."""
    _same(got, wanted)
    wrong = _differs(got, wanted)
    return _judged(got, wanted, wrong, wrong)


def interval(got: Tensor, result: Approximate) -> Judged:
    """RN(value - error) <= got <= RN(value + error); `differing` counts values other than RN(value)."""
    nearest = formats.round_to(result.value, got.dtype)
    _same(got, nearest)
    low = formats.round_to(result.value - result.error, got.dtype)
    high = formats.round_to(result.value + result.error, got.dtype)
    return _judged(got, nearest, got != nearest, ~((low <= got) & (got <= high)))


def matmul(x: Tensor, weight: Tensor, steps: float | None = None) -> Approximate:
    """x [..., K] times weight [N, K] transposed, of operands as stored; K float32 steps by default."""
    wide_x, wide_w = exact.widen(x), exact.widen(weight).t()
    error = gamma(x.shape[-1] if steps is None else steps) * (wide_x.abs() @ wide_w.abs())
    return Approximate(wide_x @ wide_w, error)


def pool(kv: Approximate, score: Approximate) -> Approximate:
    """Softmax pooling over 8 slots [..., 8, 128], from approximate projections (error 0 where they were recorded).

    A slot's weight carries, in units of float32 roundings: its exponent's argument d = max - score (one rounding of d),
    exp, the same for the sum of the weights, 7 additions and a division there, one product and 8 additions here. A
    score wrong by b multiplies a weight by at most e^(2 b).
    """
    top = score.value.amax(dim=-2, keepdim=True)
    worst = torch.where(torch.isinf(score.value), 0.0, score.error).amax(dim=-2, keepdim=True)
    depth = torch.where(torch.isinf(score.value), 0.0, top - score.value) + 2 * worst
    weight = torch.softmax(score.value, dim=-2)
    steps = depth + _EXP_STEPS + (weight * (depth + _EXP_STEPS)).sum(dim=-2, keepdim=True) + 17
    grow = torch.exp(2 * worst) * (1 + gamma(steps))
    terms = kv.value.abs() * weight * (grow - 1) + kv.error * weight * grow
    tiny = (kv.value.abs().sum(dim=-2) + 1) * 2.0**-122  # weights below float32's normal range
    return Approximate((kv.value * weight).sum(dim=-2), terms.sum(dim=-2) + tiny)


def norm(pooled: Tensor, weight: Tensor, eps: float) -> Approximate:
    """RMSNorm of bfloat16 [..., 128] in float64, and the distance of any float32 order."""
    wide = exact.widen(pooled)
    value = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps) * exact.widen(weight)
    return Approximate(value, gamma(NORM_STEPS) * value.abs() + 2.0**-140)


def rotated(got: Tensor, x: Tensor, rows: Tensor) -> Judged:
    """The bits of the published rotation by this machine's table, whose own last place is free where it differs."""
    wanted = rope.rotate(x, rows)
    _same(got, wanted)
    differs = _differs(got, wanted)
    rejected = differs
    if bool(differs.any()):
        up, down = (torch.nextafter(rows, torch.full_like(rows, end)) for end in (2.0, -2.0))
        for cos, sin in itertools.product((rows, up, down), repeat=2):
            other = torch.stack((cos[..., 0::2], sin[..., 1::2]), dim=-1).flatten(-2)
            rejected = rejected & _differs(got, rope.rotate(x, other))
    return _judged(got, wanted, differs, rejected)


class KeyChain(NamedTuple):
    """What follows the pooling: norm weight and eps, the keys' positions int64 [n] and the rotary table."""

    norm_weight: Tensor
    eps: float
    positions: Tensor
    table: Tensor


def keys(got: Tensor, got_exponents: Tensor | None, pooled: Approximate, chain: KeyChain) -> tuple[Judged, Judged]:
    """Stored keys [n, 128] and exponents [n, 4] (or None), judged from pooled values: what follows is not recorded.

    A row must come out, bit for bit, of pooled and normed values that their intervals allow. The float64 values are
    tried first, then other roundings of one, two .. of them, up to a fixed number of candidates.
    """
    nearest = formats.round_to(pooled.value, torch.bfloat16)
    normed = formats.round_to(norm(nearest, chain.norm_weight, chain.eps).value, torch.bfloat16)
    fp4, exponents = formats.fp4_quantise(hadamard(rope.apply_rope(normed, chain.positions, chain.table)))
    judge_exponents = got_exponents is not None
    if got_exponents is None:
        got_exponents = exponents
    _same(got, fp4)
    _same(got_exponents, exponents)
    differs, differs_exp = _differs(got, fp4), got_exponents != exponents
    reached = ~(differs.any(dim=-1) | differs_exp.any(dim=-1))
    for row in (~reached).nonzero().flatten().tolist()[:_SEARCHED_ROWS]:
        candidates = _roundings(pooled.value[row], pooled.error[row], _CANDIDATES)
        for candidate in candidates:
            around = norm(candidate, chain.norm_weight, chain.eps)
            tries = torch.stack(_roundings(around.value, around.error, _NORM_CANDIDATES))
            position = chain.positions[row].expand(tries.shape[0])
            values, powers = formats.fp4_quantise(hadamard(rope.apply_rope(tries, position, chain.table)))
            same = ~_differs(got[row].expand_as(values), values).any(dim=-1)
            if judge_exponents:
                same &= (got_exponents[row] == powers).all(dim=-1)
            if bool(same.any()):
                reached[row] = True
                break
    lost = ~reached[:, None]
    return _judged(got, fp4, differs, differs & lost), _judged(
        got_exponents, exponents, differs_exp, differs_exp & lost
    )


def topk(got: Tensor, masked: Tensor, limits: Tensor, k: int) -> Judged:
    """Selections int32 [..., R, width] by value, from the recorded scores [..., R, T] and visible counts [R].

    A row is right iff it holds min(k, limit) distinct positions below its limit, best first, then only -1, and no key
    left out scores higher than one picked. `differing` counts entries other than torch.topk's, which may be ties.
    """
    total = masked.shape[-1]
    if got.shape[:-1] != masked.shape[:-1] or got.shape[-1] != min(k, total):
        raise ValueError(f"has shape {list(got.shape)}, expected {[*masked.shape[:-1], min(k, total)]}")
    limits = limits.expand(masked.shape[:-1])
    order = torch.arange(got.shape[-1])
    count = limits.clamp_max(got.shape[-1])[..., None]
    valid = (got >= 0) & (got < limits[..., None])
    placed = torch.where(order < count, valid, got == -1)
    safe = got.clamp(0, max(total - 1, 0)).long()
    if total:
        score = masked.to(torch.float64).gather(-1, safe)
        hits = torch.zeros(masked.shape, dtype=torch.int32).scatter_add_(-1, safe, (valid & (order < count)).int())
        twice = hits.gather(-1, safe) > 1
        best = masked.to(torch.float64).where(hits == 0, -torch.inf).amax(dim=-1, keepdim=True)
        descending = torch.cat(
            (torch.ones_like(score[..., :1], dtype=torch.bool), score[..., 1:] <= score[..., :-1]), -1
        )
        inside = order < count
        right = placed & (~inside | (~twice & (score >= best) & descending))
        usual = torch.where(inside, masked.topk(got.shape[-1], dim=-1).indices, -1).to(got.dtype)
    else:
        right, usual = placed, got
    return _judged(got, usual, got != usual, ~right)


def _roundings(value: Tensor, error: Tensor, limit: int) -> list[Tensor]:
    """bfloat16 rows that value [128] may round to within its error: the nearest first, then more and more others."""
    nearest = formats.round_to(value, torch.bfloat16)
    low, high = (formats.round_to(value + sign * error, torch.bfloat16) for sign in (-1, 1))
    others: list[tuple[int, Tensor]] = []
    for channel in (low != high).nonzero().flatten().tolist():
        step = low[channel]
        while bool(step <= high[channel]) and len(others) < limit:
            if bool(step != nearest[channel]):
                others.append((channel, step))
            step = torch.nextafter(step, torch.full_like(step, torch.inf))
    found = [nearest]
    for size in range(1, len(others) + 1):
        for chosen in itertools.combinations(others, size):
            if len({channel for channel, _ in chosen}) < size:
                continue
            row = nearest.clone()
            for channel, other in chosen:
                row[channel] = other
            found.append(row)
            if len(found) >= limit:
                return found
    return found


def _differs(got: Tensor, wanted: Tensor) -> Tensor:
    if not got.is_floating_point():
        return got != wanted
    integer = torch.int16 if got.element_size() == 2 else torch.int32
    same = got.contiguous().view(integer) == wanted.contiguous().view(integer)
    return ~(same | (torch.isnan(got) & torch.isnan(wanted)))


def _same(got: Tensor, wanted: Tensor) -> None:
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise ValueError(
            f"is {got.dtype} {list(got.shape)}, expected {wanted.dtype} {list(wanted.shape)} from its recorded input"
        )


def _judged(got: Tensor, wanted: Tensor, differs: Tensor, rejected: Tensor) -> Judged:
    detail = ""
    if bool(rejected.any()):
        where = tuple(rejected.nonzero()[0].tolist())
        detail = f"first at {list(where)}: got {got[where].item()}, wanted {wanted[where].item()}"
    return Judged(got.numel(), int(differs.sum()), int(rejected.sum()), detail)

"""Numbers of which only an interval is known, through the roundings of the layouts; all in float64.

A store is judged by them: its exact key is known up to the error of a float32 evaluation, and every rounding is
monotone, so that the ends of an interval give the ends of what may be stored.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from parity.pages.keys import BLOCK
from reference import formats


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


def outside(got: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """bool, cell by cell; NaN is outside of everything."""
    return ~((got >= low) & (got <= high))


def amax(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The interval of the largest magnitude of the last dimension."""
    least = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    return least.amax(-1), torch.maximum(low.abs(), high.abs()).amax(-1)


def to_bf16(x: Tensor) -> Tensor:
    """Rounded once to bfloat16's grid, nearest and ties to even; overflow becomes inf."""
    binade = torch.frexp(x)[1] - 1
    binade = torch.where(x == 0, -126, binade).clamp(min=-126)
    quantum = formats.pow2(binade - 7)
    rounded = torch.round(x / quantum) * quantum
    return torch.where(rounded.abs() >= 2.0**128, torch.copysign(torch.full_like(x, torch.inf), x), rounded)


def fp4_exponents(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Least and largest published fp4 exponent of each block of keys [n, 128], int32 [n, 4]; the rule is monotone in a
    float32 amax."""
    least, most = amax(low.unflatten(1, (4, BLOCK)), high.unflatten(1, (4, BLOCK)))
    return tuple(formats.fp4_exponent(x.to(torch.float32)).to(torch.int32) for x in (least, most))  # type: ignore


def on_fp4_grid(x: Tensor, exponents: Tensor) -> Tensor:
    """The e2m1 values nearest to x / 2^e [n, 128], with their scales put back; exponents int32 [n, 4]."""
    wide = exponents.repeat_interleave(BLOCK, 1)
    codes = formats.e2m1_encode(x * formats.pow2(-wide))
    return formats.e2m1_decode(codes).to(torch.float64) * formats.pow2(wide)


def through_fp4(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The interval after fp4 quantisation and back; where two exponents are possible, the hull of both."""
    first, last = fp4_exponents(low, high)
    ends = [on_fp4_grid(x, exponents) for x in (low, high) for exponents in (first, last)]
    return torch.minimum(ends[0], ends[1]), torch.maximum(ends[2], ends[3])

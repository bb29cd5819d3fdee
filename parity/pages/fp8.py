"""The fp8 layout: 128 e4m3 numbers and one float32 scale per slot."""

import numpy as np
import torch
from torch import Tensor

from parity.pages import elements, intervals
from parity.pages.counter import field
from parity.pages.intervals import Allowed
from parity.pages.keys import Drawn, Keys, power_of_two
from parity.pages.layout import Layout
from reference import formats, pages

U = 2.0**-24
FLOOR = float(torch.tensor(formats.FP8_AMAX_FLOOR, dtype=torch.float32))
ZERO_SCALE = float(np.float32(formats.FP8_AMAX_FLOOR) / np.float32(formats.E4M3_MAX))  # a store's, of a key of zeros


def _finish(drawn: Drawn) -> Keys:
    codes, words = drawn.codes, drawn.words
    exponents = drawn.scale_exponents()
    scales = power_of_two(exponents)
    if drawn.kind.scale == "real":  # 24 significant bits; payload fills the range, so the scale carries the magnitude
        mantissa = field(words, 16, 23).to(torch.int32)
        scales = (power_of_two(exponents - elements.E4M3.shift).view(torch.int32) | mantissa).view(torch.float32)
    if drawn.empty is not None:
        scales = scales.masked_fill(drawn.empty, ZERO_SCALE)
    if drawn.spoiled is not None:
        codes.masked_fill_(drawn.spoil_element(0) | drawn.spoil_element(3), 0x7F)
        scales = scales.masked_fill(drawn.spoil(1), float("nan")).masked_fill(drawn.spoil(2), float("inf"))
    return Keys(codes, scales)


def _encode(z: Tensor, rule: str, fake: bool) -> tuple[Tensor, Tensor | None]:
    """e4m3 of f32(z * f32(1 / scale))."""
    if fake:
        z = formats.fp4_quantise(z)[0]
    wide = z.to(torch.float32)
    factor = _SCALES[rule](wide)
    inverse = torch.from_numpy(np.float32(1.0) / factor.cpu().numpy()).to(factor.device)
    payload = formats.e4m3_encode(wide * inverse[:, None])
    return payload, factor.contiguous()[:, None].view(torch.uint8)


def _allowed(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor, rule: str, fake: bool) -> Allowed:
    if fake:
        low, high = intervals.through_fp4(low, high)
    scale = scales.contiguous().view(torch.float32).to(torch.float64)
    bad_scale, first, last, slack = _ALLOWED[rule](scale, *intervals.amax(low, high))
    usable = torch.where(bad_scale, 1.0, scale)
    low, high = low / usable, high / usable
    low, high = _e4m3(low - slack * low.abs()), _e4m3(high + slack * high.abs())
    got = formats.e4m3_decode(payload).to(torch.float64)
    bad = intervals.outside(got, low, high) & ~bad_scale  # under a wrong scale the scale is the complaint
    return Allowed(bad, got, low, high, bad_scale, scale, first, last)


def _amax_scales(scale: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """(wrong, lowest, highest) of stored scales [n, 1], and the relative error of the quotient by such a scale."""
    first = (least.clamp(min=FLOOR) * (1 - 2 * U) / formats.E4M3_MAX)[:, None]
    last = (most.clamp(min=FLOOR) * (1 + 2 * U) / formats.E4M3_MAX)[:, None]
    return intervals.outside(scale, first, last), first, last, 3 * U


def _pow2_scales(scale: Tensor, least: Tensor, most: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """The same; the rule is monotone, so the ends of an interval suffice, and division by a power of two is exact."""
    ends = (formats.fp8_pow2_scale(x.to(torch.float32)[:, None]) for x in (least, most))
    ends = (formats.fp8_pow2_scale(x.to(torch.float32)[:, None]) for x in (least, most))
    first, last = (end.to(torch.float64)[:, None] for end in ends)
    return (scale != first) & (scale != last), first, last, 0.0


def _e4m3(x: Tensor) -> Tensor:
    return formats.e4m3_decode(formats.e4m3_encode(x)).to(torch.float64)


_SCALES = {"amax": formats.fp8_amax_scale, "pow2": formats.fp8_pow2_scale}
_ALLOWED = {"amax": _amax_scales, "pow2": _pow2_scales}

FP8 = Layout(
    name="fp8",
    about="128 e4m3 numbers and a float32 scale, 132 bytes per slot",
    element=elements.E4M3,
    query=elements.E4M3,
    payload=128,
    scale=4,
    scale_rules=tuple(_SCALES),
    finish=_finish,
    read=lambda kv_cache, slots: pages.read_keys(kv_cache, "fp8", slots),
    encode=_encode,
    allowed=_allowed,
    core="sm_90 e4m3",
    core_by_default=True,
)

"""The fp4 layout: 128 e2m1 numbers, two per byte, and four ue8m0 scales per slot, one for each block of 32 channels."""

import torch
from torch import Tensor

from parity.pages import elements, intervals
from parity.pages.intervals import Allowed
from parity.pages.keys import BLOCK, Drawn, Keys
from parity.pages.layout import Layout
from reference import formats, pages


def _finish(drawn: Drawn) -> Keys:
    exponents = drawn.scale_exponents().unsqueeze(-1) + drawn.block_steps() * (drawn.kind.scale != "slot")
    scales = (exponents + 127).to(torch.uint8)
    if drawn.spoiled is not None:
        scales[..., 1].masked_fill_(drawn.spoiled, 0xFF)
    return Keys(formats.e2m1_pack(drawn.codes), scales)


def _encode(z: Tensor, rule: str, fake: bool) -> tuple[Tensor, Tensor | None]:
    codes, exponents = formats.fp4_encode(z)
    return formats.e2m1_pack(codes), formats.ue8m0_encode(exponents)


def _allowed(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor, rule: str, fake: bool) -> Allowed:
    exponents = scales.to(torch.int32) - 127
    first, last = intervals.fp4_exponents(low, high)
    bad_scale = (exponents < first) | (exponents > last)
    usable = torch.where(bad_scale, 0, exponents)
    least, most = intervals.on_fp4_grid(low, usable), intervals.on_fp4_grid(high, usable)
    values = formats.e2m1_decode(formats.e2m1_unpack(payload)).to(torch.float64)
    got = values * formats.pow2(usable.repeat_interleave(BLOCK, 1))
    bad = intervals.outside(got, least, most) & ~bad_scale.repeat_interleave(BLOCK, 1)
    return Allowed(bad, got, least, most, bad_scale, exponents, first, last)


FP4 = Layout(
    name="fp4",
    about="128 e2m1 numbers and four ue8m0 scales, 68 bytes per slot",
    element=elements.E2M1,
    query=elements.BF16,
    payload=64,
    scale=4,
    neutral=127,
    poison_scale={"huge": 0xFC},  # 2^125: six times it is still finite in float32
    fake_fp4=False,  # its pages hold the fp4 values
    finish=_finish,
    read=lambda kv_cache, slots: pages.read_keys(kv_cache, "fp4", slots),
    encode=_encode,
    allowed=_allowed,
)

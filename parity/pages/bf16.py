"""The bf16 layout: 128 bf16 numbers per slot, no scales."""

import torch
from torch import Tensor

from parity.pages import elements, intervals
from parity.pages.intervals import Allowed
from parity.pages.keys import BLOCK, Drawn, Keys
from parity.pages.layout import Layout
from reference import formats, pages

NONFINITE = (0x7FC0, 0x7F80, -0x80, -0x40)  # NaN, inf, -inf, NaN


def _finish(drawn: Drawn) -> Keys:
    codes, kind = drawn.codes, drawn.kind
    if kind.k_octaves[1] or drawn.lift:
        exponents = drawn.octaves().unsqueeze(-1)
        if kind.k == "grid":  # one exponent per block, as fake quantisation leaves them
            exponents = (drawn.block_steps() + kind.k_octaves[0] + drawn.lift).repeat_interleave(BLOCK, -1)
        elements.bf16_times(codes, exponents)
    if drawn.spoiled is not None:
        for which, pattern in enumerate(NONFINITE):
            codes.masked_fill_(drawn.spoil_element(which), pattern)
    return Keys(codes, None)


def _encode(z: Tensor, rule: str, fake: bool) -> tuple[Tensor, Tensor | None]:
    if fake:
        z = formats.fp4_quantise(z)[0]
    return z.to(torch.bfloat16).contiguous().view(torch.uint8), None


def _allowed(payload: Tensor, scales: Tensor, low: Tensor, high: Tensor, rule: str, fake: bool) -> Allowed:
    got = payload.contiguous().view(torch.bfloat16).to(torch.float64)
    none = got[:, :0]
    if not fake:
        low, high = intervals.to_bf16(low), intervals.to_bf16(high)
        return Allowed(intervals.outside(got, low, high), got, low, high, none != none, none, none, none)
    choices = []
    for exponents in intervals.fp4_exponents(low, high):
        least, most = (intervals.to_bf16(intervals.on_fp4_grid(x, exponents)) for x in (low, high))
        # On the grid of this exponent, not merely between two of its values.
        off = intervals.to_bf16(intervals.on_fp4_grid(got, exponents)) != got
        choices.append((intervals.outside(got, least, most) | off, least, most))
    (bad, least, most), (other, _, _) = choices
    per_block = other.unflatten(1, (4, BLOCK)).any(-1).repeat_interleave(BLOCK, 1)
    return Allowed(bad & per_block, got, least, most, none != none, none, none, none)


BF16 = Layout(
    name="bf16",
    about="128 bf16 numbers, 256 bytes per slot",
    element=elements.BF16,
    query=elements.BF16,
    payload=256,
    cache_dtype=torch.bfloat16,
    finish=_finish,
    read=lambda kv_cache, slots: pages.read_keys(kv_cache, "bf16", slots),
    encode=_encode,
    allowed=_allowed,
    core="sm_90 bf16",
)

"""Faults of quantisation: scales, ranges, roundings and codes."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.store.faults import staged as ok
from parity.ops.store.faults.chain import rounded
from reference import formats

MODELS, fault = collector("store")
PUBLISHED: dict[str, Any] = {"schedule": "published"}
bf16, fp8, fp4 = fault, partial(fault, layout="fp8"), partial(fault, layout="fp4")
pow2, pow2_published = partial(fp8, contract={"scale": "pow2"}), partial(fp8, contract=PUBLISHED | {"scale": "pow2"})
fp4_published = partial(fp4, contract=PUBLISHED)
fake = partial(bf16, contract=PUBLISHED | {"fake_fp4": True})


def bits(x: Tensor, dropped: int) -> Tensor:
    return (x.contiguous().view(torch.int32) & -(1 << dropped)).view(torch.float32)


def toward_zero(x: Tensor) -> Tensor:
    """e4m3 by truncation of the significand (normal numbers) or of the multiple of 2^-9."""
    x = x.clamp(-448, 448)
    return formats.e4m3_encode(torch.where(x.abs() >= 2.0**-6, bits(x, 20), (x * 512).trunc() / 512))


def half_away(x: Tensor) -> Tensor:
    """e4m3 with ties away from zero: a tie is pushed over."""
    nudged = (x.contiguous().view(torch.int32) + 1).view(torch.float32)
    return formats.e4m3_encode(torch.where(bits(x, 19) == x, nudged, x))


def half_down(x: Tensor) -> Tensor:
    """e2m1 codes with ties toward zero."""
    lower = x.abs() * (1 - 2.0**-20)
    return formats.e2m1_pack(formats.e2m1_encode(torch.copysign(lower, x)))


# -------------------------------------------------------------------------------------------------------------- quant
fp8(
    "quant-no-floor (quant, padding): the largest magnitude has no floor, so a zero row is 0 / 0 "
    "[huggingface/kernels-community#680]"
).by(scale=lambda c, top: top / 448)
fp8(
    "quant-pow2-for-float (quant, precision): the scale is rounded up to a power of two where float32 is meant "
    "[ROCm/aiter#3451, sgl-project/sglang#32839]"
).by(scale=lambda c, top: formats.fp8_pow2_scale(top[..., None]))
pow2(
    "quant-float-for-pow2 (quant, precision): the scale is float32 where a power of two is meant "
    "[ROCm/aiter#3451, sgl-project/sglang#32839]"
).by(scale=lambda c, top: formats.fp8_amax_scale(top[..., None]))
fp8(
    "quant-range-240 (quant, precision): the range of the other fp8 flavour, 240, is used "
    "[sgl-project/sglang#28455, sgl-project/sglang#39628]"
).by(scale=lambda c, top: top.clamp_min(1e-4) / 240)
fp8(
    "quant-no-clamp (quant, precision): "
    "the scale is rounded down, and values past 448 become NaN because nothing clamps them [sgl-project/sglang#28455]"
).by(
    scale=lambda c, top: bits(ok.scale(c, top), 16),
    codes=lambda c, x: torch.where(x.abs() > 464, 0x7F, ok.codes(c, x)).to(torch.uint8),
)
fp8("quant-scale-bf16 (quant, precision): the scale is rounded to bf16").by(
    scale=lambda c, top: rounded(ok.scale(c, top))
)
fp8("quant-scale-mismatch (quant, precision): values are divided by a bf16 copy of the scale that is stored").by(
    scaled=lambda c, z, s: ok.scaled(c, z, rounded(s))
)
fp8("quant-scale-inverse (quant, bytes): the reciprocal of the scale is stored").by(
    scale_bytes=lambda c, s: ok.scale_bytes(c, 1.0 / s)
)
fp8("quant-scale-of-half (quant, formula): the largest magnitude is that of the first 64 channels").by(
    amax=lambda c, z: ok.amax(c, torch.cat((z[:, :64], z[:, :64]), 1))
)
fp8("quant-signed-maximum (quant, formula): the largest value stands for the largest magnitude").by(
    amax=lambda c, z: z.amax(1, keepdim=True)
)
fp8("quant-scale-of-batch (quant, rows): all tokens share the largest magnitude of the batch").by(
    amax=lambda c, z: ok.amax(c, z).amax().expand(len(z), 1).contiguous()
)
fp8("quant-scale-row-0 (quant, rows): all tokens take the first one's scale").by(
    scale=lambda c, top: ok.scale(c, top[:1].expand_as(top).contiguous())
)
fp8("quant-truncated (quant, precision): values are truncated to e4m3 instead of rounded").by(
    codes=lambda c, x: toward_zero(x)
)
pow2_published("quant-ties-away (quant, precision): ties of e4m3 go away from zero").by(codes=lambda c, x: half_away(x))
fp8("quant-subnormals-flushed (quant, precision): subnormal e4m3 values become zero").by(
    codes=lambda c, x: ok.codes(c, torch.where(x.abs() < 2.0**-6, 0.0, x))
)
fp8("quant-e5m2 (quant, bytes): values are stored as e5m2").by(
    codes=lambda c, x: x.to(torch.float8_e5m2).view(torch.uint8)
)
fp8(
    "quant-floor-after-division (quant, precision): the floor 1e-4 is applied to the scale instead of the magnitude"
).by(scale=lambda c, top: (top / 448).clamp_min(1e-4))
bf16("bf16-truncated (quant, precision): bf16 keys are truncated instead of rounded").by(
    codes=lambda c, x: ok.codes(c, bits(x, 16))
)
fp4_published("fp4-ties-down (quant, precision): ties of the fp4 grid go toward zero").by(
    codes=lambda c, x: half_down(x)
)
fp4("fp4-exponent-rounded-down (quant, precision): the block exponent is floor(log2(amax / 6))").by(
    scale=lambda c, top: ok.scale(c, top) * 0.5
)
fp4("fp4-floor (quant, precision): the block's magnitude has the floor of the fp8 rule, 1e-4").by(
    scale=lambda c, top: ok.scale(c, top.clamp_min(1e-4))
)
fp4("fp4-nibbles-swapped (quant, bytes): the even channel stands in the high nibble").by(
    codes=lambda c, x: (ok.codes(c, x) << 4) | (ok.codes(c, x) >> 4)
)
fp4("fp4-blocks-of-64 (quant, formula): two blocks of 32 share their exponent").by(
    amax=lambda c, z: z.abs().unflatten(1, (2, 64)).amax(-1).repeat_interleave(2, 1)
)
fp4("fp4-scale-bias-128 (quant, bytes): scale bytes have a bias of 128").by(
    scale_bytes=lambda c, s: ok.scale_bytes(c, s) + 1
)
fp4("fp4-scales-reversed (quant, bytes): the four scale bytes of a key are stored backwards").by(
    scale_bytes=lambda c, s: ok.scale_bytes(c, s).flip(1)
)
fake("fp4-step-missing (quant, formula): the fp4 step of the published code is left out").by(fake=lambda c, z: z)

"""Faults of quantisation: scales, ranges, roundings and codes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.store.faults import staged as ok
from parity.ops.store.faults.chain import rounded
from reference import formats

MODELS, add = collector("store")
FP8: dict[str, Any] = {"layout": "fp8"}
POW2: dict[str, Any] = {"layout": "fp8", "extra": {"contract": {"scale": "pow2"}}}
FP4: dict[str, Any] = {"layout": "fp4"}
FP4_PUBLISHED: dict[str, Any] = {"layout": "fp4", "extra": {"contract": {"schedule": "published"}}}
FAKE: dict[str, Any] = {"layout": "bf16", "extra": {"contract": {"schedule": "published", "fake_fp4": True}}}


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
add(
    "quant-no-floor",
    "quant",
    "padding",
    "the largest magnitude has no floor, so a zero row is 0 / 0",
    "huggingface/kernels-community#680",
    scale=lambda c, top: top / 448,
    **FP8,
)
add(
    "quant-pow2-for-float",
    "quant",
    "precision",
    "the scale is rounded up to a power of two where float32 is meant",
    "ROCm/aiter#3451, sgl-project/sglang#32839",
    scale=lambda c, top: formats.fp8_pow2_scale(top[..., None]),
    **FP8,
)
add(
    "quant-float-for-pow2",
    "quant",
    "precision",
    "the scale is float32 where a power of two is meant",
    "ROCm/aiter#3451, sgl-project/sglang#32839",
    scale=lambda c, top: formats.fp8_amax_scale(top[..., None]),
    **POW2,
)
add(
    "quant-range-240",
    "quant",
    "precision",
    "the range of the other fp8 flavour, 240, is used",
    "sgl-project/sglang#28455, sgl-project/sglang#39628",
    scale=lambda c, top: top.clamp_min(1e-4) / 240,
    **FP8,
)
add(
    "quant-no-clamp",
    "quant",
    "precision",
    "the scale is rounded down, and values past 448 become NaN because nothing clamps them",
    "sgl-project/sglang#28455",
    scale=lambda c, top: bits(ok.scale(c, top), 16),
    codes=lambda c, x: torch.where(x.abs() > 464, 0x7F, ok.codes(c, x)).to(torch.uint8),
    **FP8,
)
add(
    "quant-scale-bf16",
    "quant",
    "precision",
    "the scale is rounded to bf16",
    scale=lambda c, top: rounded(ok.scale(c, top)),
    **FP8,
)
add(
    "quant-scale-mismatch",
    "quant",
    "precision",
    "values are divided by a bf16 copy of the scale that is stored",
    scaled=lambda c, z, s: ok.scaled(c, z, rounded(s)),
    **FP8,
)
add(
    "quant-scale-inverse",
    "quant",
    "bytes",
    "the reciprocal of the scale is stored",
    scale_bytes=lambda c, s: ok.scale_bytes(c, 1.0 / s),
    **FP8,
)
add(
    "quant-scale-of-half",
    "quant",
    "formula",
    "the largest magnitude is that of the first 64 channels",
    amax=lambda c, z: ok.amax(c, torch.cat((z[:, :64], z[:, :64]), 1)),
    **FP8,
)
add(
    "quant-signed-maximum",
    "quant",
    "formula",
    "the largest value stands for the largest magnitude",
    amax=lambda c, z: z.amax(1, keepdim=True),
    **FP8,
)
add(
    "quant-scale-of-batch",
    "quant",
    "rows",
    "all tokens share the largest magnitude of the batch",
    amax=lambda c, z: ok.amax(c, z).amax().expand(len(z), 1).contiguous(),
    **FP8,
)
add(
    "quant-scale-row-0",
    "quant",
    "rows",
    "all tokens take the first one's scale",
    scale=lambda c, top: ok.scale(c, top[:1].expand_as(top).contiguous()),
    **FP8,
)
add(
    "quant-truncated",
    "quant",
    "precision",
    "values are truncated to e4m3 instead of rounded",
    codes=lambda c, x: toward_zero(x),
    **FP8,
)
add(
    "quant-ties-away",
    "quant",
    "precision",
    "ties of e4m3 go away from zero",
    codes=lambda c, x: half_away(x),
    layout="fp8",
    extra={"contract": {"schedule": "published", "scale": "pow2"}},
)
add(
    "quant-subnormals-flushed",
    "quant",
    "precision",
    "subnormal e4m3 values become zero",
    codes=lambda c, x: ok.codes(c, torch.where(x.abs() < 2.0**-6, 0.0, x)),
    **FP8,
)
add(
    "quant-e5m2",
    "quant",
    "bytes",
    "values are stored as e5m2",
    codes=lambda c, x: x.to(torch.float8_e5m2).view(torch.uint8),
    **FP8,
)
add(
    "quant-floor-after-division",
    "quant",
    "precision",
    "the floor 1e-4 is applied to the scale instead of the magnitude",
    scale=lambda c, top: (top / 448).clamp_min(1e-4),
    **FP8,
)
add(
    "bf16-truncated",
    "quant",
    "precision",
    "bf16 keys are truncated instead of rounded",
    codes=lambda c, x: ok.codes(c, bits(x, 16)),
    layout="bf16",
)
add(
    "fp4-ties-down",
    "quant",
    "precision",
    "ties of the fp4 grid go toward zero",
    codes=lambda c, x: half_down(x),
    **FP4_PUBLISHED,
)
add(
    "fp4-exponent-rounded-down",
    "quant",
    "precision",
    "the block exponent is floor(log2(amax / 6))",
    scale=lambda c, top: ok.scale(c, top) * 0.5,
    **FP4,
)
add(
    "fp4-floor",
    "quant",
    "precision",
    "the block's magnitude has the floor of the fp8 rule, 1e-4",
    scale=lambda c, top: ok.scale(c, top.clamp_min(1e-4)),
    **FP4,
)
add(
    "fp4-nibbles-swapped",
    "quant",
    "bytes",
    "the even channel stands in the high nibble",
    codes=lambda c, x: (ok.codes(c, x) << 4) | (ok.codes(c, x) >> 4),
    **FP4,
)
add(
    "fp4-blocks-of-64",
    "quant",
    "formula",
    "two blocks of 32 share their exponent",
    amax=lambda c, z: z.abs().unflatten(1, (2, 64)).amax(-1).repeat_interleave(2, 1),
    **FP4,
)
add(
    "fp4-scale-bias-128",
    "quant",
    "bytes",
    "scale bytes have a bias of 128",
    scale_bytes=lambda c, s: ok.scale_bytes(c, s) + 1,
    **FP4,
)
add(
    "fp4-scales-reversed",
    "quant",
    "bytes",
    "the four scale bytes of a key are stored backwards",
    scale_bytes=lambda c, s: ok.scale_bytes(c, s).flip(1),
    **FP4,
)
add(
    "fp4-step-missing",
    "quant",
    "formula",
    "the fp4 step of the published code is left out",
    fake=lambda c, z: z,
    **FAKE,
)

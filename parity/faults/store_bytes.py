"""Faults of quantisation and of where the bytes of a stored key go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parity.faults import staged_store as ok
from parity.faults.model import Function, collector
from parity.faults.staged_store import PAGE, PAYLOAD, Call
from parity.faults.store_models import rounded
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

# ------------------------------------------------------------------------------------------------------- store layout
add(
    "store-rows-of-132-bytes",
    "store-layout",
    "bytes",
    "slots are written as 128 bytes of payload and 4 of scale side by side",
    "vllm-project/vllm#50576, vllm-project/vllm#51555",
    payload_place=lambda c, slot: slot // PAGE * c.stride + slot % PAGE * 132,
    scale_place=lambda c, slot: slot // PAGE * c.stride + slot % PAGE * 132 + 128,
    **FP8,
)
add(
    "store-scale-page-0",
    "store-layout",
    "bytes",
    "scales go to page 0's footer",
    "ROCm/ATOM#1466",
    scale_place=lambda c, slot: ok.scale_place(c, slot % PAGE),
    **FP8,
)
add(
    "store-tiled-16x16",
    "store-layout",
    "bytes",
    "values are written in 16 by 16 tiles, and read back linearly",
    "vllm-project/vllm#52109",
    write=lambda c, slot, payload, scales, places: _tiled(c, slot, payload, scales, places),
    **FP8,
)
add(
    "store-scale-neighbour",
    "store-layout",
    "bytes",
    "each scale goes to the next slot's place",
    scale_place=lambda c, slot: ok.scale_place(c, slot // PAGE * PAGE + (slot + 1) % PAGE),
    **FP8,
)
add(
    "store-scales-in-front",
    "store-layout",
    "bytes",
    "the scale plane is written in front of the payload",
    payload_place=lambda c, slot: ok.payload_place(c, slot) + PAGE * 4,
    scale_place=lambda c, slot: ok.scale_place(c, slot) - PAGE * PAYLOAD[c.layout],
    **FP8,
)
add(
    "skipped-to-last-row",
    "store-layout",
    "padding",
    "slot -1 writes the last row of the last page",
    "vllm-project/vllm#43810, sgl-project/sglang#32477",
    kept=lambda c: torch.ones_like(c.out_loc, dtype=torch.bool),
    slots=lambda c: torch.where(c.out_loc < 0, c.kv_cache.shape[0] * PAGE - 1, c.out_loc),
    **FP8,
)
add(
    "skipped-to-slot-0",
    "store-layout",
    "padding",
    "slot -1 writes slot 0",
    "vllm-project/vllm#43810, sgl-project/sglang#32477",
    kept=lambda c: torch.ones_like(c.out_loc, dtype=torch.bool),
    slots=lambda c: c.out_loc.clamp_min(0),
    **FP8,
)
add("slot-0-skipped", "store-layout", "padding", "slot 0 counts as skipped", kept=lambda c: c.out_loc > 0, **FP8)
add(
    "store-gap-ignored",
    "store-layout",
    "rows",
    "pages are taken to follow each other without gaps",
    payload_place=lambda c, slot: slot // PAGE * PAGE * 132 + slot % PAGE * 128,
    scale_place=lambda c, slot: slot // PAGE * PAGE * 132 + PAGE * 128 + slot % PAGE * 4,
    **FP8,
)
add(
    "store-offset-int32",
    "store-layout",
    "integers",
    "byte offsets wrap at 2^31",
    "vllm-project/vllm#52109",
    payload_place=lambda c, slot: ok.payload_place(c, slot).to(torch.int32).to(torch.int64),
    scale_place=lambda c, slot: ok.scale_place(c, slot).to(torch.int32).to(torch.int64),
    **FP8,
)
add(
    "store-offset-uint32",
    "store-layout",
    "integers",
    "byte offsets wrap at 2^32",
    payload_place=lambda c, slot: ok.payload_place(c, slot) & 0xFFFFFFFF,
    scale_place=lambda c, slot: ok.scale_place(c, slot) & 0xFFFFFFFF,
    **FP8,
)
add(
    "store-overruns",
    "store-layout",
    "stale",
    "each key is written with 16 bytes too many, over its neighbour",
    write=lambda c, slot, payload, scales, places: _overrun(c, slot, payload, scales, places),
    **FP8,
)
add(
    "store-page-cleared",
    "store-layout",
    "stale",
    "the page of the first token is cleared before it is written",
    write=lambda c, slot, payload, scales, places: _cleared(c, slot, payload, scales, places),
    **FP8,
)
add(
    "store-tokens-reversed",
    "store-layout",
    "rows",
    "tokens go to each other's slots",
    slots=lambda c: c.out_loc.flip(0),
    **FP8,
)
add(
    "store-last-token-lost",
    "store-layout",
    "launch",
    "the grid is tokens // 4 blocks of four tokens",
    kept=lambda c: ok.kept(c) & (torch.arange(len(c.out_loc)) < len(c.out_loc) // 4 * 4),
    **FP8,
)
add(
    "store-at-most-128-tokens",
    "store-layout",
    "launch",
    "at most 128 tokens are stored",
    kept=lambda c: ok.kept(c) & (torch.arange(len(c.out_loc)) < 128),
    **FP8,
)
add(
    "store-token-raced",
    "store-layout",
    "race",
    "now and then one token is overwritten by its neighbour",
    slots=lambda c: _raced(c),
    **FP8,
)
add(
    "store-half-written",
    "store-layout",
    "race",
    "now and then the second half of a key is not there yet",
    codes=lambda c, x: _half(c, ok.codes(c, x)),
    **FP8,
)
add(
    "store-decode-other-kernel",
    "dispatch",
    "dispatch",
    "a call with one token goes to a kernel that rounds to bf16 after the norm",
    normed=lambda c, a, r, w: rounded(a * r * w) if len(a) == 1 else a * r * w,
    **FP8,
)
add(
    "store-bf16-pooled-other-kernel",
    "dispatch",
    "dispatch",
    "bf16 pooled keys go to a kernel without norm weight",
    weight=lambda c: torch.ones(128) if c.pooled.dtype == torch.bfloat16 else ok.weight(c),
    **FP8,
)
add(
    "pooled-normed-in-place", "norm", "stale", "pooled keys are normalised in place", wrap=lambda f: _in_place(f), **FP8
)


def _tiled(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    row = slot % PAGE
    base = places[0] - row * PAYLOAD[c.layout] + row // 16 * 16 * PAYLOAD[c.layout] + row % 16 * 16
    for tile in range(8):
        c.put(base + tile * 256, payload[:, tile * 16 : tile * 16 + 16])
    c.put(places[1], scales)


def _overrun(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    c.put(places[0], torch.cat((payload, payload[:, :16]), 1))
    ok.write(c, slot, payload, scales, places)


def _cleared(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    if len(slot):
        c.put(slot[:1] // PAGE * c.stride, torch.zeros((1, PAGE * PAYLOAD[c.layout]), dtype=torch.uint8))
    ok.write(c, slot, payload, scales, places)


def turn(c: Call) -> int:
    c.memory["calls"] = c.memory.get("calls", 0) + 1
    return c.memory["calls"]


def _raced(c: Call) -> Tensor:
    slots = c.out_loc.clone()
    if turn(c) % 5 == 0 and len(slots) > 1:
        slots[-1] = slots[0]
    return slots


def _half(c: Call, payload: Tensor) -> Tensor:
    if turn(c) % 5 == 0 and len(payload):
        payload = payload.clone()
        payload[-1, 64:] = 0
    return payload


def _in_place(f: Function) -> Function:
    def call(**named: Any) -> None:
        f(**named)
        named["pooled"].mul_(0.5)

    return call

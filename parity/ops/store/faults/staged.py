"""The key store as a chain of small torch stages under the calling convention; correct until a model replaces one.

Two schedules, as contracts name them: `fused` stays in float32 up to the one rounding of the format, `published` rounds
to bf16 after pooling, norm, rotary step and Hadamard transform.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity.pages.layout import DIM, Layout, find
from reference import formats

TURNED = 64


@dataclass
class Call:
    """One call: pooled [N, 128], norm_weight [128], positions int32 [N], rope_table float32 [max_position, 64],
    out_loc int64 [N], kv_cache; how the keys are to be stored; and a model's memory."""

    layout: Layout
    schedule: str
    rule: str
    fake_fp4: bool
    pooled: Tensor
    norm_weight: Tensor
    eps: float
    positions: Tensor
    rope_table: Tensor
    out_loc: Tensor
    kv_cache: Tensor
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def memory_bytes(self) -> Tensor:
        """The cache's memory from its first page to the end of its storage, uint8 [bytes], as a view."""
        cache = self.kv_cache
        size = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
        return cache.as_strided((size,), (1,)).view(torch.uint8)

    @property
    def quantiser(self) -> Quantiser:
        """How the layout rounds."""
        return QUANTISERS[self.layout.name]

    @property
    def stride(self) -> int:
        """Bytes from page to page."""
        return self.kv_cache.stride(0) * self.kv_cache.element_size()

    def put(self, address: Tensor, data: Tensor) -> None:
        """Write bytes uint8 [m, n] from byte addresses int64 [m] on; outside of the memory, some other place."""
        if data.numel():
            flat = self.memory_bytes
            flat[(address[:, None] + torch.arange(data.shape[1])) % flat.numel()] = data


def narrow(c: Call, x: Tensor) -> Tensor:
    """A rounding point of the published schedule: float32 through bf16."""
    return x.to(torch.bfloat16).to(torch.float32) if c.schedule == "published" else x


def pooled(c: Call) -> Tensor:
    """float32 [N, 128]."""
    return narrow(c, c.pooled.to(torch.float32))


def mean_square(c: Call, a: Tensor) -> Tensor:
    """float32 [N, 1], summed pairwise."""
    total = a * a
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total / a.shape[1]


def root(c: Call, mean: Tensor) -> Tensor:
    """1 / sqrt(mean + eps), float32 [N, 1]."""
    return 1.0 / torch.sqrt(mean.to(torch.float64) + c.eps).to(torch.float32)


def weight(c: Call) -> Tensor:
    """Norm weight float32 [128]."""
    return c.norm_weight.to(torch.float32)


def normed(c: Call, a: Tensor, r: Tensor, w: Tensor) -> Tensor:
    """float32 [N, 128]."""
    return narrow(c, a * r * w)


def angles(c: Call) -> Tensor:
    """(cos, sin) pairs float32 [N, 64] of each key's position."""
    return c.rope_table[c.positions.long()]


def rotate(c: Call, x: Tensor, pairs: Tensor) -> Tensor:
    """Adjacent pairs of the last 64 channels turned, float32 [N, 128]."""
    re, im, cos, sin = x[:, TURNED::2], x[:, TURNED + 1 :: 2], pairs[:, 0::2], pairs[:, 1::2]
    turned = torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(-2)
    return torch.cat((x[:, :TURNED], narrow(c, turned)), 1)


def butterflies(x: Tensor, strides: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)) -> Tensor:
    """(u, v) -> (u + v, u - v) at each stride, float32 [N, 128]."""
    for stride in strides:
        u, v = x.unflatten(-1, (-1, 2, stride)).unbind(-2)
        x = torch.stack((u + v, u - v), -2).flatten(-3)
    return x


def hadamard(c: Call, x: Tensor) -> Tensor:
    """Orthonormal transform float32 [N, 128]."""
    return narrow(c, butterflies(x) * torch.tensor(DIM**-0.5, dtype=torch.float32))


def fake(c: Call, z: Tensor) -> Tensor:
    """The fp4 grid and back, where the store is to do that."""
    return formats.fp4_quantise(z)[0].to(torch.float32) if c.fake_fp4 else z


@dataclass(frozen=True)
class Quantiser:
    """The arithmetic of a layout: channels per scale, and its steps from a block's largest magnitude to bytes."""

    block: int
    codes: Callable[[Tensor], Tensor]
    scale: Callable[[Tensor, str], Tensor] = lambda top, rule: torch.ones_like(top)
    scaled: Callable[[Tensor, Tensor], Tensor] = lambda z, wide: z
    scale_bytes: Callable[[Tensor], Tensor] = lambda s: s.contiguous().view(torch.uint8)


RULES = {"amax": formats.fp8_amax_scale, "pow2": formats.fp8_pow2_scale}
QUANTISERS = {
    "bf16": Quantiser(DIM, lambda x: x.to(torch.bfloat16).view(torch.uint8)),
    "fp8": Quantiser(
        DIM,
        formats.e4m3_encode,
        scale=lambda top, rule: RULES[rule](top[..., None]),
        scaled=lambda z, wide: z * (1.0 / wide),  # by the rounded reciprocal
    ),
    "fp4": Quantiser(
        32,
        lambda x: formats.e2m1_pack(formats.e2m1_encode(x)),
        scale=lambda top, rule: formats.pow2(formats.fp4_exponent(top)).to(torch.float32),
        scaled=lambda z, wide: (z.to(torch.float64) / wide).to(torch.float32),
        scale_bytes=lambda s: formats.ue8m0_encode(torch.frexp(s.to(torch.float64)).exponent - 1),
    ),
}


def amax(c: Call, z: Tensor) -> Tensor:
    """Largest magnitude float32 [N, blocks]: of the row, or of each block of 32 (fp4)."""
    return z.abs().unflatten(1, (-1, c.quantiser.block)).amax(-1)


def scale(c: Call, top: Tensor) -> Tensor:
    """The factor of each block, float32 [N, blocks]."""
    return c.quantiser.scale(top, c.rule)


def scaled(c: Call, z: Tensor, s: Tensor) -> Tensor:
    """Values as they are rounded, float32 [N, 128]."""
    return c.quantiser.scaled(z, s.repeat_interleave(DIM // s.shape[1], 1))


def codes(c: Call, x: Tensor) -> Tensor:
    """Payload bytes uint8 [N, payload] of scaled values."""
    return c.quantiser.codes(x)


def scale_bytes(c: Call, s: Tensor) -> Tensor:
    """uint8 [N, 4]: one float32 (fp8), or four exponents (fp4)."""
    return c.quantiser.scale_bytes(s)


def kept(c: Call) -> Tensor:
    """Tokens that are stored, bool [N]."""
    return c.out_loc >= 0


def slots(c: Call) -> Tensor:
    """int64 [N]."""
    return c.out_loc


def payload_place(c: Call, slot: Tensor) -> Tensor:
    """Byte address of each slot's payload."""
    return c.layout.payload_at(slot, c.stride)


def scale_place(c: Call, slot: Tensor) -> Tensor:
    """Byte address of each slot's scale."""
    return c.layout.scale_at(slot, c.stride)


def write(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    """Put the bytes of m tokens in place."""
    c.put(places[0], payload)
    c.put(places[1], scales)


@dataclass(frozen=True)
class Stages:
    """The chain; every field is a function of the same name in this module until a model replaces it."""

    pooled: Callable[[Call], Tensor] = pooled
    mean_square: Callable[[Call, Tensor], Tensor] = mean_square
    root: Callable[[Call, Tensor], Tensor] = root
    weight: Callable[[Call], Tensor] = weight
    normed: Callable[[Call, Tensor, Tensor, Tensor], Tensor] = normed
    angles: Callable[[Call], Tensor] = angles
    rotate: Callable[[Call, Tensor, Tensor], Tensor] = rotate
    hadamard: Callable[[Call, Tensor], Tensor] = hadamard
    fake: Callable[[Call, Tensor], Tensor] = fake
    amax: Callable[[Call, Tensor], Tensor] = amax
    scale: Callable[[Call, Tensor], Tensor] = scale
    scaled: Callable[[Call, Tensor, Tensor], Tensor] = scaled
    codes: Callable[[Call, Tensor], Tensor] = codes
    scale_bytes: Callable[[Call, Tensor], Tensor] = scale_bytes
    kept: Callable[[Call], Tensor] = kept
    slots: Callable[[Call], Tensor] = slots
    payload_place: Callable[[Call, Tensor], Tensor] = payload_place
    scale_place: Callable[[Call, Tensor], Tensor] = scale_place
    write: Callable[[Call, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]], None] = write


CORRECT = Stages()


def compute(stages: Stages, c: Call) -> None:
    """Run the chain on one call."""
    if not len(c.out_loc):
        return
    a = stages.pooled(c)
    y = stages.normed(c, a, stages.root(c, stages.mean_square(c, a)), stages.weight(c))
    z = stages.fake(c, stages.hadamard(c, stages.rotate(c, y, stages.angles(c))))
    scales, x = z.new_zeros((len(z), 0)).to(torch.uint8), z
    if c.layout.scale:
        s = stages.scale(c, stages.amax(c, z))
        x, scales = stages.scaled(c, z, s), stages.scale_bytes(c, s)
    payload, chosen = stages.codes(c, x), stages.kept(c)
    slot = stages.slots(c)[chosen]
    places = (stages.payload_place(c, slot), stages.scale_place(c, slot))
    stages.write(c, slot, payload[chosen], scales[chosen], places)


def function(
    layout: str,
    schedule: str = "fused",
    rule: str = "amax",
    fake_fp4: bool = False,
    change: Mapping[str, Callable[..., Any]] | None = None,
) -> Callable[..., None]:
    """A store function under the calling convention, with some stages replaced and a memory of its own.

    ValueError for a layout without a quantiser here."""
    form = find(layout)
    if layout not in QUANTISERS:
        raise ValueError(f"staged stores write pages of {', '.join(QUANTISERS)}, not {layout}")
    stages, memory = replace(CORRECT, **(change or {})), dict[str, Any]()  # type: ignore[arg-type]

    def staged_store(
        pooled: Tensor,
        norm_weight: Tensor,
        eps: float,
        positions: Tensor,
        rope_table: Tensor,
        out_loc: Tensor,
        kv_cache: Tensor,
    ) -> None:
        given = (pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache)
        compute(stages, Call(form, schedule, rule, fake_fp4, *given, memory))

    return staged_store

"""Roundings to the indexer's formats as whole-tensor arithmetic in float32, for measuring millions of keys.

They give the values that `reference.formats` gives through its codes; a test compares the two over every bf16 number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parity.pages.layout import DIM, find
from reference import formats

BLOCK = formats.BLOCK


def bf16(x: Tensor) -> Tensor:
    """float32 values rounded to bfloat16 once, to nearest, ties to even."""
    return x.to(torch.bfloat16).to(torch.float32)


def e4m3(x: Tensor) -> Tensor:
    """float32 values rounded to e4m3fn, saturating at 448 (a plain cast saturates in some torch releases only)."""
    return x.clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)


def fp4(x: Tensor, ties: str = "even") -> Tensor:
    """Published fp4 fake quantisation of float32 [..., D], blocks of 32: values e2m1 * 2^e; ties "even" or "down".

    "down" rounds the ties of the grid toward zero, as an encoder does that asks only whether a midpoint is exceeded.
    """
    blocks = x.unflatten(-1, (-1, BLOCK))
    exponent = formats.fp4_exponent(blocks.abs().amax(-1)).to(torch.int32)[..., None]
    scale = ((exponent + 127) << 23).view(torch.float32)  # from bits: a GPU's pow need not be exact
    y = blocks / scale
    # The grid's step is 1/2 below 2, 1 below 4 and 2 up to 6: two steps a binade.
    step = torch.where(y.abs() < 2, 0.5, torch.where(y.abs() < 4, 1.0, 2.0))
    if ties == "even":  # an even multiple of the step has an even code, and torch.round takes ties to even
        rounded = torch.round(y / step) * step
    else:
        rounded = torch.copysign(torch.ceil(y.abs() / step - 0.5) * step, y)
    return (rounded * scale).flatten(-2)


def same(x: Tensor) -> Tensor:
    """Not rounded."""
    return x


def _fp8(rule: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    def stored(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = rule(x)
        return e4m3(x / scale[..., None]), scale

    return stored


POINTS: dict[str, Callable[[Tensor], Tensor]] = {"bf16": bf16, "float32": same}
"""Rounding points by the value of a choice."""

STORED: dict[str, Callable[[Tensor], tuple[Tensor, Tensor | None]]] = {
    "bf16": lambda x: (bf16(x), None),
    "fp8": _fp8(formats.fp8_amax_scale),
    "fp8-pow2": _fp8(formats.fp8_pow2_scale),
    "fp4": lambda x: (fp4(x), None),
    "float32": lambda x: (x, None),
}
"""Storage formats: float32 [..., D] to (payload float32 [..., D], scale float32 [...] or None), value: their product.
fp8: e4m3 of x / scale, scale max(amax, 1e-4) / 448 or that rounded up to a power of two."""

LAYOUTS = {"bf16": "bf16", "fp8": "fp8", "fp8-pow2": "fp8", "fp4": "fp4"}
"""The layout of the pages that hold keys of a storage format."""

SLOT_BYTES = {form: find(LAYOUTS[form]).slot_bytes if form in LAYOUTS else 4 * DIM for form in STORED}
"""Bytes per slot of a storage format; float32 has no layout."""

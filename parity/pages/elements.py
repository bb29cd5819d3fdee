"""Number formats of stored elements, as codes: bf16, e4m3 and e2m1, with what the drawing of values asks of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

E2M1_GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True, eq=False, kw_only=True)
class Element:
    """A number format. Codes are int16 where it has 16 bits, and uint8 otherwise, one element each.

    name, dtype   torch's dtype over the codes; uint8 where it has none
    bits          of the uniform integer that draws an element: 16 or 8
    encode        float64 values (numpy) to the nearest codes
    shift         exponent added before encoding, so that a unit spread fills the format as amax scaling would
    least         the smallest magnitude that surely does not round to zero
    top           its largest magnitudes
    tiny          (exponent, count): subnormals are 1 .. count - 1 times 2^exponent
    needle        code of a value far above a unit spread
    normal        least code with the sign off whose last bit may be flipped without leaving normal numbers
    with_signs    (codes, bool) -> codes of the same magnitudes, negative where True
    outliers      (codes, bool [channels]) -> codes in which these channels stand out by 16 to 32 times, or all it can
    times         (codes, int exponents) -> codes times 2^exponents, in place; None where that is left to scales
    """

    name: str
    encode: Callable[[np.ndarray], np.ndarray]
    top: tuple[float, ...]
    tiny: tuple[int, int]
    needle: int
    with_signs: Callable[[Tensor, Tensor], Tensor]
    outliers: Callable[[Tensor, Tensor], Tensor]
    times: Callable[[Tensor, Tensor], Tensor] | None = None
    dtype: torch.dtype = torch.uint8
    bits: int = 8
    shift: int = 0
    least: float = 2.0**-6
    normal: int = 0


def sign_bit(bit: int, magnitude: int) -> Callable[[Tensor, Tensor], Tensor]:
    """`with_signs` of a format of sign and magnitude, from the masks of the two."""

    def with_signs(codes: Tensor, minus: Tensor) -> Tensor:
        magnitudes = codes & magnitude
        return torch.where(minus, magnitudes | bit, magnitudes)

    return with_signs


def nearest(magnitudes: np.ndarray, sign: int) -> Callable[[np.ndarray], np.ndarray]:
    """`encode` of a format whose code i is magnitudes[i], with a sign bit."""

    def encode(values: np.ndarray) -> np.ndarray:
        codes = np.abs(np.abs(values)[:, None] - magnitudes[None]).argmin(axis=1)
        return (codes + np.where(values < 0, sign, 0)).astype(np.uint8)

    return encode


def _bf16_codes(values: np.ndarray) -> np.ndarray:
    """Bit patterns of the nearest bf16, ties to even; the values are exact in float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)


def bf16_times(codes: Tensor, exponents: Tensor) -> Tensor:
    """bf16 patterns times 2^exponents, in place."""
    powers = ((exponents + 127) << 7).to(torch.int16).view(torch.bfloat16)
    codes.view(torch.bfloat16).mul_(powers)
    return codes


def _bf16_outliers(codes: Tensor, large: Tensor) -> Tensor:
    """Exponents up by 5; zero stays zero."""
    return codes + (large & ((codes & 0x7FFF) != 0)).to(torch.int16) * (5 << 7)


def _e4m3_magnitudes() -> np.ndarray:
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa * 1.0, -9))


def _e4m3_outliers(codes: Tensor, large: Tensor) -> Tensor:
    """The others down by 4, flushing what would become subnormal."""
    return torch.where(large, codes, torch.where((codes & 0x7F) >= 40, codes - 32, codes & 0x80))


BF16 = Element(
    name="bf16",
    dtype=torch.bfloat16,
    bits=16,
    encode=_bf16_codes,
    top=tuple(np.ldexp(np.arange(248.0, 256.0), 33)),
    tiny=(-133, 128),
    needle=0x4000,  # 2.0
    normal=0x0080,
    with_signs=sign_bit(-0x8000, 0x7FFF),
    outliers=_bf16_outliers,
    times=bf16_times,
)
E4M3 = Element(
    name="e4m3",
    dtype=torch.float8_e4m3fn,
    encode=nearest(_e4m3_magnitudes(), 0x80),
    shift=6,
    top=(448.0,),
    tiny=(-9, 8),
    needle=0x70,  # 128
    normal=0x08,
    with_signs=sign_bit(0x80, 0x7F),
    outliers=_e4m3_outliers,
)
E2M1 = Element(
    name="e2m1",
    encode=nearest(E2M1_GRID, 0x08),
    least=0.5,
    top=(6.0,),
    tiny=(-1, 2),
    needle=0x4,  # 2.0
    with_signs=sign_bit(0x08, 0x07),
    outliers=lambda codes, large: torch.where(large, codes, codes & 9),
)

"""Distributions as quantile tables, and their codes in bf16, e4m3 and e2m1.

A uniform integer indexes a table, so a drawn value is a table entry: no floating-point arithmetic stands between the
bits of the counter and the stored operand, and every device draws the same. Tables are built once, from integers.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

# Entries of a table: bf16 from 16 bits, e4m3 and e2m1 from 8.
SIZES = {"bf16": 1 << 16, "e4m3": 1 << 8, "e2m1": 1 << 8}
# Exponent added before encoding, so that a unit spread fills the format as a store's amax scaling would.
RANGE_SHIFT = {"bf16": 0, "e4m3": 6, "e2m1": 0}

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_UNIFORM_BITS = 12
_BELL_SHIFT = -11  # the sum of four 12-bit uniforms, centred, times 2^-11: deviation 1.155, at most 4 in magnitude


@cache
def _bell(size: int) -> np.ndarray:
    """Quantiles of a sum of four uniform integers, times 2^-11: gaussian-like and exact, float64 [size]."""
    levels = 1 << _UNIFORM_BITS
    counts = np.ones(levels, dtype=np.int64)
    for _ in range(3):  # convolve with a box by prefix sums; counts stay below 2^48
        padded = np.concatenate([counts, np.zeros(levels - 1, dtype=np.int64)])
        running = np.cumsum(padded)
        counts = running.copy()
        counts[levels:] -= running[:-levels]
    cumulative = np.cumsum(counts)
    step = (1 << (4 * _UNIFORM_BITS)) // (2 * size)
    places = np.searchsorted(cumulative, (2 * np.arange(size, dtype=np.int64) + 1) * step)
    return np.ldexp((places - 2 * (levels - 1)).astype(np.float64), _BELL_SHIFT)


def _spread(values: np.ndarray, size: int) -> np.ndarray:
    """`values`, each as often as any other up to rounding, over `size` entries."""
    return values[np.arange(size) * len(values) // size]


def _signed_values(magnitudes: np.ndarray) -> np.ndarray:
    return np.concatenate([-magnitudes[::-1], magnitudes])


def distribution(name: str, storage: str) -> np.ndarray:
    """Quantiles float64 of a named distribution as `storage` will hold them, before encoding; all dyadic.

    int4: -4..4. one_two: 1, 2. bell: gaussian-like. positive: |bell|, never zero. grid: the e2m1 grid with signs.
    top: +-(the largest values of the format's top binade, or 448). tiny: subnormals of the format.
    """
    size, wide = SIZES[storage], RANGE_SHIFT[storage]
    if name == "int4":
        return _spread(np.arange(-4.0, 5.0), size)
    if name == "one_two":
        return _spread(np.array([1.0, 2.0]), size)
    if name == "bell":
        return np.ldexp(_bell(size), wide)
    if name == "positive":
        least = 0.5 if storage == "e2m1" else 2.0**-6  # must not round to zero
        return np.ldexp(np.maximum(np.abs(_bell(size)), least), wide)
    if name == "grid":
        return _spread(_signed_values(_E2M1), size)
    if name == "top":
        tops = {"bf16": np.ldexp(np.arange(248.0, 256.0), 33), "e4m3": np.array([448.0]), "e2m1": np.array([6.0])}
        return _spread(_signed_values(tops[storage]), size)
    if name == "tiny":
        units = {"bf16": (-133, 128), "e4m3": (-9, 8), "e2m1": (-1, 2)}
        exponent, count = units[storage]
        return _spread(np.ldexp(np.arange(1.0 - count, count), exponent), size)
    raise ValueError(f"unknown distribution {name!r}")


def _bf16_codes(values: np.ndarray) -> np.ndarray:
    """Bit patterns of the nearest bf16, ties to even; the values are exact in float32."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.int16)


def _nearest_codes(values: np.ndarray, magnitudes: np.ndarray, sign_bit: int) -> np.ndarray:
    codes = np.abs(np.abs(values)[:, None] - magnitudes[None]).argmin(axis=1)
    return (codes + np.where(values < 0, sign_bit, 0)).astype(np.uint8)


def _e4m3_magnitudes() -> np.ndarray:
    codes = np.arange(0x7F)
    exponent, mantissa = codes >> 3, codes & 7
    return np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa * 1.0, -9))


@cache
def codes(name: str, storage: str, device: torch.device) -> Tensor:
    """The table of a distribution: int16 bf16 patterns [65536], or uint8 e4m3 codes or e2m1 nibbles [256]."""
    values = distribution(name, storage)
    if storage == "bf16":
        table = _bf16_codes(values)
    elif storage == "e4m3":
        table = _nearest_codes(values, _e4m3_magnitudes(), 0x80)
    else:
        table = _nearest_codes(values, _E2M1, 0x08)
    return torch.from_numpy(table).to(device)

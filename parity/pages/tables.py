"""Distributions as quantile tables, and their codes in a number format.

A uniform integer indexes a table, so a drawn value is a table entry: no floating-point arithmetic stands between the
bits of the counter and the stored operand, and every device draws the same. Tables are built once, from integers.
"""

from functools import cache

import numpy as np
import torch
from torch import Tensor

from parity.pages.elements import E2M1_GRID, Element

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


def distribution(name: str, element: Element) -> np.ndarray:
    """Quantiles float64 of a named distribution as a number format will hold them, before encoding; all dyadic.

    int4: -4..4. one_two: 1, 2. bell: gaussian-like. positive: |bell|, never zero. grid: the e2m1 grid with signs.
    top: +-(the largest values of the format). tiny: subnormals of the format. ValueError for another name.
    """
    size = 1 << element.bits
    if name == "int4":
        return _spread(np.arange(-4.0, 5.0), size)
    if name == "one_two":
        return _spread(np.array([1.0, 2.0]), size)
    if name == "bell":
        return np.ldexp(_bell(size), element.shift)
    if name == "positive":
        return np.ldexp(np.maximum(np.abs(_bell(size)), element.least), element.shift)
    if name == "grid":
        return _spread(_signed_values(E2M1_GRID), size)
    if name == "top":
        return _spread(_signed_values(np.array(element.top)), size)
    if name == "tiny":
        exponent, count = element.tiny
        return _spread(np.ldexp(np.arange(1.0 - count, count), exponent), size)
    raise ValueError(f"unknown distribution {name!r}")


@cache
def codes(name: str, element: Element, device: torch.device) -> Tensor:
    """The table of a distribution: codes int16 [65536] or uint8 [256]."""
    return torch.from_numpy(element.encode(distribution(name, element))).to(device)

"""Data classes of queries, weights and keys, and keys on their way into the pages of a layout."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from parity.pages import counter

BLOCK = 32
"""Channels that share a block scale, and of which fake quantisation leaves one exponent."""


@dataclass(frozen=True, slots=True)
class DataClass:
    """Distributions (see tables.distribution) of queries and keys, kinds of weight and scale, octaves of row scaling.

    An octave pair (low, bits) scales rows by 2^low .. 2^(low + 2^bits - 1); e4m3 queries are not scaled, since their
    scale is part of the weights. peak = largest |q|, |k|, |w| of exact integers; None: rounding is to be expected.
    """

    about: str
    q: str = "bell"
    k: str = "bell"
    weight: str = "real"
    scale: str = "real"
    q_octaves: tuple[int, int] = (0, 0)
    k_octaves: tuple[int, int] = (0, 0)
    peak: tuple[int, int, int] | None = None


CLASSES: dict[str, DataClass] = {
    "exact": DataClass(
        "small integers of both signs and power-of-two scales, distinct within a page: |q||k| <= 16 and |w| <= 127, so "
        "sum_d <= 2^11 and sum_h <= 64 * 127 * 2^11 < 2^24; every order of summation is exact, e4m3 cores included",
        "int4",
        "int4",
        "int127",
        "slot",
        peak=(4, 4, 127),
    ),
    "exact_wide": DataClass(
        "q, k in {1, 2} and |w| <= 511: dots of 249 to 331 and 9-bit weights, which bf16 cannot hold; sum_d <= 2^9 and "
        "sum_h <= 64 * 511 * 2^9 < 2^24, exact in every order",
        "one_two",
        "one_two",
        "int511",
        "slot",
        peak=(2, 2, 511),
    ),
    "octaves": DataClass(
        "gaussian-like rows over eight octaves each, weights of both signs with 24 significant bits, dots beyond 256",
        q_octaves=(-3, 3),
        k_octaves=(-3, 3),
    ),
    "near_ties": DataClass(
        "the keys of a request are one key with about two last bits flipped: many ties and near ties",
    ),
    "negative": DataClass(
        "every logit is below zero: positive keys, one positive query head, negative weights",
        k="positive",
        weight="negative",
    ),
    "zeros": DataClass(
        "a quarter of the keys zero (scale at the amax floor), a quarter one-hot; zero query heads, zero weights",
        weight="sparse",
    ),
    "saturating": DataClass("e4m3 payload and queries at +-448, fp4 at +-6, bf16 near 2^41", "top", "top"),
    "needle": DataClass("one key in the first and in every eighth page stands far above the rest", weight="positive"),
    "nonfinite": DataClass("every thirteenth key holds a NaN or an infinity, in its values or in its scale"),
    "subnormal": DataClass("keys of subnormal numbers of their format; not for contracts that flush to zero", k="tiny"),
    "outliers": DataClass("a sixteenth of the channels is 16 to 32 times as large as the rest (fp4: as far as it can)"),
    "fp4_grid": DataClass(
        "queries and keys on the e2m1 grid with power-of-two block scales, as after fake quantisation",
        "grid",
        "grid",
        scale="slot",
        k_octaves=(-2, 2),
    ),
}


class Keys(NamedTuple):
    """Keys of n pages as stored: payload codes [n, 64, elements] or bytes, scales [n, 64] or [n, 64, blocks], or None.

    bf16: int16 patterns [n, 64, 128]. fp8: uint8 codes [n, 64, 128] and float32 [n, 64]. fp4: uint8 e2m1 pairs
    [n, 64, 64] and ue8m0 uint8 [n, 64, 4].
    """

    payload: Tensor
    scales: Tensor | None


class Drawn(NamedTuple):
    """Codes of n pages of keys as drawn, and what a layout needs to finish them.

    codes [n, 64, 128] of the layout's element; words int64 [n, 64] and page_words int64 [n], random bits per key and
    per page; offsets int64 [64]; lift: powers of two by which all keys are larger. spoiled, empty: bool [n, 64], keys
    that are to hold something not finite, and keys of zeros; None where the class has none.
    """

    codes: Tensor
    words: Tensor
    page_words: Tensor
    offsets: Tensor
    kind: DataClass
    lift: int
    spoiled: Tensor | None
    empty: Tensor | None

    def octaves(self) -> Tensor:
        """Exponents int64 [n, 64] by which the class scales each key."""
        return octave(self.words, self.kind.k_octaves, 40) + self.lift

    def scale_exponents(self) -> Tensor:
        """Exponents int64 [n, 64] of the keys' scales: the octaves, or 64 different ones, -32 .. 31, in every page."""
        if self.kind.scale == "slot":
            return ((self.offsets * 37 + self.page_words[:, None]) & 63) - 32
        return self.octaves()

    def block_steps(self) -> Tensor:
        """Exponents 0 .. 3 of the blocks of each key, int64 [n, 64, 4]."""
        return torch.stack([counter.field(self.words, 8 + 8 * block, 2) for block in range(4)], -1)

    def spoil(self, which: int) -> Tensor:
        """bool [n, 64], the spoiled keys that spoil in way number `which`, 0 .. 3."""
        assert self.spoiled is not None
        return self.spoiled & (counter.field(self.words, 44, 2) == which)

    def spoil_element(self, which: int) -> Tensor:
        """bool [n, 64, 128]: one element of each of these keys."""
        channels = torch.arange(self.codes.shape[-1], device=self.words.device)
        return self.spoil(which).unsqueeze(-1) & (channels == counter.field(self.words, 52, 7).unsqueeze(-1))


def octave(words: Tensor, octaves: tuple[int, int], shift: int) -> Tensor:
    """Exponents low .. low + 2^bits - 1 (int64) from the bits of random words at `shift`."""
    low, bits = octaves
    return counter.field(words, shift, bits) + low


def power_of_two(exponents: Tensor) -> Tensor:
    """2^exponents in float32, from exponent bits; exponents from -126 to 127."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)

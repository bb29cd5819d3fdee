"""The values of a case: data classes, and queries, weights and keys drawn as functions of logical coordinates.

Coordinates are (request id, row id, head) for queries and weights and (owner id, page id, offset) for keys, never a
place in memory or in a batch: the same row or page has the same bits wherever a case puts it, on every device.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from parity.ops.shared.case import DIM, PAGE
from parity.pages import counter, tables

STREAM_QUERY, STREAM_WEIGHT, STREAM_KEY, STREAM_PAGE, STREAM_CANARY, STREAM_DIM = range(1, 7)
BLOCK = 32  # elements that share a ue8m0 scale in the fp4 layout
NEEDLE_PAGES = 8  # a needle in every eighth page, the first page included
NONFINITE_EVERY = 13
# A store's scale of an all-zero key: the amax floor over the largest e4m3 value, in float32.
ZERO_SCALE = float(np.float32(1e-4) / np.float32(448.0))

_MAGNITUDE = {torch.int16: 0x7FFF, torch.uint8: 0x7F}


class Exactness(NamedTuple):
    """Proof obligations of exact data, in units of `quantum`, key scales left out (powers of two, one a key).

    absdot bounds sum_d |q||k| of one head; total bounds sum_h |w_h| sum_d |q||k| at the case's heads.
    """

    quantum: float
    absdot: int
    total: int


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


def exactness(case: Any) -> Exactness | None:
    """What makes every order of summation exact on this case's data, or None if its class does not promise that."""
    peak = CLASSES[case.data].peak if case.data in CLASSES else None
    if peak is None:
        return None
    absdot = DIM * peak[0] * peak[1]
    return Exactness(1.0, absdot, absdot * peak[2] * case.heads)


class Keys(NamedTuple):
    """Keys of n pages as stored: payload int16 bf16 patterns or uint8 codes [n, 64, 128], or uint8 e2m1 pairs
    [n, 64, 64]; scales float32 [n, 64] (fp8), ue8m0 uint8 [n, 64, 4] (fp4) or None (bf16)."""

    payload: Tensor
    scales: Tensor | None


def draw_queries(data: str, layout: str, seed: int, requests: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Queries [n, heads, 128], e4m3 for the fp8 layout and bf16 otherwise, of n rows named by int64 coordinates."""
    kind = CLASSES[data]
    storage = "e4m3" if layout == "fp8" else "bf16"
    device = requests.device
    names = torch.arange(heads, dtype=torch.int64, device=device)
    keys = counter.row_keys(seed, STREAM_QUERY, (requests[:, None], rows[:, None], names))
    codes = _codes(kind.q, storage, keys)
    if data == "negative":
        codes[:, 0].bitwise_and_(_MAGNITUDE[codes.dtype])
    elif data == "zeros":
        codes = codes.masked_fill_((counter.field(keys, 50, 2) == 0).unsqueeze(-1), 0)
    elif data == "needle":  # three quarters of the signs point along the needle
        away = (_bytes(counter.row_keys(seed, STREAM_QUERY, (keys,))) & 3) == 0
        signs = torch.logical_xor(_needle_signs(seed, device), away)
        codes = _with_signs(codes, signs)
    if storage == "e4m3":
        return codes.view(torch.float8_e4m3fn)
    values = codes.view(torch.bfloat16)
    if kind.q_octaves[1]:
        values.mul_(_power_bf16(_octave(keys, kind.q_octaves, 40)).unsqueeze(-1))
    return values


def draw_weights(data: str, seed: int, requests: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Head weights float32 [n, heads] of n rows; each needs at most 24 significant bits, so it is exact."""
    keys = counter.row_keys(seed, STREAM_WEIGHT, (requests, rows))
    words = counter.row_words(keys, counter.counting(heads, requests.device))
    kind = CLASSES[data].weight
    if kind in ("int127", "int511"):
        peak = int(kind[3:])
        return ((((words >> 16) & 0xFFFF) * (2 * peak + 1)) >> 16).sub_(peak).to(torch.float32)
    if kind in ("positive", "negative"):
        sign = 1.0 if kind == "positive" else -1.0
        return ((words >> 8) & 0x7FFFFF).add_(1 << 23).to(torch.float32).mul_(sign * 2.0**-24)
    values = (words >> 7).to(torch.float32).mul_(2.0**-24).mul_(_power_float((words & 3) - 2))
    if kind == "sparse":
        values.masked_fill_((words & 0x30) == 0, 0.0)
    return values


def draw_keys(data: str, layout: str, seed: int, owners: Tensor, pages: Tensor, canary: bool = False) -> Keys:
    """Keys of n whole pages named by int64 coordinates. `canary` draws plausible keys, eight times as large, from a
    stream of their own, for places that must not be read."""
    kind = CLASSES[data]
    device = owners.device
    offsets = torch.arange(PAGE, dtype=torch.int64, device=device)
    keys = counter.row_keys(seed, STREAM_CANARY if canary else STREAM_KEY, (owners[:, None], pages[:, None], offsets))
    page_keys = counter.row_keys(seed, STREAM_PAGE, (owners, pages))
    storage = {"bf16": "bf16", "fp8": "e4m3", "fp4": "e2m1"}[layout]
    special = "" if canary else data
    if special == "near_ties":
        codes, keys = _near_ties(kind.k, storage, seed, owners, keys)
    else:
        codes = _codes(kind.k, storage, keys)
    if special == "zeros":
        _zeros(codes, keys)
    elif special == "needle":
        found = (pages % NEEDLE_PAGES == 0)[:, None] & (offsets == counter.field(page_keys, 10, 6)[:, None])
        strong = {"bf16": 0x4000, "e4m3": 0x70, "e2m1": 0x4}[storage]  # 2.0, 128 and 2.0
        needle = _with_signs(torch.full((DIM,), strong, dtype=codes.dtype, device=device), _needle_signs(seed, device))
        codes = torch.where(found.unsqueeze(-1), needle if storage != "e2m1" else _nibbles(needle), codes)
    elif special == "outliers":
        codes = _outliers(codes, storage, seed)
    odd = torch.zeros_like(keys, dtype=torch.bool)
    if special == "nonfinite":
        odd = (offsets + counter.field(page_keys, 10, 6)[:, None]) % NONFINITE_EVERY == 0
    lift = 3 if canary else 0
    if layout == "bf16":
        return Keys(_finish_bf16(codes, keys, kind, odd, special, lift), None)
    exponents = _octave(keys, kind.k_octaves, 40) + lift
    if kind.scale == "slot":  # 64 different exponents, -32 .. 31, in every page
        exponents = ((offsets * 37 + page_keys[:, None]) & 63) - 32
    if layout == "fp8":
        return _finish_fp8(codes, keys, kind, exponents, odd, special)
    blocks = exponents.unsqueeze(-1) + torch.stack([counter.field(keys, 8 + 8 * b, 2) for b in range(4)], -1) * (
        kind.scale != "slot"
    )
    scales = (blocks + 127).to(torch.uint8)
    scales[..., 1].masked_fill_(odd, 0xFF)
    return Keys(codes[..., 0::2] | (codes[..., 1::2] << 4), scales)


def _bytes(keys: Tensor) -> Tensor:
    """uint8 [*keys.shape, 128]: one uniform byte an element."""
    return counter.row_words(keys, counter.counting(DIM // 4, keys.device)).view(torch.uint8)


def _codes(name: str, storage: str, keys: Tensor) -> Tensor:
    """Codes [*keys.shape, 128] of a distribution: int16 bf16 patterns, or uint8 codes or nibbles."""
    table = tables.codes(name, storage, keys.device)
    if storage == "bf16":
        halves = counter.row_words(keys, counter.counting(DIM // 2, keys.device)).view(torch.int16)
        places = halves.to(torch.int32).bitwise_and_(0xFFFF)
    else:
        places = _bytes(keys).to(torch.int32)
    return table.index_select(0, places.view(-1)).view(places.shape)


def _octave(keys: Tensor, octaves: tuple[int, int], shift: int) -> Tensor:
    low, bits = octaves
    return counter.field(keys, shift, bits) + low


def _power_float(exponents: Tensor) -> Tensor:
    """2^exponents in float32, from exponent bits."""
    return ((exponents + 127) << 23).to(torch.int32).view(torch.float32)


def _power_bf16(exponents: Tensor) -> Tensor:
    return ((exponents + 127) << 7).to(torch.int16).view(torch.bfloat16)


def _needle_signs(seed: int, device: torch.device) -> Tensor:
    """Direction of the needle, bool [128], True for minus."""
    return (_bytes(counter.row_keys(seed, STREAM_DIM, (torch.zeros(1, dtype=torch.int64, device=device),))) & 1)[0] == 1


def _with_signs(codes: Tensor, minus: Tensor) -> Tensor:
    """Codes of the same magnitudes, negative where `minus`; int16 bf16 patterns or uint8 with the sign in bit 7."""
    magnitudes = codes & _MAGNITUDE[codes.dtype]
    return torch.where(minus, magnitudes | (-0x8000 if codes.dtype == torch.int16 else 0x80), magnitudes)


def _nibbles(codes: Tensor) -> Tensor:
    """e2m1 nibbles from codes whose sign stands in bit 7."""
    return (codes & 7) | ((codes >> 4) & 8)


def _near_ties(name: str, storage: str, seed: int, owners: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """One key per owner, last bits flipped in about 2 of 128 places; zeros keep theirs, to stay out of subnormals."""
    base = counter.row_keys(seed, STREAM_KEY, (owners,))[:, None].expand_as(keys)
    codes = _codes(name, storage, base[:, :1]).expand(-1, PAGE, -1)
    least = {"bf16": 0x0080, "e4m3": 0x08, "e2m1": 0x00}[storage]
    flips = (_bytes(keys) < 4) & ((codes & _MAGNITUDE[codes.dtype]) >= least)
    return codes ^ flips.to(codes.dtype), base


def _zeros(codes: Tensor, keys: Tensor) -> None:
    kind = counter.field(keys, 50, 2).unsqueeze(-1)
    places = torch.arange(DIM, device=keys.device)
    codes.masked_fill_((kind == 0) | ((kind == 1) & (places != counter.field(keys, 52, 7).unsqueeze(-1))), 0)


def _outliers(codes: Tensor, storage: str, seed: int) -> Tensor:
    channels = torch.arange(DIM, dtype=torch.int64, device=codes.device)
    large = counter.field(counter.row_keys(seed, STREAM_DIM, (channels,)), 20, 4) == 0
    if storage == "bf16":  # exponents up by 5, zero stays zero
        return codes + (large & ((codes & 0x7FFF) != 0)).to(torch.int16) * (5 << 7)
    if storage == "e4m3":  # the others down by 4, flushing what would become subnormal
        small = torch.where((codes & 0x7F) >= 40, codes - 32, codes & 0x80)
    else:
        small = codes & 9
    return torch.where(large, codes, small)


def _odd_places(keys: Tensor, odd: Tensor, kinds: tuple[int, ...]) -> Tensor:
    """Which element of an odd key is spoiled: bool [n, 64, 128], for keys whose kind is one of `kinds`."""
    kind = counter.field(keys, 44, 2)
    chosen = odd & torch.stack([kind == k for k in kinds]).any(0)
    places = torch.arange(DIM, device=keys.device)
    return chosen.unsqueeze(-1) & (places == counter.field(keys, 52, 7).unsqueeze(-1))


def _finish_bf16(codes: Tensor, keys: Tensor, kind: DataClass, odd: Tensor, special: str, lift: int) -> Tensor:
    if kind.k_octaves[1] or lift:
        exponents = _octave(keys, kind.k_octaves, 40).unsqueeze(-1) + lift
        if kind.k == "grid":  # one exponent a block of 32, as fake quantisation leaves them
            blocks = torch.stack([counter.field(keys, 8 + 8 * b, 2) for b in range(DIM // BLOCK)], -1)
            exponents = (blocks + kind.k_octaves[0] + lift).repeat_interleave(BLOCK, -1)
        codes.view(torch.bfloat16).mul_(_power_bf16(exponents))
    if special == "nonfinite":
        for which, pattern in enumerate((0x7FC0, 0x7F80, -0x80, -0x40)):  # NaN, inf, -inf, NaN
            codes.masked_fill_(_odd_places(keys, odd, (which,)), pattern)
    return codes


def _finish_fp8(codes: Tensor, keys: Tensor, kind: DataClass, exponents: Tensor, odd: Tensor, special: str) -> Keys:
    scales = _power_float(exponents)
    if kind.scale == "real":  # 24 significant bits; payload fills the range, so the scale carries the magnitude
        mantissa = counter.field(keys, 16, 23).to(torch.int32)
        scales = (_power_float(exponents - tables.RANGE_SHIFT["e4m3"]).view(torch.int32) | mantissa).view(torch.float32)
    if special == "zeros":
        scales = scales.masked_fill(counter.field(keys, 50, 2) == 0, ZERO_SCALE)
    if special == "nonfinite":
        codes.masked_fill_(_odd_places(keys, odd, (0, 3)), 0x7F)
        which = counter.field(keys, 44, 2)
        scales = scales.masked_fill(odd & (which == 1), float("nan")).masked_fill(odd & (which == 2), float("inf"))
    return Keys(codes, scales)

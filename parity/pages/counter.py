"""Random bits as a function of (seed, stream, coordinates): integer arithmetic only, the same on every device.

A row of numbers has a 64-bit key, splitmix64's finaliser over a linear combination of its coordinates; word i of the
row is a 32-bit mixer over both halves of the key and i. torch has no unsigned shifts, so every right shift is masked.
Constants: splitmix64 (Steele, Lea, Flood 2014), murmur3's 32-bit finaliser, and odd 64-bit multipliers for coordinates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_SPLITMIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_COORDINATES = (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xAEF17502108EF2D9)
_SEED, _STREAM = 0xF1357AEA2E62A9C5, 0x9FB21C651E98DF25
_MURMUR = (0x85EBCA6B, 0xC2B2AE35)
_STEP32 = 0x9E3779B9


def _signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


_MIX64 = tuple(_signed(c, 64) for c in _SPLITMIX)
_STEPS64 = tuple(_signed(c, 64) for c in _COORDINATES)
_MIX32 = tuple(_signed(c, 32) for c in _MURMUR)


def mix_int(value: int) -> int:
    """splitmix64's finaliser on a Python integer, 0 <= result < 2^64."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _SPLITMIX[0]) & _MASK64
    value = ((value ^ (value >> 27)) * _SPLITMIX[1]) & _MASK64
    return value ^ (value >> 31)


def _shifted(x: Tensor, bits: int, width: int) -> Tensor:
    """Logical right shift of two's complement integers of `width` bits."""
    return (x >> bits).bitwise_and_((1 << (width - bits)) - 1)


def row_keys(seed: int, stream: int, coordinates: Sequence[Tensor]) -> Tensor:
    """Keys int64 of the broadcast shape of up to three int64 coordinate tensors, all on one device."""
    base = _signed(mix_int(seed * _SEED + stream * _STREAM + _COORDINATES[0]), 64)
    total = coordinates[0] * _STEPS64[0]
    for coordinate, step in zip(coordinates[1:], _STEPS64[1:], strict=False):
        total = total + coordinate * step
    total = total.add_(base)
    total.bitwise_xor_(_shifted(total, 30, 64)).mul_(_MIX64[0])
    total.bitwise_xor_(_shifted(total, 27, 64)).mul_(_MIX64[1])
    return total.bitwise_xor_(_shifted(total, 31, 64))


def row_words(keys: Tensor, indices: Tensor) -> Tensor:
    """Words int32 [*keys.shape, n] number `indices` (int32 [n]) of the rows named by `keys` (int64)."""
    halves = keys.contiguous().unsqueeze(-1).view(torch.int32)
    words = halves[..., :1] + indices * _signed(_STEP32, 32)
    words.bitwise_xor_(_shifted(words, 16, 32)).mul_(_MIX32[0])
    words.bitwise_xor_(halves[..., 1:])
    words.bitwise_xor_(_shifted(words, 13, 32)).mul_(_MIX32[1])
    return words.bitwise_xor_(_shifted(words, 16, 32))


def counting(count: int, device: torch.device) -> Tensor:
    """Word numbers 0 .. count-1, int32."""
    return torch.arange(count, dtype=torch.int32, device=device)


def field(keys: Tensor, shift: int, bits: int) -> Tensor:
    """Bits shift .. shift+bits-1 of each key as an int64 from 0 to 2^bits - 1, for decisions about a whole row."""
    return (keys >> shift).bitwise_and_((1 << bits) - 1)

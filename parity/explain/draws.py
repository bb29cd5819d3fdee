"""Gaussian-like numbers as functions of (seed, stream, coordinates): table look-ups by a counter, the same everywhere.

Streams keep what is drawn for one purpose independent of everything else, so a longer context extends a shorter one.
"""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from parity.pages import counter

_LEVELS = 1 << 16
STREAMS = ("kv", "score", "ape", "norm", "wq", "latent", "gate", "topic", "needle", "channel", "place", "prototype")
_FIRST_STREAM = 100  # clear of the streams of cases
_CHUNK = 1 << 22


@cache
def _table(device: torch.device) -> Tensor:
    """Quantiles of the standard normal distribution at 2^16 equal steps, float32; the largest is 4.27."""
    normal = NormalDist()
    half = [normal.inv_cdf((2 * i + 1) / (2 * _LEVELS)) for i in range(_LEVELS // 2, _LEVELS)]
    return torch.tensor([-x for x in reversed(half)] + half, dtype=torch.float32, device=device)


def gaussian(seed: int, stream: str, case: int, rows: Tensor, width: int) -> Tensor:
    """Standard normal numbers, float32 [n, width], of the rows named by `rows` (int64 [n]); width even."""
    key = counter.row_keys(
        seed, _FIRST_STREAM + STREAMS.index(stream), (torch.full_like(rows, case), rows, torch.zeros_like(rows))
    )
    out = torch.empty((len(rows), width), dtype=torch.float32, device=rows.device)
    table, words = _table(rows.device), counter.counting(width // 2, rows.device)
    step = max(1, _CHUNK // width)
    for start in range(0, len(rows), step):
        halves = counter.row_words(key[start : start + step], words).view(torch.int16).to(torch.int32)
        out[start : start + step] = table[halves.bitwise_and_(_LEVELS - 1)]
    return out


def integers(seed: int, stream: str, case: int, rows: Tensor, below: int) -> Tensor:
    """Integers from 0 to below - 1, int64 [n]; below is at most 2^20 (the bias of the remainder is then 2^-42)."""
    key = counter.row_keys(
        seed, _FIRST_STREAM + STREAMS.index(stream), (torch.full_like(rows, case), rows, torch.ones_like(rows))
    )
    return counter.field(key, 1, 62) % below

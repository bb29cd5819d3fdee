"""Synthetic logits for top-k: each class aims at one way in which selection kernels lose members."""

import torch
from torch import Tensor

from parity.ops.topk.case import DATA
from parity.pages import counter

STREAM_SCORE, STREAM_STALE, STREAM_ROW = 17, 18, 19

ABOUT: dict[str, str] = {
    "random": "both signs over eight octaves",
    "equal": "every score of a row is the same number",
    "negative": "every score is below zero: float bits compared as unsigned integers would reverse the order",
    "neginf": "a quarter of the scores inside the window is -inf and still counts",
    "narrow": "all scores in [1, 1 + 2^-10): one bin of a half-precision histogram, over 4,096 members in a long row",
    "ulps": "eight values, 2^-22 apart: equal after rounding to tf32, bf16 or fp16",
    "large": "magnitudes beyond 65504, the largest half-precision number; a quarter negative",
    "nan": "a quarter of the rows all NaN, half of them one eighth NaN, the rest ordinary",
    "few": "five values, so that ties at the boundary abound",
    "zeros": "+0 and -0 with a rare +-1",
    "inf": "a rare +inf and a rare -inf among scores of both signs, both in one row of four",
    "top": "magnitudes of 2^123 to 2^127, both signs",
    "tiny": "subnormals of both signs, and scores below 2^-28",
}
assert tuple(ABOUT) == DATA


def draw_scores(data: str, seed: int, requests: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Scores float32 [n, W] of n rows (int64 request and row ids) at keys int32 [W], logical coordinates."""
    names = counter.row_keys(seed, STREAM_SCORE, (requests, rows))
    words = counter.row_words(names, keys)
    if data == "top":  # exponent field 250 to 253
        return ((words & -0x7F800001) | (250 << 23) + ((words >> 3 & 3) << 23)).view(torch.float32)
    if data == "tiny":  # exponent field 0, or 67 to 98
        exponents = torch.where((words & 4) == 0, 0, 67 + (words >> 5 & 31)) << 23
        return ((words & -0x7F800001) | exponents).to(torch.int32).view(torch.float32)
    if data in ("random", "neginf", "nan", "inf"):
        scores = _octaves(words)
        if data == "neginf":
            scores.masked_fill_((words & 0x60) == 0, -torch.inf)
        elif data == "inf":
            kind = counter.field(counter.row_keys(seed, STREAM_ROW, (requests, rows)), 22, 2)[:, None]
            scores.masked_fill_((kind != 1) & ((words & 0x3F0) == 0), torch.inf)
            scores.masked_fill_((kind != 0) & ((words & 0x3F0) == 0x10), -torch.inf)
        elif data == "nan":
            kind = counter.field(counter.row_keys(seed, STREAM_ROW, (requests, rows)), 20, 2)[:, None]
            scores.masked_fill_((kind == 0) | ((kind < 3) & ((words & 0x70) == 0)), torch.nan)
        return scores
    if data == "equal":
        return (counter.field(names, 8, 3) - 3).to(torch.float32)[:, None].expand(words.shape).contiguous()
    if data == "negative":
        return _octaves(words).abs_().neg_().sub_(2.0**-24)
    if data == "narrow":
        return (words & 0x1FFF).to(torch.float32).mul_(2.0**-23).add_(1.0)
    if data == "ulps":
        return (words & 7).to(torch.float32).mul_(2.0**-22).add_(1.0)
    if data == "large":
        magnitude = ((words >> 8) & 0xFFFF).add_(65505).to(torch.float32)
        return torch.where((words & 3) == 0, -magnitude, magnitude)
    if data == "few":
        return ((((words >> 16) & 0xFFFF) * 5) >> 16).sub_(2).to(torch.float32).mul_(0.5)
    signs = torch.where((words & 1) == 0, 1.0, -1.0)
    return torch.where((words & 0xF0) == 0, signs, signs * 0.0)


def draw_stale(data: str, seed: int, requests: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """Plausible leftovers float32 [n, W] for places past a row's length, each above every finite score of its row."""
    words = counter.row_words(counter.row_keys(seed, STREAM_STALE, (requests, rows)), keys)
    if data == "top":
        return ((words & 0x7FFFFF) | (254 << 23)).view(torch.float32)
    return ((words >> 8) & 0xFFFF).to(torch.float32).add_(2.0**20)


def _octaves(words: Tensor) -> Tensor:
    """Signed 25-bit integers times 2^-24, times 2^-4 .. 2^3: exact in float32."""
    powers = (((words & 7) + 123) << 23).view(torch.float32)
    return (words >> 7).to(torch.float32).mul_(2.0**-24).mul_(powers)

"""What a store case's tokens hold: pooled keys, norm weights, positions and rotary rows, as functions of token names.

Only integer arithmetic and exact scaling, so that a case has the same bits on every machine and device. Rotary rows
are numbers in (-1, 1) drawn by position: a store must use the table that it is given, and a libm's sine would not be
the same everywhere.
"""

import torch
from torch import Tensor

from parity.ops.store.case import MAX_POSITION, StoreCase
from parity.pages import counter
from parity.pages.keys import power_of_two
from parity.pages.layout import DIM

STREAM_POOLED, STREAM_FRACTION, STREAM_NORM, STREAM_TOKEN, STREAM_ROPE, STREAM_POOL, STREAM_TOPIC = range(21, 28)
# Twice the midpoints of the fp4 grid in the two upper binades, where a block's largest magnitude falls.
TIES = (7.0, 10.0, 5.0, 3.0)


def draw_pooled(case: StoreCase, names: Tensor) -> Tensor:
    """Pooled keys [n, 128] of named tokens (int64 [n]), float32 with 24 significant bits, or rounded to bf16."""
    keys = counter.row_keys(case.seed, STREAM_POOLED, (names,))
    row = counter.row_keys(case.seed, STREAM_TOKEN, (names,))
    words = counter.row_words(keys, counter.counting(DIM, names.device))
    # Four bytes make a bell, fourteen more bits the low end of the significand; every step is exact in float32.
    bell = _bell(words)
    low = counter.row_words(counter.row_keys(case.seed, STREAM_FRACTION, (names,)), counter.counting(DIM, names.device))
    values = (bell * (1 << 14) + (low & 0x3FFF)).to(torch.float32) * 2.0**-21
    if case.data == "context":
        values = 0.5 * values + _topics(case, names)
    octave = {"octaves": (-12, 4), "tiny": (-90, 6), "large": (38, 4)}.get(case.data)
    if octave is not None:
        values = values * power_of_two(counter.field(row, 8, octave[1]) + octave[0]).unsqueeze(-1)
    if case.data in ("zeros", "onehot", "pairs"):
        first = counter.field(row, 20, 7)
        second = (first + 1 + counter.field(row, 27, 6)) % DIM
        channels = torch.arange(DIM, device=names.device)
        kept = channels == first[:, None]
        if case.data == "pairs":
            kept = kept | (channels == second[:, None])
        if case.data == "zeros":  # a zero row in two, one channel in a quarter
            kind = counter.field(row, 40, 2)[:, None]
            kept = (kept & (kind == 2)) | (kind == 3)
        values = torch.where(kept, values, 0.0)
    return values.to(torch.bfloat16) if case.pooled == "bf16" else values


def _topics(case: StoreCase, names: Tensor) -> Tensor:
    """What the keys of a stretch of 64 tokens share, and what all keys share: a prompt has subjects."""
    total = torch.zeros(len(names), DIM, device=names.device)
    for size, subject in ((1.0, names // 64 % 24), (0.5, torch.zeros_like(names))):
        keys = counter.row_keys(case.seed, STREAM_TOPIC, (subject, torch.full_like(names, int(2 * size))))
        words = counter.row_words(keys, counter.counting(DIM, names.device))
        total += size * _bell(words).to(torch.float32) * 2.0**-8
    return total


def draw_norm_weight(case: StoreCase, device: torch.device) -> Tensor:
    """The norm weight [128]: 24-bit factors from 1/4 to 4 (bf16: 8 bits), one, or powers of two times fp4 midpoints."""
    channels = torch.arange(DIM, dtype=torch.int64, device=device)
    words = counter.row_keys(case.seed, STREAM_NORM, (channels,))
    if case.data == "context":  # about one, as trained
        values = 1.0 + (counter.field(words, 10, 20) - (1 << 19)).to(torch.float32) * 2.0**-21
    elif case.weights == "one":
        values = torch.ones(DIM, device=device)
    elif case.weights == "ties":
        table = torch.tensor(TIES, device=device)
        values = table[counter.field(words, 30, 2)] * power_of_two(counter.field(words, 20, 2) - 2)
    else:
        fraction = (counter.field(words, 10, 23) + (1 << 23)).to(torch.float32) * 2.0**-23
        sign = 1.0 - 2.0 * (counter.field(words, 50, 3) == 0).to(torch.float32)
        values = fraction * power_of_two(counter.field(words, 40, 2) - 2) * sign
    return values.to(torch.bfloat16) if case.weight == "bf16" else values


def draw_positions(case: StoreCase, names: Tensor) -> Tensor:
    """Positions int32 [n]; `far` includes the last row of the table."""
    if case.positions == "near":
        return (4 * names).to(torch.int32)
    words = counter.row_keys(case.seed, STREAM_TOKEN, (names, torch.ones_like(names)))
    drawn = counter.field(words, 10, 20)
    return torch.where(counter.field(words, 40, 3) == 0, MAX_POSITION, drawn).to(torch.int32)


def draw_rope_rows(positions: Tensor) -> Tensor:
    """Rows float32 [n, 64] of the rotary table: 24-bit numbers in [-1, 1), a function of the position only."""
    keys = counter.row_keys(0, STREAM_ROPE, (positions.to(torch.int64),))
    return (counter.row_words(keys, counter.counting(64, positions.device)) >> 8).to(torch.float32) * 2.0**-23


def draw_skipped(case: StoreCase, names: Tensor) -> Tensor:
    """bool [n], True for tokens whose slot is -1."""
    if case.skip == 0:
        return torch.zeros_like(names, dtype=torch.bool)
    words = counter.row_keys(case.seed, STREAM_TOKEN, (names, torch.full_like(names, 2)))
    return counter.field(words, 12, 40) % case.skip == 0


def draw_bytes(seed: int, first: int, count: int, device: torch.device) -> Tensor:
    """uint8 [count]: what stands at byte addresses first .. first + count - 1 of a pool."""
    # A key for each 16 KiB, so that a window of a huge pool needs no other window.
    blocks = torch.arange(first >> 14, ((first + count - 1) >> 14) + 1, dtype=torch.int64, device=device)
    words = counter.row_words(
        counter.row_keys(seed, STREAM_POOL, (blocks,)), torch.arange(1 << 12, dtype=torch.int32, device=device)
    )
    start = first & 0x3FFF
    return words.reshape(-1).view(torch.uint8)[start : start + count].clone()


def _bell(words: Tensor) -> Tensor:
    """int64 of the words' shape, the sum of a word's four bytes about its mean: -510 .. 510."""
    return words.view(torch.uint8).view(*words.shape, 4).sum(-1) - 510

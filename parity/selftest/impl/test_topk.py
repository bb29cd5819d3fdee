"""Top-k to slots against sorting by hand: ties, signed zeros, infinities, NaN, clamped lengths, padding."""

import math

import pytest
import torch

from impl import topk
from impl.topk import topk_to_slots
from parity.selftest.helpers import seeded


def by_hand(logits, length, k):
    """Positions in the documented order: logit, then lower position; NaN counts as +inf."""
    value = [math.inf if math.isnan(x) else x for x in logits[:length].tolist()]
    best = sorted(range(len(value)), key=lambda j: (-value[j], j))[:k]
    return best + [-1] * (k - len(best))


def table(requests, width, seed=0):
    return torch.randint(0, 1000, (requests, width), dtype=torch.int32, generator=seeded(seed))


def check(logits, lens, block_table, k):
    slots, positions = topk_to_slots(logits, lens, block_table, k)
    assert slots.dtype == positions.dtype == torch.int32 and slots.shape == positions.shape == (len(logits), k)
    for row in range(len(logits)):
        pages = block_table[row // lens.shape[1]]
        length = min(max(int(lens.view(-1)[row]), 0), logits.shape[1], 64 * len(pages))
        wanted = by_hand(logits[row], length, k)
        assert positions[row].tolist() == wanted
        assert slots[row].tolist() == [-1 if p < 0 else int(pages[p // 64]) * 64 + p % 64 for p in wanted]


def test_random_ties_and_special_values(monkeypatch):
    generator = seeded(1)
    for trial in range(60):
        requests, next_n, width, k, chunk = (
            int(torch.randint(1, n, (1,), generator=generator)) for n in (4, 4, 4, 90, 9999)
        )
        columns = int(torch.randint(1, 64 * width + 20, (1,), generator=generator))
        monkeypatch.setattr(topk, "CHUNK_BYTES", chunk)
        logits = torch.randint(-3, 4, (requests * next_n, columns), generator=generator).float()
        if trial % 2:
            logits = torch.randn(logits.shape, generator=generator)
        for special in (math.nan, math.inf, -math.inf, -0.0, 0.0):
            logits[torch.rand(logits.shape, generator=generator) < 0.06] = special
        lens = torch.randint(-2, columns + 9, (requests, next_n), dtype=torch.int32, generator=generator)
        check(logits, lens, table(requests, width), k)


@pytest.mark.parametrize(
    ("logits", "length", "chosen"),
    [
        ([-math.inf] * 128, 100, [*range(64)]),
        ([-0.0, 0.0, -0.0, -1.0], 4, [0, 1]),
        ([1.0, 2.0, math.inf, math.nan], 2, [1, 0, -1, -1]),
    ],
    ids=["equal logits", "signed zeros", "garbage past the length"],
)
def test_known_answers(logits, length, chosen):
    lens = torch.tensor([[length]], dtype=torch.int32)
    assert topk_to_slots(torch.tensor([logits]), lens, table(1, 2), len(chosen))[1][0].tolist() == chosen


def test_empty_calls():
    lens = torch.zeros(2, 1, dtype=torch.int32)
    for columns, width in ((0, 2), (64, 0), (64, 2)):
        slots, positions = topk_to_slots(torch.zeros(2, columns), lens, table(2, width), 3)
        assert slots.tolist() == positions.tolist() == [[-1] * 3] * 2
    assert topk_to_slots(torch.zeros(0, 64), lens[:0], table(0, 1), 3)[0].shape == (0, 3)

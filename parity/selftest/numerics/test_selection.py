"""The selection test against brute force on thousands of small cases, its rules one by one, recall and regret."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from parity.numerics.selection import judge_selection, recall, regret
from parity.results import Status
from parity.selftest.helpers import refuses, seeded

TABLE = torch.tensor([[7, 3, 5], [2, 9, 4]], dtype=torch.int32)
ROWS = TABLE.repeat_interleave(2, 0)  # the pages of each row of `good`


def slots_of(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The block table's image, int32; -1 stays."""
    safe = positions.clamp_min(0).long()
    return torch.where(positions >= 0, table.gather(1, safe // 64) * 64 + (safe % 64).int(), -1)


def brute_force(chosen: tuple[int, ...], low: list[float], high: list[float], k: int) -> bool:
    """Do some scores inside the intervals make ``chosen`` a top-k? Tries every order of their ends.

    Scores need only take values among the ends, since only comparisons between them matter."""
    count = len(low)
    if len(chosen) != min(k, count) or len(set(chosen)) != len(chosen):
        return False
    ends = sorted(set(low) | set(high))
    options = [[x for x in ends if low[i] <= x <= high[i]] for i in range(count)]
    for scores in itertools.product(*options):
        inside = [scores[i] for i in chosen]
        outside = [scores[i] for i in range(count) if i not in chosen]
        if not inside or not outside or min(inside) >= max(outside):
            return True
    return False


def test_agrees_with_brute_force():
    g, table = seeded(11), torch.tensor([[3]], dtype=torch.int32)
    values = [-math.inf, -1.0, 0.0, 1.0, 2.0, math.inf]
    judged = accepted = 0
    for _ in range(2000):
        count, k = int(torch.randint(0, 5, (), generator=g)), int(torch.randint(1, 5, (), generator=g))
        pairs = []
        for _ in range(count):
            a, b = sorted(values[i] for i in torch.randint(0, 6, (2,), generator=g).tolist())
            kind = int(torch.randint(0, 4, (), generator=g))
            pairs.append((a, b) if kind == 0 else (-math.inf, math.inf) if kind == 1 and a < 0 else (a, a))
        low, high = [a for a, _ in pairs], [b for _, b in pairs]
        lens = torch.tensor([[count]], dtype=torch.int32)
        ends = torch.full((2, 1, count + 2), 9.0, dtype=torch.float64)
        ends[:, 0, :count] = torch.tensor([low, high])
        free = (ends == torch.tensor([[[-math.inf]], [[math.inf]]])).all(0, keepdim=True)
        ends[(free & (torch.arange(count + 2) % 2 == 0)).expand_as(ends)] = math.nan  # NaN says the same
        for chosen in itertools.combinations(range(count), min(k, count)):
            positions = torch.full((1, k), -1, dtype=torch.int32)
            order = torch.randperm(len(chosen), generator=g)
            positions[0, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)[order]
            verdict = judge_selection(slots_of(positions, table), positions, ends[0], ends[1], lens, table, k)
            wanted = brute_force(chosen, low, high, k)
            assert verdict.passed == wanted, (chosen, low, high, k, verdict.message)
            judged, accepted = judged + 1, accepted + wanted
    assert judged > 2000 and 0.1 < accepted / judged < 0.95


def good(k: int = 4) -> dict:
    """Rows of lengths 130 and 3 (request 0), 0 and 70 (request 1), distinct scores; a correct top-k."""
    lens = torch.tensor([[130, 3], [0, 70]], dtype=torch.int32)
    scores = torch.randn(4, 192, generator=seeded(2))
    positions = torch.full((4, k), -1, dtype=torch.int32)
    for row, count in enumerate(lens.flatten().tolist()):
        best = scores[row, :count].topk(min(k, count)).indices
        positions[row, : len(best)] = best.int()
        scores[row, count:] = 1e30  # a stale tail larger than any score
    given = {"positions": positions, "low": scores, "high": scores, "context_lens": lens, "block_table": TABLE, "k": k}
    return image(given)


def image(given: dict) -> dict:
    """The same with the slots of its positions."""
    given["slots"] = slots_of(given["positions"], ROWS)
    return given


def test_a_correct_selection_passes_in_any_order_with_and_without_positions():
    given = good()
    verdict = judge_selection(**given)
    assert verdict.passed and verdict.cells == 4 + 3 + 0 + 4 and verdict.undecided == 0
    given["positions"][0] = given["positions"][0].flip(0)
    assert judge_selection(**image(given)).passed
    assert judge_selection(**given | {"positions": None}).passed
    assert judge_selection(**given | {"low": given["low"].double(), "high": given["high"].double()}).passed


# Where a position of the correct answer is replaced: name, row, rank, position, and the sentence.
WRONG = [
    ("second best", 0, 3, int(good()["low"][0, :130].argsort(descending=True)[4]), "1 of 4 rows are no top-4"),
    ("twice", 0, 3, int(good()["positions"][0, 0]), "is selected twice"),
    ("past the length", 0, 0, 130, "rank 0: position out of range"),
    ("one missing", 3, 3, -1, "rank 3: min(k, 70) keys must be selected"),
    ("hole", 3, 1, -1, "rank 1: min(k, 70) keys must be selected"),
    ("padding is 0", 1, 3, 0, "rank 3: only 3 keys exist, the rest must be -1"),
    ("empty row filled", 2, 0, 0, "rank 0: only 0 keys exist, the rest must be -1"),
    ("minus two", 1, 3, -2, "rank 3: only 3 keys exist, the rest must be -1"),
    ("padding slot is 0", 1, 3, None, "rank 3: only 3 keys exist, the rest must be -1"),
    ("table of row 0", 3, None, None, "slot of position"),
    ("logical slots", 0, None, None, "slot of position"),
]


@pytest.mark.parametrize("name, row, rank, position, sentence", WRONG, ids=[each[0] for each in WRONG])
def test_each_rule_rejects_its_nearest_wrong_answer(name, row, rank, position, sentence):
    given = good()
    if position is not None:
        given["positions"][row, rank] = position
        if position < 0:
            given["slots"][row, rank] = position
        else:
            image(given)
    elif rank is not None:
        given["slots"][row, rank] = 0
    else:
        table = {"table of row 0": TABLE[[0, 0, 0, 0]], "logical slots": torch.arange(3).int().expand(4, 3)}[name]
        given["slots"] = slots_of(given["positions"], table)
    verdict = judge_selection(**given, case="v1 x", impl="mine")
    assert verdict.status is Status.FAILED and verdict.where["row"] == row and sentence in verdict.message
    assert verdict.message.endswith("parity run --case 'v1 x' --impl mine")
    if rank is not None:
        by_slots = judge_selection(**given | {"positions": None})
        assert by_slots.status is Status.FAILED and by_slots.where["row"] == row


def test_ties_are_free_and_zeros_are_equal():
    given = good()
    given["low"] = given["high"] = torch.zeros(4, 192)
    for first in (0, 50, 126):
        given["positions"][0] = torch.arange(first, first + 4, dtype=torch.int32)
        assert judge_selection(**image(given)).passed
    given["low"] = given["high"] = torch.where(torch.arange(192) % 2 == 0, 0.0, -0.0).expand(4, 192)
    assert judge_selection(**given).passed


def test_minus_infinity_inside_the_window_counts():
    given = good()
    scores = torch.full((4, 192), -math.inf)
    scores[0, 5] = 1.0
    given["low"] = given["high"] = scores
    given["positions"][0] = torch.tensor([9, 5, 7, 8], dtype=torch.int32)
    assert judge_selection(**image(given)).passed
    given["positions"][0, 1] = 6
    verdict = judge_selection(**image(given))
    assert verdict.status is Status.FAILED and "key 5 outside has" in verdict.message


def test_bounds_decide_to_the_last_bit():
    given = good(1)
    given["positions"][given["positions"] >= 0] = 1
    for end, passed in ((1.0, True), (math.nextafter(1.0, 0.0), False)):
        low, high = torch.zeros(2, 4, 192, dtype=torch.float64)
        low[:, 0] = high[:, 0] = 1.0
        high[:, 1] = end
        assert judge_selection(**image(given) | {"low": low, "high": high}).passed == passed


def test_undecided_counts_keys_that_the_bound_leaves_open():
    lens, table = torch.tensor([[6]], dtype=torch.int32), torch.tensor([[0]], dtype=torch.int32)
    centre = torch.tensor([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]], dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2]], dtype=torch.int32)
    for width, share in ((0.0, 0.0), (0.4, 0.0), (0.6, 2 / 3), (1.1, 4 / 3), (9.0, 2.0)):
        verdict = judge_selection(positions, positions, centre - width, centre + width, lens, table, 3)
        assert verdict.passed and verdict.undecided == pytest.approx(share)
    tied = torch.ones(1, 6)
    assert judge_selection(positions, positions, tied, tied, lens, table, 3).undecided == 0


def test_sampled_rows_and_chunks():
    given = good()
    rows = torch.tensor([3, 0])
    part = given | {name: given[name][rows] for name in ("slots", "positions", "low", "high")} | {"rows": rows}
    assert judge_selection(**part, chunk_bytes=1).passed
    part["slots"][0, 0] += 1
    assert judge_selection(**part).where["row"] == 3


def test_wrong_types_and_arguments():
    given = good()
    verdict = judge_selection(**given | {"slots": given["slots"].long()})
    assert verdict.message == "got slots torch.int64 [4, 4]; wanted torch.int32 [4, 4]"
    assert judge_selection(**given | {"positions": given["positions"][:, :3]}).status is Status.FAILED
    narrow, one_page = given["low"][:, :100], torch.full_like(TABLE, 3)
    for sentence, change in {
        "k must be an integer of at least 1, got 0": {"k": 0},
        "low and high: expected": {"low": narrow, "high": narrow},
        "names a page twice": {"positions": None, "block_table": one_page},
    }.items():
        refuses(ValueError, sentence, judge_selection, **given | change)


def test_nothing_to_select():
    lens = torch.zeros(2, 1, dtype=torch.int32)
    none = torch.full((2, 3), -1, dtype=torch.int32)
    empty = torch.zeros(2, 0)
    verdict = judge_selection(none, none, empty, empty, lens, torch.zeros(2, 0, dtype=torch.int32), 3)
    assert verdict.passed and verdict.cells == 0
    assert judge_selection(none[:0], none[:0], empty[:0], empty[:0], lens[:0], TABLE[:0], 3).passed


def test_recall_and_regret():
    scores = torch.tensor([[4.0, 3.0, 3.0, -1.0, 9.0], [1.0, 9.0, 9.0, 9.0, 9.0]])
    lens = torch.tensor([4, 1])
    reference = torch.tensor([[0, 1], [0, -1]])
    assert recall(torch.tensor([[0, 2], [0, -1]]), reference).tolist() == [0.5, 1.0]
    assert recall(torch.tensor([[-1, -1]]), torch.tensor([[-1, -1]])).tolist() == [1.0]
    assert regret(torch.tensor([[0, 2], [0, -1]]), scores, lens, 2).tolist() == [0.0, 0.0]
    assert regret(torch.tensor([[3, 2], [-1, -1]]), scores, lens, 2).tolist() == [5 / 7, 1.0]
    assert regret(torch.tensor([[-1]]), torch.zeros(1, 3), torch.tensor([0]), 1).tolist() == [0.0]


def test_many_rows():
    g = seeded(0)
    scores = torch.randn(64, 22016, generator=g)
    lens = torch.full((1, 64), 22016, dtype=torch.int32)
    table = torch.randperm(344, generator=g).int()[None]
    positions = scores.topk(512).indices.int()
    assert judge_selection(
        slots_of(positions, table.expand(64, -1)), positions, scores, scores, lens, table, 512
    ).passed

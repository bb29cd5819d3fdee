"""Cases over a block table for the diagnosis of fault models: by a source of randomness, of at least two rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from parity.ops.shared.case import POISONS, TAILS, Lengths, PagedCase
from parity.pages.layout import PAGE


def before(case: PagedCase) -> PagedCase:
    """The call before a case's: the same shape, other values, and every row at full length."""
    full = tuple((case.longest,) * case.next_n for _ in case.lengths)
    return replace(case, seed=case.seed + 1, lengths=full)


def drawn_fields(source: random.Random, longest: int, least: int) -> dict[str, Any]:
    """Lengths and placement: ragged rows of up to `longest` keys or some pages, one of them of at least `least`."""
    lengths = _lengths(source, longest, least)
    long = max(map(max, lengths))
    return {
        "lengths": lengths,
        "seed": source.randrange(1 << 16),
        "perm": source.randrange(1, 1 << 16),
        "width": -(-long // PAGE) + source.randint(0, 3),
        "max_len": long + source.choice((0, 7, 130)),
        "tail": source.choice(TAILS),
        "poison": source.choice(POISONS),
        "clean": source.choice((True, True, False)),
    }


def _lengths(source: random.Random, longest: int, least: int) -> Lengths:
    requests, next_n = source.choice(((2, 1), (2, 2), (3, 2), (2, 3), (1, 3)))
    lengths = [
        [source.choice((source.randint(0, longest), PAGE * source.randint(0, 4))) for _ in range(next_n)]
        for _ in range(requests)
    ]
    lengths[0][-1] = max(lengths[0][-1], least + source.randint(0, 120))
    return tuple(map(tuple, lengths))

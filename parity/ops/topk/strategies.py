"""Hypothesis strategies of cases of top-k: structure and placement are drawn and shrunk, values follow from a drawn
seed."""

from collections.abc import Sequence

from hypothesis import strategies as st

from parity.domain.dimensions import numbers
from parity.ops.shared.case import POISONS, TAILS
from parity.ops.shared.domain import MOST_K
from parity.ops.shared.strategies import (
    SEEDS,
    at_least,
    check_options,
    free_strides,
    placement,
    rarely,
    shapes,
    subsets,
    wider,
)
from parity.ops.topk.case import DATA, STRIDES, TopkCase
from parity.pages.layout import PAGE

USUAL = (1, 64, 512, 1024, 2048)
"""Numbers of slots that models choose, and the smallest."""


def topk_cases(
    *,
    data: Sequence[str] | None = None,
    ks: Sequence[int] | None = None,
    max_requests: int = 3,
    max_next_n: int = 3,
    max_length: int = 4500,
    sharing: bool = True,
    strides: Sequence[str] | None = None,
    offsets: Sequence[str] = STRIDES,
    singletons: Sequence[bool] = (False, True),
    tails: Sequence[str] = TAILS,
    poisons: Sequence[str] = POISONS,
    clean: Sequence[bool] = (True, False),
) -> st.SearchStrategy[TopkCase]:
    """Cases of top-k functions: k from `ks`, by default half of them any to MOST_K; lengths around k, short
    ones and up to `max_length` mixed in one batch.

    With clean=no the scores past a row's length are NaN, 3e38 or leftovers above every score. Shrinks like paged_cases,
    then to the smallest k.
    """
    data = DATA if data is None else tuple(data)
    check_options(("data", data, DATA), ("tails", tails, TAILS), ("poisons", poisons, POISONS))
    strides = free_strides(strides, STRIDES)
    if ks is not None and (not ks or min(ks) < 1):
        raise ValueError(f"ks must name integers of at least 1, got {tuple(ks)}")
    at_least("max_requests", max_requests, 1)
    at_least("max_next_n", max_next_n, 1)
    at_least("max_length", max_length, 1)

    places = st.one_of(st.sampled_from(USUAL), numbers(1, MOST_K)) if ks is None else st.sampled_from(sorted(ks))

    @st.composite
    def cases(draw: st.DrawFn) -> TopkCase:
        k = draw(places)
        requests, next_n = draw(shapes(1, max_requests * max_next_n, max_requests, max_next_n))
        around = sorted({min(max_length, max(0, n)) for n in (0, 1, k - 1, k, k + 1, 2 * k, max_length)})
        length = st.one_of(st.sampled_from(around), st.integers(0, max_length))
        lengths = tuple(tuple(draw(length) for _ in range(next_n)) for _ in range(requests))
        longest = max(max(row) for row in lengths)
        pages = -(-longest // PAGE)
        fields = placement(draw, requests, pages, sharing, True, False)
        if pages and draw(rarely()):  # page numbers of a real pool: slots past 2^15, and past 2^24 (no pool is built)
            fields["spare"] = draw(st.sampled_from((1200, 1 << 19)))
        return TopkCase(
            lengths=lengths,
            data=draw(st.sampled_from(tuple(data))),
            seed=draw(st.integers(0, SEEDS)),
            k=k,
            width=wider(draw, max(1, pages), 3),
            max_len=wider(draw, max(1, longest), 200),
            tail=draw(st.sampled_from(tuple(tails))),
            poison=draw(st.sampled_from(tuple(poisons))),
            strides=draw(subsets(strides)),
            clean=draw(st.sampled_from(tuple(clean))),
            offsets=draw(subsets(offsets)),
            singletons=draw(st.sampled_from(tuple(singletons))),
            **fields,
        )

    return cases()

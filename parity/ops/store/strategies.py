"""Hypothesis strategies of store cases: structure and placement are drawn and shrunk, values follow from a seed."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from parity.ops.shared.strategies import subsets
from parity.ops.store.case import DATA, DTYPES, OFFSETS, PLACES, POSITIONS, STRIDES, WEIGHTS, StoreCase
from parity.pages.layout import PAGE, find

# Nothing, one, the borders of warps, blocks and pages, and the ragged middle.
COUNTS = (0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130)
SEEDS = 1 << 16
BIG_BYTES = (1 << 32) + (1 << 29)


def store_cases(
    *,
    layout: str = "bf16",
    data: Sequence[str] = DATA[:-1],
    weights: Sequence[str] = WEIGHTS,
    positions: Sequence[str] = POSITIONS,
    dtypes: Sequence[str] = DTYPES,
    places: Sequence[str] = PLACES,
    max_tokens: int = 130,
    min_tokens: int = 0,
    skips: bool = True,
    gaps: bool = True,
    strides: Sequence[str] = STRIDES,
    offsets: Sequence[str] = OFFSETS,
    singletons: Sequence[bool] = (False, True),
    big: bool = False,
) -> st.SearchStrategy[StoreCase]:
    """Cases of store functions.

    layout: of the pool. data, weights, positions, dtypes (of pooled keys and norm weight), places: what is drawn from.
    min_tokens <= tokens <= max_tokens, some of them with slot -1 if `skips`. gaps: pools whose pages lie apart.
    strides, offsets: which operands may be views with gaps between rows, or begin some way into their storage.
    singletons: whether axes of size one have a stride of their own. big: the pool passes 2^32 bytes (mapped lazily on
    the CPU).

    Shrinks to no token, then to one, the pool of one page in order, no gap, and values that are easy to read.
    """
    if not 0 <= min_tokens <= max_tokens:
        raise ValueError(f"min_tokens must lie in [0, max_tokens={max_tokens}], got {min_tokens}")
    counts = [count for count in COUNTS if min_tokens <= count <= max_tokens]
    count = st.one_of(st.integers(min_tokens, max_tokens), *([st.sampled_from(counts)] if counts else []))

    @st.composite
    def cases(draw: st.DrawFn) -> StoreCase:
        tokens = draw(count)
        place = draw(st.sampled_from(tuple(places)))
        least = max(1, -(-tokens // (2 if place == "edges" else PAGE)))
        pages = least + draw(st.integers(0, 8 if place != "edges" else 1))
        start = draw(st.sampled_from((0, 0, 1, 1000)))
        fields: dict[str, Any] = {"gap": 0}
        if big:
            pages = max(pages, 6)  # so that no gap passes the limit of a case
            page = find(layout).page_bytes
            fields["gap"] = max(16, -(-(BIG_BYTES // (pages - 1) - page) // 16) * 16)
        elif gaps:
            fields["gap"] = draw(st.sampled_from((0, 0, 16, 48, 4096)))
        if skips:
            fields["skip"] = draw(st.sampled_from((0, 0, 2, 5, 1)))
        return StoreCase(
            ids=tuple(range(start, start + tokens)),
            layout=layout,
            data=draw(st.sampled_from(tuple(data))),
            seed=draw(st.integers(0, SEEDS)),
            pooled=draw(st.sampled_from(tuple(dtypes))),
            weight=draw(st.sampled_from(tuple(dtypes))),
            weights=draw(st.sampled_from(tuple(weights))),
            positions=draw(st.sampled_from(tuple(positions))),
            eps_exponent=draw(st.one_of(st.sampled_from((6, 5, 12)), st.integers(1, 20))),
            pages=pages,
            place=place,
            perm=draw(st.integers(0, SEEDS)),
            fill=draw(st.integers(0, 3)),
            strides=draw(subsets(strides)),
            offsets=draw(subsets(offsets)),
            singletons=draw(st.sampled_from(tuple(singletons))),
            **fields,
        )

    return cases()

"""Hypothesis strategies of cases of paged logits: structure and placement are drawn and shrunk, values follow from a
drawn seed."""

from collections.abc import Sequence

from hypothesis import strategies as st

from parity.ops.paged_logits.case import DATA, HEADS, OFFSETS, STRIDES, Case
from parity.ops.shared.case import POISONS, TAILS
from parity.ops.shared.strategies import (
    SEEDS,
    at_least,
    check_options,
    free_strides,
    length_rows,
    one_of,
    placement,
    rarely,
    shapes,
    subsets,
    wider,
)
from parity.pages.layout import PAGE, find

BIG_BYTES = (1 << 32) + (1 << 29)  # a pool of this size has pages past 2^32 bytes, 2^31 bf16 elements


def paged_cases(
    *,
    layout: str = "bf16",
    heads: Sequence[int] = HEADS,
    data: Sequence[str] | None = None,
    max_requests: int = 3,
    max_next_n: int = 3,
    max_rows: int = 6,
    min_rows: int = 1,
    max_pages: int = 4,
    min_length: int = 0,
    sharing: bool = True,
    shuffled: bool = True,
    strides: Sequence[str] | None = None,
    offsets: Sequence[str] = OFFSETS,
    singletons: Sequence[bool] = (False, True),
    tails: Sequence[str] = TAILS,
    poisons: Sequence[str] = POISONS,
    clean: Sequence[bool] = (True, False),
    wide: bool = True,
    big: bool = False,
) -> st.SearchStrategy[Case]:
    """Cases of logits functions, small enough for an interpreted kernel by default.

    layout, heads, data: what is drawn from; every data class by default. max_requests, max_next_n, and
    min_rows <= requests * next_n <= max_rows bound the batch, max_pages the pages of a request, min_length every
    context length. sharing: prefixes, pages used twice, copies, expanded rows. shuffled: physical order. strides: which
    operands may be views with gaps; all but context_lens by default. offsets: which may begin some way into their
    storage. singletons: whether axes of size one have a stride of their own. wide: tables and results wider than
    needed, large pools, gaps between pages. big: every pool passes 2^32 bytes (mapped lazily on the CPU).

    Shrinks to the fewest requests, rows, pages and keys, then to pages in order, no sharing, the narrowest table, no
    gaps, tail -1 and NaN poison. ValueError for options out of range.
    """
    data = DATA if data is None else tuple(data)
    find(layout)
    check_options(("heads", heads, HEADS), ("data", data, DATA), ("tails", tails, TAILS), ("poisons", poisons, POISONS))
    strides = free_strides(strides, STRIDES)
    at_least("max_requests", max_requests, 1)
    at_least("max_next_n", max_next_n, 1)
    at_least("max_pages", max_pages, 1)
    at_least("min_rows", min_rows, 0)
    at_least("min_length", min_length, 0)
    for name in offsets:
        one_of("offsets", name, OFFSETS)
    if max_rows < max(1, min_rows) or min_rows > max_requests * max_next_n:
        raise ValueError(f"max_rows must be at least {max(1, min_rows)} and reachable, got {max_rows}")
    if min_length > max_pages * PAGE:
        raise ValueError(f"min_length must fit in max_pages * {PAGE} keys, got {min_length}")
    if not clean:
        raise ValueError("clean must name at least one of True and False, got none")

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        requests, next_n = draw(shapes(min_rows, max_rows, max_requests, max_next_n))
        lengths = draw(length_rows(requests, next_n, min_length, max_pages * PAGE))
        longest = max((max(row) for row in lengths), default=0)
        pages = -(-longest // PAGE)
        fields = placement(draw, requests, pages, sharing, shuffled, wide)
        if sharing and requests > 1 and draw(rarely()):  # rows of one request, expanded by the engine
            fields["request_ids"] = (0,) * requests
            fields["row_ids"] = tuple(range(requests * next_n))
        if wide:
            fields["width"] = wider(draw, max(1, pages), 1 if pages < 3 else 7)
            fields["max_len"] = wider(draw, max(1, longest), 70)
        if big:
            fields |= _big(draw, layout, max(1, pages) * max(1, requests))
        return Case(
            lengths=lengths,
            layout=layout,
            heads=draw(st.sampled_from(tuple(heads))),
            data=draw(st.sampled_from(tuple(data))),
            seed=draw(st.integers(0, SEEDS)),
            tail=draw(st.sampled_from(tuple(tails))),
            poison=draw(st.sampled_from(tuple(poisons))),
            strides=draw(subsets(strides)),
            clean=draw(st.sampled_from(tuple(clean))),
            offsets=draw(subsets(offsets)),
            singletons=draw(st.sampled_from(tuple(singletons))),
            **fields,
        )

    return cases()


def _big(draw: st.DrawFn, layout: str, used: int) -> dict:
    """A pool that passes 2^32 bytes, by gaps between few pages or by very many pages, whose byte offsets have more than
    24 significant bits where there is a small gap."""
    page = find(layout).page_bytes
    if draw(st.booleans()):
        return {"spare": BIG_BYTES // page, "gap": draw(st.sampled_from((0, 16, 48)))}
    spare = 5
    return {"spare": spare, "gap": -(-BIG_BYTES // (spare + 1) // 4096) * 4096}

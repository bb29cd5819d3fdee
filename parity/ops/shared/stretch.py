"""Cases that go far in one dimension and are ordinary in the others: drawn at random, and one per border of bucket.

An axis is a dimension of numbers with a function (case, value, other number) -> the case with this value there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from parity.domain.dimensions import Dimension, numbers
from parity.domain.notation import RATIO, causal_lengths
from parity.ops.shared.case import POISONS, TAILS
from parity.ops.shared.domain import VIEWS, Reach
from parity.pages.layout import PAGE

SHORT = 3 * PAGE
"""Longest row of a batch of very many."""
GAP = 4096

Axes = Mapping[str, Callable[[Any, int, int], Any]]

# What a stretched case forgets of the case that it was made of, for lengths and sizes do not fit any more.
PLAIN: dict[str, Any] = dict.fromkeys(("request_ids", "row_ids", "page_ids", "width", "max_len"))


def stretched(plain: st.SearchStrategy[Any], axes: Axes, reach: Reach, least_rows: int = 0) -> st.SearchStrategy[Any]:
    """A case of `plain` with one dimension drawn over all of its range. Shrinks to the plain case's other fields."""

    @st.composite
    def cases(draw: st.DrawFn) -> Any:
        case = draw(plain)
        axis = draw(st.sampled_from(tuple(axes)))
        low = {"requests": max(1, least_rows), "next_n": max(1, least_rows), "page": 0}.get(axis, 1)
        edges: tuple[int, ...] = ()
        if axis == "length":
            pages = draw(numbers(1, max(1, reach.length // PAGE)))
            edges = tuple(pages * PAGE + step for step in (-1, 0, 1))
        value = draw(numbers(low, getattr(reach, axis), edges))
        return axes[axis](case, value, draw(st.integers(0, RATIO * SHORT)))

    return cases()


def at_length(case: Any, length: int, other: int) -> Any:
    """One row of this length among rows as short as they were."""
    rows = [list(row) for row in case.lengths] or [[0]]
    rows[other % len(rows)][-1] = length
    names = {name: getattr(case, name) for name in ("request_ids", "row_ids")} if case.lengths else {}
    return replace(case, **PLAIN | names, lengths=tuple(map(tuple, rows)), alias="shared", prefix=0)


def at_next_n(case: Any, rows: int, start: int) -> Any:
    """One request of so many causal rows, as a prefill or a long draft."""
    flat = tuple(min(n, SHORT) for n in causal_lengths(start, rows))
    return replace(case, **PLAIN, lengths=(flat,), prefix=0)


def at_requests(case: Any, requests: int, start: int) -> Any:
    """So many requests of ascending lengths under one shared prefix, so that their pages are few."""
    lengths = tuple((n,) for n in causal_lengths(start, requests))
    longest = max((row[0] for row in lengths), default=0)
    return replace(case, **PLAIN, lengths=lengths, prefix=-(-longest // PAGE))


def at_table_width(case: Any, width: int, other: int) -> Any:
    """A block table of so many columns, or as many as the case needs."""
    return replace(case, width=max(width, case.pages))


def at_result_width(case: Any, width: int, other: int) -> Any:
    """A result, or logits, of so many columns, or as many as the case needs."""
    return replace(case, max_len=max(width, case.longest))


def at_page(case: Any, page: int, other: int) -> Any:
    """The last page in use has about this number, in a pool that begins at page 0."""
    most = case.requests * max(1, case.pages) + case.spare  # as many pages as the case can use, in any order
    return replace(case, base=max(0, page - most + 1))


AXES: Axes = {
    "length": at_length,
    "next_n": at_next_n,
    "requests": at_requests,
    "table_width": at_table_width,
    "result_width": at_result_width,
    "page": at_page,
}


def borders(base: Any, dimensions: Sequence[Dimension], axes: Axes, reach: Reach) -> Iterator[Any]:
    """Both ends of every bucket of every axis, and every name of the dimensions over a block table that have names: one
    dimension per case, the rest of it as in `base`, so that a failure names its dimension."""
    for each in dimensions:
        if each.name in axes:
            most = getattr(reach, each.name)
            for bits in range(each.low.bit_length(), most.bit_length() + 1):
                first, last = each.borders(bits)
                for value in dict.fromkeys((first, min(last, most))):
                    yield axes[each.name](base, value, 2 * bits)
        elif each.among == VIEWS:
            for view in VIEWS[1:]:
                yield with_view(base, each.name, view)
    yield from (replace(base, tail=tail) for tail in TAILS)
    yield from (replace(base, poison=poison) for poison in POISONS)
    yield from (replace(base, clean=clean) for clean in (False, True))
    one, two, three = ((130,),), ((70, 130),), ((130,), (7,))
    yield from (replace(base, lengths=lengths, singletons=True) for lengths in (one, two, three))
    yield from (replace(base, lengths=lengths) for lengths in (((130, 5, 64),), ((130, 130),), ((1,),)))


def with_view(case: Any, name: str, view: str) -> Any:
    """The case with one operand lying in its storage as `view` says."""
    words = view.split("+")
    offsets = (name,) if "offset" in words else ()
    if name == "pool":
        return replace(case, gap=GAP if "gap" in words else 0, offsets=offsets)
    return replace(case, strides=(name,) if "gap" in words else (), offsets=offsets)


def reseeded(cases: Iterator[Any]) -> list[Any]:
    """The cases under different seeds, odd and even ones, without repetitions."""
    return list(dict.fromkeys(replace(case, seed=case.seed + place) for place, case in enumerate(cases)))

"""The domain that operations over a block table share: dimensions, how far a machine can go, and cases that go there.

A stretched case goes far in one dimension and is ordinary in the others; an axis is a dimension of numbers with a
function (case, value, other number) -> the case with this value there.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.contract import Contract
from parity.domain.dimensions import Coverage, Dimension, Domain, Promise, numbers
from parity.domain.notation import RATIO, causal_lengths
from parity.domain.profiles import Profile
from parity.ops.shared.case import POISONS, TAILS
from parity.pages.layout import PAGE
from parity.pages.placement import MAX_PAGE, place
from parity.run.implementation import Implementation

LONGEST = 1 << 18
"""Largest context length drawn, in compressed keys: a prompt of a million tokens."""
MOST_ROWS, MOST_REQUESTS, WIDEST, MOST_K = 4096, 1024, 8192, 2048
INTERPRETED = {"length": (1 << 14) - 1, "next_n": 511, "requests": 63, "result_width": (1 << 16) - 1}
"""How far an interpreted kernel goes: a request costs milliseconds, and 16,384 keys half a second."""
NEAR = {"length": (1 << 13) - 1, "next_n": 255, "requests": 31, "table_width": 1023, "result_width": (1 << 13) - 1}
"""How far a profile goes that is meant to take seconds."""
VIEWS = ("packed", "gap", "offset", "gap+offset")


def view_of(case: Any, name: str) -> Iterable[str]:
    """How an operand lies in its storage, one of VIEWS."""
    gap = case.gap > 0 if name == "pool" else name in case.strides
    words = [word for word, there in (("gap", gap), ("offset", name in case.offsets)) if there]
    return ("+".join(words) or "packed",)


def orders_of(case: Any) -> Iterable[str]:
    """How the lengths of the rows of each request follow each other."""
    for row in case.lengths:
        if len(row) == 1:
            yield "one row"
        elif len(set(row)) == 1:
            yield "equal"
        else:
            yield "ascending" if all(a <= b for a, b in pairwise(row)) else "free"


def last_page(case: Any) -> Iterable[int]:
    """The largest physical page in use."""
    plan = place(case)
    if plan.used:
        yield int(plan.physical[: plan.used].max())


SINGLETONS = Dimension(
    "singletons",
    "strides of axes of size one",
    lambda case: ("own" if case.singletons else "natural",),
    among=("natural", "own"),
    free=True,
)


def paged_dimensions(data: Sequence[str], views: Iterable[str]) -> tuple[Dimension, ...]:
    """The dimensions of every case over a block table, with an operation's data classes and operands."""
    return (
        Dimension(
            "length", "context length of a row, in keys", lambda c: {n for r in c.lengths for n in r}, 0, LONGEST
        ),
        Dimension("next_n", "rows per request", lambda case: (case.next_n,), 1, MOST_ROWS),
        Dimension("requests", "rows of the block table", lambda case: (case.requests,), 0, MOST_REQUESTS),
        Dimension("table_width", "columns of the block table", lambda case: (case.table_width,), 1, WIDEST),
        Dimension("result_width", "columns of the logits", lambda case: (case.max_context_len,), 1, LONGEST),
        Dimension("page", "largest physical page in use", last_page, 0, MAX_PAGE),
        Dimension("order", "lengths of a request's rows", orders_of, among=("one row", "equal", "ascending", "free")),
        Dimension("data", "class of the values", lambda case: (case.data,), among=tuple(data), free=True),
        Dimension("tail", "table past the last page", lambda case: (case.tail,), among=TAILS, free=True),
        Dimension("poison", "what may not be read", lambda case: (case.poison,), among=POISONS, free=True),
        Dimension("clean", "clean_logits", lambda c: ("yes" if c.clean else "no",), among=("yes", "no"), free=True),
        *(
            Dimension(name, "how it lies in its storage", partial(view_of, name=name), among=VIEWS, free=True)
            for name in sorted(views)
        ),
        SINGLETONS,
    )


@dataclass(frozen=True)
class Reach:
    """The largest of each number that an implementation is judged at here, and why not further."""

    length: int = LONGEST
    next_n: int = MOST_ROWS
    requests: int = MOST_REQUESTS
    table_width: int = WIDEST
    result_width: int = LONGEST
    page: int = MAX_PAGE
    k: int = MOST_K
    why: str = ""

    def nearer(self, limits: Mapping[str, int], why: str) -> "Reach":
        """No further than the limits, for this reason too."""
        least = {name: min(getattr(self, name), most) for name, most in limits.items()}
        return replace(self, **least, why=", ".join(filter(None, (self.why, why))))


def reach(impl: Implementation, profile: Profile, device: torch.device) -> Reach:
    """How far cases for an implementation go on a device."""
    found = Reach()
    if not profile.far:
        found = found.nearer(NEAR, f"profile {profile.name}")
    return found.nearer(INTERPRETED, "interpreted") if impl.interpreted else found


def promised(dimensions: Sequence[Dimension], far: Reach) -> dict[str, tuple[str, ...]]:
    """The buckets of all dimensions, of those that a reach limits up to there."""
    return {
        each.name: each.up_to(getattr(far, each.name)) if hasattr(far, each.name) else each.buckets
        for each in dimensions
    }


def fit_paged(case: Any, contract: Contract) -> Any:
    """The case within what a contract accepts: the nearest one by structure, with the values of its seed."""
    if not contract.restrictions:
        return case
    strides = tuple(name for name in case.strides if name not in contract.contiguous)
    gap = 0 if "pool" in contract.contiguous or not contract.page_gap else getattr(case, "gap", 0)
    changes: dict[str, Any] = {
        "strides": strides,
        "offsets": case.offsets if contract.storage_offset else (),
        "singletons": case.singletons and contract.singleton_strides,
        "clean": {"any": case.clean, "never": False, "always": True}[contract.clean_logits],
    }
    changes |= {"gap": gap} if hasattr(case, "gap") else {}
    if contract.table_tail == "valid":
        changes |= {"tail": "canary", "spare": max(1, case.spare)}
    case = _fit_rows(replace(case, **changes), contract)
    width = max(case.width or 0, contract.min_pages) if case.width is not None or contract.min_pages else None
    step = contract.width_multiple
    max_len = -(-case.max_context_len // step) * step if step > 1 else case.max_len
    return replace(case, width=None if width is None else max(width, case.pages), max_len=max_len)


def _fit_rows(case: Any, contract: Contract) -> Any:
    """Rows per request, requests and the order of lengths as the contract has them."""
    lengths = case.lengths
    if contract.next_n and case.next_n not in contract.next_n and lengths:
        rows = min(contract.next_n, key=lambda n: (abs(n - case.next_n), n))
        lengths = tuple((row + row[-1:] * rows)[:rows] for row in lengths)
    if contract.max_rows is not None and lengths:
        # Fewer requests first; a request of too many rows is cut where the contract leaves that open.
        lengths = lengths[: max(1, contract.max_rows // len(lengths[0]))]
        if not contract.next_n:
            lengths = tuple(row[: contract.max_rows] for row in lengths)
    if contract.lengths == "ascending":
        lengths = tuple(tuple(sorted(row)) for row in lengths)
    if lengths == case.lengths:
        return case
    same = len(lengths) == case.requests and all(len(row) == case.next_n for row in lengths)
    names = {} if same else {"request_ids": None, "row_ids": None}
    return replace(case, **names, lengths=lengths)


def narrowed(promise: dict[str, tuple[str, ...]], domain: Domain, cases: Iterable[Any], contract: Contract) -> Promise:
    """The buckets of a promise that a contract leaves: those that one of the cases, made to fit it, still has."""
    if not contract.restrictions:
        return promise
    left = Coverage(domain.dimensions)
    for case in cases:
        left.add(domain.fit(case, contract))
    return {name: tuple(each for each in buckets if left.count(name, each)) for name, buckets in promise.items()}


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
    yield replace(base, lengths=((7,),), perm=0)  # on page 0 of the pool


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

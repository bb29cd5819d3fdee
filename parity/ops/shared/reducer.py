"""How a failing case of an operation over a block table is reduced: fewest rows, pages, keys and heads.

Each operation lists the passes that apply to it, in their order.
"""

from dataclasses import replace
from typing import Any

from parity.domain.reducer import Search, descend, fewer, try_values
from parity.ops.shared import metamorphic
from parity.ops.shared.case import PagedCase
from parity.pages.layout import PAGE
from parity.pages.placement import place

# Values that explain themselves, tried field by field; the first that still fails is kept.
SIMPLE: tuple[tuple[str, tuple], ...] = (
    ("width", (None,)),
    ("max_len", (None,)),
    ("base", (0,)),
    ("strides", ((),)),
    ("offsets", ((),)),
    ("singletons", (False,)),
    ("gap", (0, 16)),
    ("spare", (1, 2)),
    ("clean", (True,)),
    ("poison", ("nan",)),
    ("tail", ("minus1",)),
    ("alias", ("shared",)),
    ("prefix", (0,)),
    ("perm", (0, 1)),
)
# Tried last, because they change the values: another name or seed for the same structure.
RENAMED: tuple[tuple[str, tuple], ...] = (
    ("row_ids", (None,)),
    ("request_ids", (None,)),
    ("page_ids", (None,)),
    ("period", (0,)),
    ("seed", (0, 1)),
)


OTHER_SEEDS = 8  # what a key of the wrong value needs: half of all dots are negative and show nothing
MOST_KEYS = 1 << 16  # zeroing keys one set at a time is for cases that have become small


def simple(search: Search[Any]) -> None:
    try_values(search, SIMPLE)
    for name in search.case.strides:
        search.accept(replace(search.case, strides=tuple(n for n in search.case.strides if n != name)), "strides")


def renamed(search: Search[Any]) -> None:
    try_values(search, RENAMED)


def reseeded(search: Search[Any]) -> None:
    """One key on the last page under another seed, where the key that fails is a later one only by its value."""
    cap = PAGE * (search.case.pages - 1) + 1
    if search.case.longest <= max(1, cap):
        return
    lengths = tuple(tuple(min(n, cap) for n in row) for row in search.case.lengths)
    bare = replace(_with_lengths(search.case, lengths), only_keys=None)
    for seed in range(OTHER_SEEDS):
        if search.accept(replace(bare, seed=seed), "seed"):
            break


def requests(search: Search[Any]) -> None:
    start = search.case
    fewer(range(start.requests), lambda rest: search.accept(metamorphic.keep_requests(start, rest).case, "requests"))


def columns(search: Search[Any]) -> None:
    start = search.case
    fewer(range(start.next_n), lambda rest: search.accept(metamorphic.keep_columns(start, rest).case, "rows"))


def rows(search: Search[Any]) -> None:
    """Rows of several requests at once, each as a request of its own; changes next_n, so it comes after _columns."""
    start = search.case
    if start.rows > 1 and start.next_n > 1:
        fewer(range(start.rows), lambda rest: search.accept(metamorphic.keep_rows(start, rest).case, "rows"))


def _with_lengths(case: PagedCase, lengths: tuple[tuple[int, ...], ...]) -> PagedCase:
    """Other lengths under the same spare width of table and result."""
    bare = replace(case, lengths=lengths, width=None, max_len=None)
    width = None if case.width is None else max(bare.pages, case.width - max(0, case.pages - bare.pages))
    max_len = None if case.max_len is None else max(bare.longest, case.max_len - max(0, case.longest - bare.longest))
    return replace(bare, width=width, max_len=max_len)


def lengths(search: Search[Any]) -> None:
    """One cap for all rows, then each row by itself: the shortest that still fails, by halving steps."""

    def capped(cap: int) -> PagedCase:
        return _with_lengths(search.case, tuple(tuple(min(n, cap) for n in row) for row in search.case.lengths))

    descend(search.case.longest, lambda cap: search.accept(capped(cap), "keys"))
    if search.case.rows > 64:
        return
    for request in range(search.case.requests):
        for inner in range(search.case.next_n):

            def one(length: int, request: int = request, inner: int = inner) -> PagedCase:
                rows = [list(row) for row in search.case.lengths]
                rows[request][inner] = length
                return _with_lengths(search.case, tuple(tuple(row) for row in rows))

            descend(search.case.lengths[request][inner], lambda n: search.accept(one(n), "keys"))


def pages(search: Search[Any]) -> None:
    """Drops logical pages of every request, also from the middle: the keys behind move forward with their values."""
    start = search.case
    ids = tuple(range(start.pages)) if start.page_ids is None else start.page_ids[: start.pages]

    def keep(rest: list[int]) -> bool:
        if len(rest) == start.pages:
            return False
        lengths = tuple(tuple(sum(_within(n, page) for page in rest) for n in row) for row in start.lengths)
        try:
            smaller = _with_lengths(replace(start, page_ids=None), lengths)
            smaller = replace(smaller, page_ids=tuple(ids[page] for page in rest))
        except ValueError:
            return False
        return search.accept(smaller, "pages")

    fewer(range(start.pages), keep)


def _within(length: int, page: int) -> int:
    """Keys of a page that a row of this length sees."""
    return min(PAGE, max(0, length - page * PAGE))


def keys(search: Search[Any]) -> None:
    """Zeroes keys: those that are left matter."""
    start = search.case
    if start.only_keys is None:
        plan = place(start)
        if plan.visible.sum() > MOST_KEYS:
            return
        names = {int(p) * PAGE + o for p, n in zip(plan.page, plan.visible, strict=True) for o in range(int(n))}
    else:
        names = set(start.only_keys)
    fewer(sorted(names), lambda rest: search.accept(replace(start, only_keys=tuple(rest)), "keys"))

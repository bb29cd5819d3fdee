"""From a failing case to the smallest one that fails in the same way: fewest rows, pages, keys and heads.

Works where Hypothesis cannot: below the drawn structure, on the logical rows, pages, keys and heads themselves, which
keep their values when others go. Greedy and deterministic; every step is a case that was seen to fail.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from parity.ops.paged_logits.case import HEADS, Case
from parity.ops.shared import metamorphic
from parity.pages.layout import PAGE
from parity.pages.placement import place

# Values that explain themselves, tried field by field; the first that still fails is kept.
SIMPLE: tuple[tuple[str, tuple], ...] = (
    ("width", (None,)),
    ("max_len", (None,)),
    ("strides", ((),)),
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
    ("seed", (0, 1)),
)


OTHER_SEEDS = 8  # what a key of the wrong value needs: half of all dots are negative and show nothing
MOST_KEYS = 1 << 16  # zeroing keys one set at a time is for cases that have become small


class Step(NamedTuple):
    """One success of the reducer: what it did, the case it found, and the calls made so far."""

    what: str
    case: Case
    calls: int


def reduce_case(
    case: Case,
    still_fails: Callable[[Case], bool],
    budget: int = 300,
    on_step: Callable[[Step], None] | None = None,
) -> Case:
    """The smallest case found for which `still_fails` is true, calling it at most `budget` times.

    `still_fails` must be true only for the failure in question (the same check, not any other). on_step is told of
    every success. A failure that does not repeat on `case` itself is not reduced: the case comes back unchanged.
    ValueError if budget is below 1.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 call, got {budget}")
    if case.stage == "store":
        from parity.ops.store.case import reduce_store_case

        return reduce_store_case(case, still_fails, budget)  # type: ignore
    if case.stage == "compressor":
        return case  # a script of calls is as small as Hypothesis has made it
    search = _Search(case, still_fails, budget, on_step)
    if not search.confirm():
        return case
    passes = (_simple, _requests, _columns, _rows, _top, _lengths, _pages, _heads, _keys, _renamed, _reseeded)
    while not search.exhausted:
        before = search.case
        for attempt in passes:
            attempt(search)
        if search.case == before:
            break
    return search.case


class _Search:
    """The best case so far, the calls left, and what was tried."""

    def __init__(self, case: Case, still_fails: Callable[[Case], bool], budget: int, on_step) -> None:
        self.case = case
        self._still_fails = still_fails
        self._budget = budget
        self._on_step = on_step
        self._calls = 0
        self._tried = {case}

    @property
    def exhausted(self) -> bool:
        return self._calls >= self._budget

    def confirm(self) -> bool:
        self._calls += 1
        return self._still_fails(self.case)

    def accept(self, candidate: Case, what: str) -> bool:
        """Whether the candidate is new, affordable and fails; then it is the best case."""
        candidate = metamorphic.canonical(candidate)
        if self.exhausted or candidate in self._tried:
            return False
        self._tried.add(candidate)
        self._calls += 1
        if not self._still_fails(candidate):
            return False
        self.case = candidate
        if self._on_step is not None:
            self._on_step(Step(what, candidate, self._calls))
        return True


def _fewer(items: Sequence, keep: Callable[[list], bool]) -> None:
    """Drops halves, quarters, ... single items, last ones first, as long as `keep` accepts a rest that is not empty."""
    kept = list(items)
    size = len(kept) // 2
    while size:
        stop = len(kept)
        while stop > 0:
            rest = kept[: max(0, stop - size)] + kept[stop:]
            if rest and keep(rest):
                kept = rest
            stop -= size
        size //= 2


def _simple(search: _Search) -> None:
    _try_values(search, SIMPLE)
    for name in search.case.strides:
        search.accept(replace(search.case, strides=tuple(n for n in search.case.strides if n != name)), "strides")


def _renamed(search: _Search) -> None:
    _try_values(search, RENAMED)


def _reseeded(search: _Search) -> None:
    """One key on the last page under another seed, where the key that fails is a later one by its value alone."""
    cap = PAGE * (search.case.pages - 1) + 1
    if search.case.stage != "logits" or search.case.longest <= max(1, cap):
        return
    lengths = tuple(tuple(min(n, cap) for n in row) for row in search.case.lengths)
    bare = replace(_with_lengths(search.case, lengths), only_keys=None)
    for seed in range(OTHER_SEEDS):
        if search.accept(replace(bare, seed=seed), "seed"):
            break


def _try_values(search: _Search, table: Iterable[tuple[str, tuple]]) -> None:
    for name, choices in table:
        for value in choices:
            current = getattr(search.case, name)
            if current == value:
                break  # nothing simpler is left
            candidate = _valid(search.case, **{name: value})
            if candidate is not None and search.accept(candidate, name):
                break


def _valid(case: Case, **changes) -> Case | None:
    """The changed case, or None where the change is not a legal case."""
    try:
        return replace(case, **changes)
    except ValueError:
        return None


def _requests(search: _Search) -> None:
    start = search.case
    _fewer(range(start.requests), lambda rest: search.accept(metamorphic.keep_requests(start, rest).case, "requests"))


def _columns(search: _Search) -> None:
    start = search.case
    _fewer(range(start.next_n), lambda rest: search.accept(metamorphic.keep_columns(start, rest).case, "rows"))


def _rows(search: _Search) -> None:
    """Rows of several requests at once, each as a request of its own; changes next_n, so it comes after _columns."""
    start = search.case
    if start.rows > 1 and start.next_n > 1:
        _fewer(range(start.rows), lambda rest: search.accept(metamorphic.keep_rows(start, rest).case, "rows"))


def _with_lengths(case: Case, lengths: tuple[tuple[int, ...], ...]) -> Case:
    """Other lengths under the same spare width of table and result."""
    bare = replace(case, lengths=lengths, width=None, max_len=None)
    width = None if case.width is None else max(bare.pages, case.width - max(0, case.pages - bare.pages))
    max_len = None if case.max_len is None else max(bare.longest, case.max_len - max(0, case.longest - bare.longest))
    return replace(bare, width=width, max_len=max_len)


def _lengths(search: _Search) -> None:
    """One cap for all rows, then each row alone: the shortest that still fails, by halving steps."""

    def capped(cap: int) -> Case:
        return _with_lengths(search.case, tuple(tuple(min(n, cap) for n in row) for row in search.case.lengths))

    _descend(search.case.longest, lambda cap: search.accept(capped(cap), "keys"))
    if search.case.rows > 64:
        return
    for request in range(search.case.requests):
        for inner in range(search.case.next_n):

            def one(length: int, request: int = request, inner: int = inner) -> Case:
                rows = [list(row) for row in search.case.lengths]
                rows[request][inner] = length
                return _with_lengths(search.case, tuple(tuple(row) for row in rows))

            _descend(search.case.lengths[request][inner], lambda n: search.accept(one(n), "keys"))


def _descend(value: int, accept: Callable[[int], bool]) -> int:
    """A local minimum of an accepted integer: tries 0, then steps down by halving amounts."""
    if value and accept(0):
        return 0
    step = value // 2
    while step:
        while value - step > 0 and accept(value - step):
            value -= step
        step //= 2
    return value


def _pages(search: _Search) -> None:
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

    _fewer(range(start.pages), keep)


def _within(length: int, page: int) -> int:
    """Keys of a page that a row of this length sees."""
    return min(PAGE, max(0, length - page * PAGE))


def _heads(search: _Search) -> None:
    if search.case.stage != "logits":
        return
    for heads in HEADS:
        chosen = search.case.only_heads
        if heads < search.case.heads and (not chosen or chosen[-1] < heads):
            search.accept(replace(search.case, heads=heads), "heads")
    start = search.case
    _fewer(
        range(start.heads) if start.only_heads is None else start.only_heads,
        lambda rest: search.accept(replace(start, only_heads=tuple(rest)), "heads"),
    )


def _keys(search: _Search) -> None:
    """Zeroes keys: those left alone matter."""
    start = search.case
    if start.only_keys is None:
        plan = place(start)
        if plan.visible.sum() > MOST_KEYS:
            return
        names = {int(p) * PAGE + o for p, n in zip(plan.page, plan.visible, strict=True) for o in range(int(n))}
    else:
        names = set(start.only_keys)
    _fewer(sorted(names), lambda rest: search.accept(replace(start, only_keys=tuple(rest)), "keys"))


def _top(search: _Search) -> None:
    if search.case.stage == "topk":
        _descend(search.case.k, lambda k: k > 0 and search.accept(replace(search.case, k=k), "k"))

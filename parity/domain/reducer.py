"""From a failing case to the smallest one that fails in the same way: the search that every operation's reducer shares.

Works where Hypothesis cannot: below the drawn structure, on a case's own rows, pages, keys or tokens, which keep their
values when others go. Greedy and deterministic; every step is a case that was seen to fail.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

from parity.domain.fields import CaseString, defaults

T = TypeVar("T", bound=CaseString)


class Step(NamedTuple):
    """One success of the reducer: what it did, the case it found, and the calls made so far."""

    what: str
    case: Any
    calls: int


OnStep = Callable[[Step], None]


class Search(Generic[T]):
    """The best case so far, the calls left, and what was tried."""

    def __init__(
        self,
        case: T,
        still_fails: Callable[[T], bool],
        budget: int,
        on_step: OnStep | None,
        canonical: Callable[[T], T],
    ) -> None:
        self.case = case
        self._still_fails = still_fails
        self._budget = budget
        self._on_step = on_step
        self._canonical = canonical
        self._calls = 0
        self._tried = {case}

    @property
    def exhausted(self) -> bool:
        """Whether no call is left."""
        return self._calls >= self._budget

    def confirm(self) -> bool:
        """Whether the first case fails at all."""
        self._calls += 1
        return self._still_fails(self.case)

    def accept(self, candidate: T, what: str) -> bool:
        """Whether the candidate is new, affordable and fails; then it is the best case."""
        candidate = self._canonical(candidate)
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


Pass = Callable[[Search[Any]], None]


def reduce_case(
    case: T,
    still_fails: Callable[[T], bool],
    budget: int = 300,
    on_step: OnStep | None = None,
    passes: Sequence[Pass] | None = None,
    canonical: Callable[[T], T] = lambda case: case,
) -> T:
    """The smallest case found for which `still_fails` is true, calling it at most `budget` times.

    `still_fails` must be true only for the failure in question (the same check, not any other). on_step is called with
    every success. passes are gone through until none helps; by default the fields are set to their defaults. A
    failure that does not repeat on `case` itself is not reduced. ValueError if budget is below 1.
    """
    if budget < 1:
        raise ValueError(f"budget must be at least 1 call, got {budget}")
    search = Search(case, still_fails, budget, on_step, canonical)
    if not search.confirm():
        return case
    if passes is None:
        table = [(name, (value,)) for name, value in defaults(type(case)).items()]
        passes = (lambda search: try_values(search, table),)
    while not search.exhausted:
        before = search.case
        for attempt in passes:
            attempt(search)
        if search.case == before:
            break
    return search.case


def fewer(items: Sequence[Any], keep: Callable[[list[Any]], bool]) -> None:
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


def try_values(search: Search[Any], table: Iterable[tuple[str, tuple[Any, ...]]]) -> None:
    """Sets the fields that the table names to its values, one by one; the first that fails is kept."""
    for name, choices in table:
        if not hasattr(search.case, name):
            continue
        for value in choices:
            if getattr(search.case, name) == value:
                break  # nothing simpler is left
            candidate = valid(search.case, **{name: value})
            if candidate is not None and search.accept(candidate, name):
                break


def valid(case: T, **changes: Any) -> T | None:
    """The changed case, or None where the change is not a legal case."""
    try:
        return replace(case, **changes)  # type: ignore[type-var]
    except ValueError:
        return None


def descend(value: int, accept: Callable[[int], bool]) -> int:
    """A local minimum of an accepted integer: tries 0, then steps down by halving amounts."""
    if value and accept(0):
        return 0
    step = value // 2
    while step:
        while value - step > 0 and accept(value - step):
            value -= step
        step //= 2
    return value

"""The dimensions of an operation's problems, in buckets, and the count of what was judged in each.

A dimension is one way in which cases differ: a length, a number of rows, a kind of view, a data class. Numbers fall
into the buckets 0, 1, 2..3, 4..7, ... of their binary length, because kernels branch, split and overflow at powers of
two. One declaration serves the drawing of cases, the check that goes to every border, and the coverage of a verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import combinations
from typing import Any, Self, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")


@dataclass(frozen=True)
class Dimension:
    """One way in which the cases of an operation differ.

    name    as coverage says it
    about   one phrase
    of      case -> the values that the case takes: one, or one per row
    among   its values, where they are names or few numbers; else low .. high, integers in buckets of binary length
    free    drawn for itself, whatever the others are: its pairs with other free dimensions are counted too
    """

    name: str
    about: str
    of: Callable[[Any], Iterable[Any]]
    low: int = 0
    high: int = 0
    among: tuple[Any, ...] = ()
    free: bool = False

    @cached_property
    def buckets(self) -> tuple[str, ...]:
        """The names of its buckets, in order."""
        if self.among:
            return tuple(map(str, self.among))
        return tuple(_name(*self.borders(bits)) for bits in range(self.low.bit_length(), self.high.bit_length() + 1))

    def bucket(self, value: Any) -> str:
        """The bucket of a value; a number outside of low .. high counts in the nearest."""
        if self.among:
            return str(value)
        return _name(*self.borders(min(max(value, self.low), self.high).bit_length()))

    def borders(self, bits: int) -> tuple[int, int]:
        """The smallest and the largest number of `bits` binary digits that the dimension has."""
        return max(self.low, 1 << (bits - 1) if bits else 0), min(self.high, (1 << bits) - 1)

    def up_to(self, most: int) -> tuple[str, ...]:
        """The buckets of numbers that begin at `most` or below."""
        return tuple(
            name for bits, name in enumerate(self.buckets, self.low.bit_length()) if self.borders(bits)[0] <= most
        )

    def spans(self, buckets: Collection[str]) -> str:
        """Some of its buckets in a few words: neighbouring ones of numbers as one range, names joined by commas."""
        if self.among and set(buckets) >= set(self.buckets):
            return f"all {len(self.buckets)}"
        if self.among:
            return ", ".join(bucket for bucket in self.buckets if bucket in buckets)
        runs: list[tuple[int, int]] = []
        for bits, name in enumerate(self.buckets, self.low.bit_length()):
            if name in buckets:
                first, last = self.borders(bits)
                if runs and runs[-1][1] == first - 1:
                    first = runs.pop()[0]
                runs.append((first, last))
        return ", ".join(f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in runs)


def _name(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}..{last}"


def mostly(usual: st.SearchStrategy[T], rare: st.SearchStrategy[T], every: int) -> st.SearchStrategy[T]:
    """`usual`, and `rare` in one of `every` places; shrinks toward `usual`.

    Hypothesis's `one_of` counts a strategy once, however often it is named.
    """

    @st.composite
    def chosen(draw: st.DrawFn) -> T:
        return draw(rare if draw(st.integers(1, every)) == every else usual)

    return chosen()


@st.composite
def numbers(draw: st.DrawFn, low: int, high: int, edges: Sequence[int] = ()) -> int:
    """Integers of low .. high: one of the `edges`, or of a bucket drawn evenly its ends, the number after its first, or
    any. Shrinks to `low`."""
    near = [edge for edge in edges if low <= edge <= high]
    if near and draw(st.integers(0, 2)) == 2:
        return draw(st.sampled_from(near))
    bits = draw(st.integers(low.bit_length(), high.bit_length()))
    first, last = max(low, 1 << (bits - 1) if bits else 0), min(high, (1 << bits) - 1)
    border = draw(st.sampled_from((first, last, min(first + 1, last), None)))
    return draw(st.integers(first, last)) if border is None else border


Promise = Mapping[str, Collection[str]]
"""By dimension, the buckets that a profile promises to judge for an implementation on a device."""


@dataclass(frozen=True)
class Domain:
    """Which problems an operation has.

    dimensions  in the order of the report
    promise     (implementation, profile, device) -> (the buckets that the checks go to, why not to the others)
    fit         (case, contract) -> the case within what the contract accepts
    """

    dimensions: tuple[Dimension, ...] = ()
    promise: Callable[[Any, Any, Any], tuple[Promise, str]] = lambda impl, profile, device: ({}, "")
    fit: Callable[[Any, Any], Any] = lambda case, contract: case


@dataclass
class Coverage:
    """How many examples were judged in each bucket of each dimension, and which pairs of buckets met.

    An example counts only where its check could have failed: whoever calls `add` has seen that cells were compared.
    """

    dimensions: tuple[Dimension, ...]
    reached: dict[str, Counter[str]] = field(default_factory=dict)
    pairs: int = 0

    def add(self, case: Any) -> None:
        """Count one judged case."""
        found = {each.name: {each.bucket(value) for value in each.of(case)} for each in self.dimensions}
        for name, buckets in found.items():
            self.reached.setdefault(name, Counter()).update(buckets)
        masks, once = _masks(self.dimensions), 0
        for each in self.dimensions:
            mask = 0
            for bucket in found[each.name]:
                mask |= masks.get((each.name, bucket), 0)
            self.pairs |= once & mask  # a pair is in the masks of its two buckets, and in no other
            once |= mask

    def count(self, dimension: str, bucket: str) -> int:
        """Examples that were judged in a bucket."""
        return self.reached[dimension][bucket] if dimension in self.reached else 0

    def merge(self, other: Coverage) -> None:
        """Add what another count of the same dimensions found."""
        for name, counts in other.reached.items():
            self.reached.setdefault(name, Counter()).update(counts)
        self.pairs |= other.pairs

    def to_json(self) -> dict[str, Any]:
        """JSON types; the pairs as a bit set in hexadecimal digits."""
        return {"reached": {name: dict(counts) for name, counts in self.reached.items()}, "pairs": f"{self.pairs:x}"}

    @classmethod
    def from_json(cls, given: Mapping[str, Any], dimensions: tuple[Dimension, ...]) -> Self:
        """What `to_json` wrote."""
        return cls(
            dimensions, {name: Counter(counts) for name, counts in given["reached"].items()}, int(given["pairs"], 16)
        )

    def facts(self, promise: Promise) -> dict[str, Any]:
        """What a report says of it: counts by bucket, in words what was judged and what was not, and four numbers."""
        judged = {each.name: [name for name in each.buckets if self.count(each.name, name)] for each in self.dimensions}
        left = {each.name: [name for name in each.buckets if name not in judged[each.name]] for each in self.dimensions}
        return {
            **self.to_json(),
            "judged": {each.name: each.spans(judged[each.name]) for each in self.dimensions if judged[each.name]},
            "not_judged": {each.name: each.spans(left[each.name]) for each in self.dimensions if left[each.name]},
            "buckets": [sum(map(len, judged.values())), sum(len(each.buckets) for each in self.dimensions)],
            "pairs_met": list(self.met(promise)),
        }

    def missed(self, promise: Promise) -> dict[str, list[str]]:
        """The promised buckets that no example was judged in, by dimension."""
        found = {
            each.name: [
                bucket
                for bucket in each.buckets
                if bucket in promise.get(each.name, ()) and not self.count(each.name, bucket)
            ]
            for each in self.dimensions
        }
        return {name: buckets for name, buckets in found.items() if buckets}

    def met(self, promise: Promise) -> tuple[int, int]:
        """(pairs of promised buckets of free dimensions that met in an example, pairs that there are)."""
        every = [
            at
            for at, one, a, other, b in _pairs(self.dimensions)
            if a in promise.get(one, ()) and b in promise.get(other, ())
        ]
        return sum(self.pairs >> at & 1 for at in every), len(every)


@cache
def _pairs(dimensions: tuple[Dimension, ...]) -> list[tuple[int, str, str, str, str]]:
    """(number, dimension, bucket, dimension, bucket) of every pair of buckets of two free dimensions."""

    def each() -> Iterator[tuple[str, str, str, str]]:
        for one, other in combinations([each for each in dimensions if each.free], 2):
            for a in one.buckets:
                for b in other.buckets:
                    yield one.name, a, other.name, b

    return [(at, *pair) for at, pair in enumerate(each())]


@cache
def _masks(dimensions: tuple[Dimension, ...]) -> dict[tuple[str, str], int]:
    """By dimension and bucket, the set of pairs that it is part of, as bits."""
    found: dict[tuple[str, str], int] = {}
    for at, one, a, other, b in _pairs(dimensions):
        for key in ((one, a), (other, b)):
            found[key] = found.get(key, 0) | 1 << at
    return found

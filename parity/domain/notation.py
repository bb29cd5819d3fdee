"""Compact text for the integer lists inside a case string: context lengths and sets of identifiers.

Lengths: `300` one row, `300x4` four rows of 300, `p100+7` seven causal rows, the first at token position 100; a row at
token position `pos` sees `(pos + 1) // RATIO` compressed keys. Identifiers: `5` and `3..9` (both ends included), `7x4`.
"""

import re
from collections.abc import Iterable, Sequence

RATIO = 4  # tokens a compressed key
EMPTY = "none"
LIST_LIMIT = 1 << 22  # numbers in a list: a typing error such as 1x99999999999 must not take all memory

_NUMBER = re.compile(r"[0-9]{1,12}\Z")
_REPEATED = re.compile(r"([0-9]{1,12})x([0-9]{1,12})\Z")
_CAUSAL = re.compile(r"p([0-9]{1,12})\+([0-9]{1,12})\Z")
_RANGE = re.compile(r"([0-9]{1,12})\.\.([0-9]{1,12})\Z")


def causal_lengths(start: int, count: int) -> tuple[int, ...]:
    """Context lengths of `count` rows of a prompt whose first row stands at token position `start`."""
    return tuple((position + 1) // RATIO for position in range(start, start + count))


def _constant_run(values: Sequence[int], first: int) -> int:
    stop = first + 1
    while stop < len(values) and values[stop] == values[first]:
        stop += 1
    return stop - first


def _causal_run(values: Sequence[int], first: int) -> tuple[int, int]:
    """Start position and row count of the longest causal run that begins at `first`; count 0 when there is none."""
    head = _constant_run(values, first)
    if head > RATIO or first + head >= len(values) or values[first + head] != values[first] + 1:
        return 0, 0
    start = RATIO * (values[first] + 1) - 1 - head  # position of the first row, counted back from the next length
    if start < 0:
        return 0, 0
    stop = first + head
    while stop < len(values) and values[stop] == (start + stop - first + 1) // RATIO:
        stop += 1
    return start, stop - first


def format_lengths(values: Sequence[int]) -> str:
    """Shortest of the three notations at each place, left to right; the same list always gives the same text."""
    items: list[str] = []
    place = 0
    while place < len(values):
        start, causal = _causal_run(values, place)
        constant = _constant_run(values, place)
        if causal > RATIO + 1:
            items.append(f"p{start}+{causal}")
            place += causal
        elif constant > 1:
            items.append(f"{values[place]}x{constant}")
            place += constant
        else:
            items.append(str(values[place]))
            place += 1
    return ",".join(items) if items else EMPTY


def parse_lengths(text: str) -> tuple[int, ...]:
    """Inverse of format_lengths; ValueError names the item that is none of the three notations."""
    values: list[int] = []
    for item in _items(text):
        if _NUMBER.match(item):
            values.extend([int(item)] * _count(1, item, values))
        elif found := _REPEATED.match(item):
            values.extend([int(found[1])] * _count(int(found[2]), item, values))
        elif found := _CAUSAL.match(item):
            values.extend(causal_lengths(int(found[1]), _count(int(found[2]), item, values)))
        else:
            raise ValueError(f"a length must be written n, nxm or p<start>+<count>, got {item!r}")
    return tuple(values)


def format_ids(values: Iterable[int]) -> str:
    """Runs of consecutive identifiers as `a..b`, of equal ones as `axn`, single ones as they are."""
    numbers = list(values)
    items: list[str] = []
    place = 0
    while place < len(numbers):
        stop = place + 1
        while stop < len(numbers) and numbers[stop] == numbers[stop - 1] + 1:
            stop += 1
        equal = _constant_run(numbers, place)
        if stop - place > 2:
            items.append(f"{numbers[place]}..{numbers[stop - 1]}")
            place = stop
        elif equal > 1:
            items.append(f"{numbers[place]}x{equal}")
            place += equal
        else:
            items.append(str(numbers[place]))
            place += 1
    return ",".join(items) if items else EMPTY


def parse_ids(text: str) -> tuple[int, ...]:
    """Inverse of format_ids; ValueError names the item that cannot be read."""
    values: list[int] = []
    for item in _items(text):
        if _NUMBER.match(item):
            values.extend([int(item)] * _count(1, item, values))
        elif found := _REPEATED.match(item):
            values.extend([int(found[1])] * _count(int(found[2]), item, values))
        elif found := _RANGE.match(item):
            low, high = int(found[1]), int(found[2])
            if high < low:
                raise ValueError(f"a range of identifiers must ascend, got {item!r}")
            _count(high - low + 1, item, values)
            values.extend(range(low, high + 1))
        else:
            raise ValueError(f"an identifier must be written n, a..b or nxm, got {item!r}")
    return tuple(values)


def _items(text: str) -> list[str]:
    return [] if text == EMPTY else text.split(",")


def _count(count: int, item: str, before: Sequence[int]) -> int:
    if not 1 <= count <= LIST_LIMIT - len(before):
        raise ValueError(f"a list item must stand for 1 number or more, a list for {LIST_LIMIT} at most, got {item!r}")
    return count

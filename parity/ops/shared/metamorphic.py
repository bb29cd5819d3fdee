"""Pairs of cases whose results must agree: each transform keeps logical values and changes placement or company.

A transform returns the other case and, for each of its rows, the row of the original case that has the same result.
Columns agree up to the shorter of the two results, within each row's context length.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from parity.ops.shared.case import POISONS, TAILS
from parity.pages.counter import mix_int
from parity.pages.placement import row_names, shuffled


class Pair(NamedTuple):
    """`case`, and `rows[i]`: the row of the original case whose result row i of `case` must repeat."""

    case: Any
    rows: tuple[int, ...]


def repeat(case: Any) -> Pair:
    """The same case again: a second run must give the same bits."""
    return Pair(case, tuple(range(case.rows)))


def permute_pages(case: Any, seed: int = 1) -> Pair:
    """The same pages at other physical places of the pool."""
    return repeat(replace(case, perm=1 + mix_int(2 * case.perm + seed) % (1 << 32)))


def alias_pages(case: Any) -> Pair:
    """Pages of equal content become one physical page (only a prefix, a repeated page or expanded rows have any)."""
    return repeat(replace(case, alias="shared"))


def copy_pages(case: Any) -> Pair:
    """Every table entry gets a physical page of its own."""
    return repeat(replace(case, alias="copied"))


def more_pages(case: Any, spare: int = 17) -> Pair:
    """A larger pool."""
    return repeat(replace(case, spare=case.spare + spare))


def other_gap(case: Any, gap: int = 4096) -> Pair:
    """Another distance between pages."""
    return repeat(replace(case, gap=gap if case.gap != gap else 0))


def widen_table(case: Any, extra: int = 3) -> Pair:
    """More columns in the block table than needed."""
    return repeat(replace(case, width=case.table_width + extra))


def other_max_len(case: Any, extra: int = 37) -> Pair:
    """A wider result."""
    return repeat(replace(case, max_len=case.max_context_len + extra))


def other_poison(case: Any) -> Pair:
    """Other contents of everything that may not be read: stale pages, gaps, and past each length."""
    return repeat(replace(case, poison=_next(POISONS, case.poison)))


def other_tail(case: Any) -> Pair:
    """Other rubbish in the table past each request's last page."""
    return repeat(replace(case, tail=_next(TAILS, case.tail), spare=max(1, case.spare)))


def other_strides(case: Any, strides: Sequence[str]) -> Pair:
    """Other operands as views with gaps."""
    return repeat(replace(case, strides=tuple(sorted(set(strides)))))


def permute_requests(case: Any, seed: int = 1) -> Pair:
    """The requests of the batch in another order; reversed when the shuffle would keep the order."""
    order = shuffled(case.requests, seed).tolist()
    return keep_requests(case, order if order != sorted(order) else order[::-1])


def keep_requests(case: Any, which: Sequence[int]) -> Pair:
    """Only the named requests, in the order given. ValueError if one is named twice or does not exist."""
    _check("which", which, case.requests)
    n = case.next_n
    rows = tuple(b * n + i for b in which for i in range(n))
    return Pair(_chosen(case, [case.lengths[b] for b in which], rows), rows)


def keep_columns(case: Any, which: Sequence[int]) -> Pair:
    """The named rows of every request, in the order given; next_n becomes their count. At least one must be named."""
    _check("which", which, case.next_n)
    if not which:
        raise ValueError("which must name at least one row of each request, got none")
    lengths = [tuple(request[i] for i in which) for request in case.lengths]
    rows = tuple(b * case.next_n + i for b in range(case.requests) for i in which)
    return Pair(_chosen(case, lengths, rows), rows)


def keep_rows(case: Any, which: Sequence[int]) -> Pair:
    """Only the named rows, each as a request of its own with next_n = 1 and a table row that names the same pages."""
    _check("which", which, case.rows)
    flat = [length for request in case.lengths for length in request]
    return Pair(_chosen(case, [(flat[row],) for row in which], tuple(which)), tuple(which))


def expand_rows(case: Any) -> Pair:
    """Every row as a request of its own, as engines without next_n call the kernel."""
    return keep_rows(case, range(case.rows))


def _chosen(case: Any, lengths: Sequence[tuple[int, ...]], rows: tuple[int, ...]) -> Any:
    """The case of some of its rows; table and result keep their width, names keep the values."""
    requests, names = row_names(case)
    next_n = len(lengths[0]) if lengths else 1
    request_ids = tuple(int(requests[row]) for row in rows[::next_n])
    row_ids = tuple(int(names[row]) for row in rows)
    chosen = replace(
        case,
        lengths=tuple(lengths),
        request_ids=request_ids,
        row_ids=row_ids,
        width=case.table_width,
        max_len=case.max_context_len,
    )
    return canonical(chosen)


def canonical(case: Any) -> Any:
    """The same case with every list and width that equals its default left out, so that it prints short."""
    changes: dict = {}
    if case.request_ids == tuple(range(case.requests)):
        changes["request_ids"] = None
    if case.row_ids == tuple(range(case.next_n)) * case.requests:
        changes["row_ids"] = None
    if case.page_ids is not None and case.page_ids == tuple(range(len(case.page_ids))):
        changes["page_ids"] = None
    if case.width == max(1, case.pages):
        changes["width"] = None
    if case.max_len == max(1, case.longest):
        changes["max_len"] = None
    return replace(case, **changes) if changes else case


def _check(name: str, which: Sequence[int], count: int) -> None:
    if len(set(which)) != len(which) or any(not 0 <= i < count for i in which):
        raise ValueError(f"{name} must name different numbers from 0 to {count - 1}, got {list(which)[:8]}")


def _next(choices: Sequence[str], value: str) -> str:
    return choices[(list(choices).index(value) + 1) % len(choices)]

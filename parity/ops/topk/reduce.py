"""How a failing case of top-k is reduced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.domain.reducer import OnStep, Search, descend, reduce_case
from parity.ops.shared.metamorphic import canonical
from parity.ops.shared.reducer import columns, keys, lengths, pages, renamed, requests, rows, simple
from parity.ops.topk.case import TopkCase


def top(search: Search[Any]) -> None:
    descend(search.case.k, lambda k: k > 0 and search.accept(replace(search.case, k=k), "k"))


PASSES = (simple, requests, columns, rows, top, lengths, pages, keys, renamed)


def reduce(
    case: TopkCase, still_fails: Callable[[TopkCase], bool], budget: int = 300, on_step: OnStep | None = None
) -> TopkCase:
    """See `parity.domain.reducer.reduce_case`."""
    return reduce_case(case, still_fails, budget, on_step, PASSES, canonical)

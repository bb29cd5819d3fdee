"""How a failing case of paged logits is reduced."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.domain.reducer import OnStep, Search, fewer, reduce_case
from parity.ops.paged_logits.case import HEADS, Case
from parity.ops.shared.metamorphic import canonical
from parity.ops.shared.reducer import columns, keys, lengths, pages, renamed, requests, reseeded, rows, simple


def heads(search: Search[Any]) -> None:
    for heads in HEADS:
        chosen = search.case.only_heads
        if heads < search.case.heads and (not chosen or chosen[-1] < heads):
            search.accept(replace(search.case, heads=heads), "heads")
    start = search.case
    fewer(
        range(start.heads) if start.only_heads is None else start.only_heads,
        lambda rest: search.accept(replace(start, only_heads=tuple(rest)), "heads"),
    )


PASSES = (simple, requests, columns, rows, lengths, pages, heads, keys, renamed, reseeded)


def reduce(case: Case, still_fails: Callable[[Case], bool], budget: int = 300, on_step: OnStep | None = None) -> Case:
    """See `parity.domain.reducer.reduce_case`."""
    return reduce_case(case, still_fails, budget, on_step, PASSES, canonical)

"""From a failing store case to the smallest one that fails in the same way: fewest tokens, then plain placement and
values."""

from collections.abc import Callable
from dataclasses import replace

from parity.domain.reducer import OnStep, Search, fewer, reduce_case, try_values
from parity.ops.store.case import StoreCase

# Values that explain themselves, tried in this order; the first that still fails is kept.
SIMPLE: tuple[tuple[str, tuple], ...] = (
    ("base", (0,)),
    ("gap", (0, 16)),
    ("strides", ((),)),
    ("offsets", ((),)),
    ("singletons", (False,)),
    ("skip", (0,)),
    ("fill", (0,)),
    ("perm", (0,)),
    ("place", ("order", "spread")),
    ("pages", (1, 2, 3, 4)),
    ("positions", ("near",)),
    ("weights", ("one",)),
    ("weight", ("f32",)),
    ("pooled", ("f32",)),
    ("eps_exponent", (6,)),
    ("data", ("onehot", "bell")),
    ("seed", (0, 1)),
)


def reduce(
    case: StoreCase, still_fails: Callable[[StoreCase], bool], budget: int = 300, on_step: OnStep | None = None
) -> StoreCase:
    """See `parity.domain.reducer.reduce_case`."""
    return reduce_case(case, still_fails, budget, on_step, (_tokens, _simple))


def _tokens(search: Search[StoreCase]) -> None:
    start = search.case
    fewer(start.ids, lambda rest: search.accept(replace(start, ids=tuple(rest)), "tokens"))


def _simple(search: Search[StoreCase]) -> None:
    try_values(search, SIMPLE)

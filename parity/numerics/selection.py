"""Is a selection a correct top-k of scores known within bounds? Exact, ties free; recall and regret beside it.

A set S is correct exactly when some scores inside the intervals make it a top-k: the smallest upper end inside S is at
least the largest lower end outside (raise S to its upper ends, lower the rest; and the condition is necessary, because
min_S high >= min_S x >= max_rest x >= max_rest low). All comparisons are in extended reals.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from parity.numerics.places import coordinates
from parity.pages.layout import PAGE
from parity.results import Labels, Status, Verdict

CHUNK_BYTES = 256 << 20


def judge_selection(
    slots: torch.Tensor,
    positions: torch.Tensor | None,
    low: torch.Tensor,
    high: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    k: int,
    *,
    rows: torch.Tensor | None = None,
    case: object = "",
    impl: str = "NAME",
    level: str = "selection",
    check: str = "",
    chunk_bytes: int = CHUNK_BYTES,
) -> Verdict:
    """Judges ``slots`` and ``positions`` int32 [R, k] against score intervals ``low`` and ``high`` [R, W].

    Pass the implementation's own logits as both to ask whether its top-k is one; NaN stands for [-inf, inf]. Columns
    at or past a row's length are not read. ``context_lens`` [B, next_n] and ``block_table`` [B, max_pages] are the
    case's; ``rows`` (int64 [R]) are the row numbers where not all T rows are given. ``positions`` None: only slots are
    returned, and positions are found by the block table (a page named twice in a row's table is then refused).

    Rules: min(k, n) entries first, then only -1; positions distinct and in [0, n); slots the table's image of
    positions; and the interval test. ``undecided`` is the share of the places whose keys the bound leaves open."""
    labels = Labels(level=level, check=check, case=str(case), impl=impl)
    if type(k) is not int or k < 1:
        raise ValueError(f"k must be an integer of at least 1, got {k!r}")
    device = low.device
    lens_all = context_lens.reshape(-1).to(device)
    rows = torch.arange(lens_all.numel(), device=device) if rows is None else rows.to(device)
    lens = lens_all[rows].to(torch.int64)
    for name, given in (("slots", slots), ("positions", positions)):
        if given is None:
            continue
        if not isinstance(given, torch.Tensor) or given.dtype != torch.int32 or tuple(given.shape) != (rows.numel(), k):
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else type(given).__name__
            return labels.failed(got=f"{name} {got}", wanted=f"torch.int32 {[rows.numel(), k]}")
    if low.shape != high.shape or low.shape[0] != rows.numel() or (rows.numel() and low.shape[1] < int(lens.max())):
        raise ValueError(
            f"low and high: expected [{rows.numel()}, at least the longest context length], got {list(low.shape)} and "
            f"{list(high.shape)}"
        )
    slots = slots.to(device)
    tables = block_table.to(device)[rows // context_lens.shape[1]].to(torch.int64)
    chosen = _positions_of(slots, tables, lens) if positions is None else positions.to(device).to(torch.int64)

    def where(row: int, key: int | None) -> dict[str, int]:
        return coordinates(int(rows[row]), key, context_lens, block_table)

    cells = int(torch.minimum(lens, lens.new_tensor(k)).sum())
    if broken := _broken_rule(slots.to(torch.int64), chosen, positions is None, tables, lens, k):
        row, rank, rule, value, right = broken
        return labels.failed(cells=cells, where=where(row, None), note=f"rank {rank}: {rule}", got=value, wanted=right)
    undecided, places = 0, 0
    step = max(1, chunk_bytes // max(1, 8 * 6 * low.shape[1]))
    for start in range(0, rows.numel(), step):
        part = slice(start, start + step)
        found = _compare(chosen[part], low[part], high[part], lens[part], k)
        if found.bad.any():
            row = int(found.bad.to(torch.uint8).argmax())
            inside, outside = int(found.weakest[row]), int(found.strongest[row])
            return labels.failed(
                cells=cells,
                where=where(start + row, inside),
                got=f"at most {float(found.inside[row]):.9g} selected",
                wanted=f"at least {float(found.outside[row]):.9g}, which key {outside} outside has",
                note=f"{int(found.bad.sum())} of {found.bad.numel()} rows are no top-{k}",
            )
        undecided += found.undecided
        places += found.places
    return labels.verdict(Status.PASSED, cells=cells, undecided=undecided / places if places else 0.0)


@dataclasses.dataclass(frozen=True)
class _Found:
    bad: torch.Tensor  # bool [R]
    inside: torch.Tensor  # smallest upper end inside, and where
    weakest: torch.Tensor
    outside: torch.Tensor  # largest lower end outside, and where
    strongest: torch.Tensor
    undecided: int
    places: int


def _compare(chosen: torch.Tensor, low: torch.Tensor, high: torch.Tensor, lens: torch.Tensor, k: int) -> _Found:
    """The interval test of rows whose positions already obey the rules."""
    width = low.shape[1]
    past = torch.arange(width, device=low.device) >= lens[:, None]
    low, high = (torch.where(low.isnan(), -math.inf, low), torch.where(high.isnan(), math.inf, high))
    taken = chosen >= 0
    picked = torch.zeros(low.shape, dtype=torch.bool, device=low.device)
    picked[taken.nonzero(as_tuple=True)[0], chosen[taken]] = True
    if width == 0:
        none = torch.zeros(low.shape[0], dtype=torch.int64, device=low.device)
        clean = torch.zeros(low.shape[0], dtype=torch.bool, device=low.device)
        return _Found(clean, none.double(), none, none.double(), none, 0, 0)
    inside, weakest = torch.where(picked, high, math.inf).min(1)
    outside, strongest = torch.where(picked | past, -math.inf, low).max(1)
    undecided, places = _undecided(low, high, past, lens, k)
    return _Found(inside < outside, inside, weakest, outside, strongest, undecided, places)


def _undecided(
    low: torch.Tensor, high: torch.Tensor, past: torch.Tensor, lens: torch.Tensor, k: int
) -> tuple[int, int]:
    """(keys in no or every top-k left out: keys that the bound leaves open; places to fill), over rows longer than k.

    A key is surely in when its lower end exceeds the (k+1)-th largest upper end, surely out when its upper end is below
    the k-th largest lower end. Exact ties have no width and do not count: they are free, not unknown."""
    longer = lens > k
    places = int(torch.minimum(lens, lens.new_tensor(k)).sum())
    if not bool(longer.any()):
        return 0, places
    low, high, past = low[longer], high[longer], past[longer]
    low, high = torch.where(past, -math.inf, low), torch.where(past, -math.inf, high)
    surely_in = low > high.topk(k + 1, dim=1).values[:, -1:]
    surely_out = high < low.topk(k, dim=1).values[:, -1:]
    return int((~past & (high > low) & ~surely_in & ~surely_out).sum()), places


def _broken_rule(
    slots: torch.Tensor, chosen: torch.Tensor, by_slots: bool, tables: torch.Tensor, lens: torch.Tensor, k: int
) -> tuple[int, int, str, int | str, int | str] | None:
    """(row, rank, sentence, got, wanted) of the first broken rule, or None. Rules in the order of their consequence."""
    rank = torch.arange(k, device=chosen.device)
    due = rank < lens[:, None]  # ranks that min(k, n) valid entries fill

    def first(bad: torch.Tensor) -> tuple[int, int]:
        return divmod(int(bad.flatten().to(torch.uint8).argmax()), k)

    bad = ~due & ((slots != -1) | (chosen != -1))
    if bool(bad.any()):
        row, at = first(bad)
        value = int(slots[row, at]) if int(slots[row, at]) != -1 else int(chosen[row, at])
        return row, at, f"only {int(lens[row])} keys exist, the rest must be -1", value, -1
    bad = due & (slots < 0)
    if bool(bad.any()):
        row, at = first(bad)
        return row, at, f"min(k, {int(lens[row])}) keys must be selected", int(slots[row, at]), "a slot"
    bad = due & ((chosen < 0) | (chosen >= lens[:, None]))
    if bool(bad.any()):
        row, at = first(bad)
        if by_slots:
            return row, at, "no visible position has this slot", int(slots[row, at]), "a slot of the row's table"
        return row, at, "position out of range", int(chosen[row, at]), f"a position below {int(lens[row])}"
    page = tables.gather(1, torch.where(due, chosen // PAGE, 0)) if tables.shape[1] else torch.zeros_like(chosen)
    image = page * PAGE + chosen % PAGE
    bad = due & (slots != image)
    if bool(bad.any()):
        row, at = first(bad)
        return row, at, f"slot of position {int(chosen[row, at])}", int(slots[row, at]), int(image[row, at])
    order = torch.where(due, chosen, -1 - rank).sort(1).values
    twice = order[:, 1:] == order[:, :-1]
    if bool(twice.any()):
        row, at = divmod(int(twice.flatten().to(torch.uint8).argmax()), k - 1)
        value = int(order[row, at])
        at = int((chosen[row] == value).nonzero()[1])
        return row, at, f"position {value} is selected twice", value, "distinct positions"
    return None


def _positions_of(slots: torch.Tensor, tables: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    """Positions int64 [R, k] behind slots, -1 for negative ones, -2 where no visible position has the slot.

    ValueError when a row's table names a page twice within its length: its slots then have no one position."""
    count = tables.shape[1]
    column = torch.arange(count, device=slots.device)
    used = column * PAGE < lens[:, None]
    private = torch.where(used, tables, -2 - column)  # unused columns: distinct numbers that no slot has
    ordered, order = private.sort(1)
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError("positions: a row's table names a page twice, so slots do not determine the positions")
    slots = slots.to(torch.int64)
    page = slots.div(PAGE, rounding_mode="floor")
    if not count:
        return torch.where(slots < 0, -1, -2)
    at = torch.searchsorted(ordered, page).clamp_max(count - 1)
    found = ordered.gather(1, at) == page
    position = order.gather(1, at) * PAGE + slots % PAGE
    found &= position < lens[:, None]
    return torch.where(slots < 0, -1, torch.where(found, position, -2))


def recall(positions: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|S & S_ref| / |S_ref| per row, float64 [R]; both int [R, any k] with -1 for none; 1 where S_ref is empty."""
    hits = torch.stack([torch.isin(mine[mine >= 0], ref[ref >= 0]).sum() for mine, ref in _pairs(positions, reference)])
    size = (reference >= 0).sum(1)
    return torch.where(size > 0, hits.to(torch.float64) / size.clamp_min(1), 1.0)


def _pairs(a: torch.Tensor, b: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if a.shape[0] != b.shape[0] or not a.shape[0]:
        raise ValueError(
            f"positions and reference: expected as many rows, at least one, got {a.shape[0]} and {b.shape[0]}"
        )
    return list(zip(a, b, strict=True))


def regret(positions: torch.Tensor, scores: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """(sum of the best min(k, n) scores - sum of the selected) / sum of |best|, per row, float64 [R].

    ``positions`` int [R, k] with -1 for none, distinct; ``scores`` [R, W] the reference's, finite below ``lens`` [R].
    0 where the best scores are all zero or there are none; swaps among equal scores cost nothing."""
    lens = lens.reshape(-1).to(scores.device)
    visible = torch.arange(scores.shape[1], device=scores.device) < lens[:, None]
    known = torch.where(visible, scores.to(torch.float64), -math.inf)
    best = known.topk(min(k, scores.shape[1]), dim=1).values
    best = torch.where(best.isinf(), 0.0, best)
    index = positions.to(scores.device).to(torch.int64)
    chosen = torch.where(index >= 0, known.gather(1, index.clamp_min(0)), 0.0)
    size = best.abs().sum(1)
    lost = best.sum(1) - chosen.sum(1)
    return torch.where(size > 0, lost / torch.where(size > 0, size, 1.0), 0.0)

"""Finds a matrix unit's dot arithmetic by trials: which parameters of ``Grouped`` explain its results.

Knows nothing of devices: a ``DotUnit`` is any function that multiplies tiles, so that simulated ones test the search.
Every trial is a few products at chosen indices of one dot; the results decide one parameter after another.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from parity.numerics.arithmetic import Grouped

DTYPES = {
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "fp16": torch.float16,
    "tf32": torch.float32,
}
Term = tuple[int, float, float]
"""(index, q there, k there)."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Normal exponents of an operand, and where trials put their large product: ``distance`` bits above the smallest
    product of normal operands that a trial may need."""

    low: int
    high: int
    top: int

    @property
    def distance(self) -> int:
        return min(44, self.top - 2 * self.low)


RANGES = {
    "bf16": Range(-126, 127, 0),
    "tf32": Range(-126, 127, 0),
    "fp16": Range(-14, 15, 24),
    "e4m3": Range(-6, 8, 15),
}


@dataclasses.dataclass(frozen=True)
class DotUnit:
    """Something that computes dots: ``dot(a [P, rows, depth], b [P, columns, depth]) -> float32 [P, rows, columns]``.

    operand  a key of ``DTYPES``; a and b come in that dtype on ``device``
    name     what reports call it, such as "e4m3, max_num_imprecise_acc=32"
    """

    operand: str
    dot: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    device: torch.device | str = "cpu"
    rows: int = 64
    columns: int = 64
    depth: int = 128
    name: str = ""

    def __str__(self) -> str:
        return self.name or self.operand

    def cast(self, x: torch.Tensor) -> torch.Tensor:
        """To the operand's dtype; tf32 is float32 cut to 10 fraction bits, saturating like e4m3 where it must."""
        if self.operand == "tf32":
            return (x.to(torch.float32).contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
        if self.operand == "e4m3":
            return x.to(torch.float32).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        return x.to(torch.float32).to(DTYPES[self.operand])

    def row_dots(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """One dot per row: q, k [n, depth] float64 (exact in the operand's dtype) -> float64 [n] on the CPU."""
        side, count = min(self.rows, self.columns), q.shape[0]
        tiles = -(-count // side)
        a = torch.zeros(tiles, self.rows, self.depth, dtype=torch.float64)
        b = torch.zeros(tiles, self.columns, self.depth, dtype=torch.float64)
        tile, place = torch.arange(count) // side, torch.arange(count) % side
        a[tile, place], b[tile, place] = k, q
        out = self.dot(self.cast(a).to(self.device), self.cast(b).to(self.device)).cpu()
        return out[tile, place, place].to(torch.float64)


@dataclasses.dataclass(frozen=True)
class Decision:
    """One parameter: its value and the results that decided it."""

    parameter: str
    value: Any
    reason: str


class Trials:
    """Dots of chosen terms, all of them remembered, so that a model can be held against all results afterwards."""

    def __init__(self, unit: DotUnit) -> None:
        self.unit, self.range = unit, RANGES[unit.operand]
        self.made: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def product(self, index: int, value: float) -> Term:
        """A product ``value`` (few significant bits) at an index, from two normal operands."""
        if value == 0:
            return index, 0.0, 0.0
        fraction, exponent = math.frexp(abs(value))
        size, exponent = 2 * fraction, exponent - 1
        low = max(self.range.low, min(self.range.high, exponent // 2))
        other = exponent - low
        if not self.range.low <= other <= self.range.high:
            raise ValueError(f"{self.unit.operand} has no normal operands whose product is {value:g}")
        return index, size * 2.0**low * (1 if value > 0 else -1), 2.0**other

    def run(self, cases: Sequence[Sequence[Term]]) -> list[float]:
        """The unit's dots for lists of terms."""
        q = torch.zeros(len(cases), self.unit.depth, dtype=torch.float64)
        k = torch.zeros_like(q)
        for row, terms in enumerate(cases):
            for index, a, b in terms:
                q[row, index], k[row, index] = a, b
        answers = self.unit.row_dots(q, k)
        self.made.append((q, k, answers))
        return answers.tolist()

    def compared(self, model: Grouped) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All results so far, float64 [n], what the model says, and where the two differ; NaN equals NaN."""
        q, k, answers = (torch.cat(parts) for parts in zip(*self.made, strict=True))
        predicted = model.exact_dot(self.unit.cast(q)[:, None], self.unit.cast(k)[:, None])[:, 0, 0].to(torch.float64)
        return answers, predicted, (predicted != answers) & ~(predicted.isnan() & answers.isnan())

    def disagreements(self, model: Grouped) -> int:
        """How many of all results so far the model does not give."""
        return int(self.compared(model)[2].sum())


def search(unit: DotUnit) -> tuple[Grouped, list[Decision], Trials]:
    """The grouped model that the results of targeted trials point to, and why.

    It may still be wrong: a unit that adds by another rule gives results as well. Only random dots tell
    (``probe_check``)."""
    trials = Trials(unit)
    decided: list[Decision] = []

    def take(decision: Decision) -> Any:
        decided.append(decision)
        return decision.value

    kept = take(_kept(trials))
    group = take(_group(trials, kept))
    take(_running(trials, kept, group))
    take(_cut_direction(trials, kept))
    product_exponent = take(_product_exponent(trials, kept))
    final = take(_final(trials, kept, group))
    take(_rounding(trials, kept, final, group))
    take(_subnormals(trials, kept, product_exponent))
    return Grouped(**{decision.parameter: decision.value for decision in decided}), decided, trials


def _kept(trials: Trials) -> Decision:
    """A large product, a small one at each distance, and the large one taken away again, side by side in one group."""
    top, furthest = 2.0**trials.range.top, min(40, trials.range.distance)
    distances = range(1, furthest + 1)
    answers = trials.run(
        [[trials.product(0, top), trials.product(1, top * 2.0**-d), trials.product(2, -top)] for d in distances]
    )
    kept = 0
    for distance, answer in zip(distances, answers, strict=True):
        if answer != top * 2.0**-distance:
            break
        kept = distance
    how = "all were seen" if kept == furthest else f"2**-{kept + 1} gave {answers[kept] / top:g}"
    return Decision("kept", max(1, kept), f"1 + 2**-d - 1 keeps 2**-d up to d = {kept}; {how}")


def _group(trials: Trials, kept: int) -> Decision:
    """Two small products first, each just too small next to the large pair. By themselves in a group they add up to
    something that is kept, so the first index at which the large pair no longer hides them begins the next group."""
    top, depth = 2.0**trials.range.top, trials.unit.depth
    small = top * 2.0 ** -(kept + 1)
    if not _representable(trials, small):
        return Decision("group", depth, "no product is small enough to be hidden; any group gives the same")
    places = range(2, depth - 1)
    answers = trials.run(
        [
            [trials.product(0, small), trials.product(1, small), trials.product(j, top), trials.product(j + 1, -top)]
            for j in places
        ]
    )
    for place, answer in zip(places, answers, strict=True):
        if answer != 0:
            reason = f"two products of 2**-{kept + 1} at 0 and 1 vanish next to +-1 at 2 to {place - 1}, not at {place}"
            return Decision("group", place, reason)
    return Decision("group", depth, f"two products of 2**-{kept + 1} vanish next to +-1 at every later index")


def _running(trials: Trials, kept: int, group: int) -> Decision:
    """A small running sum, then a group with a large pair that cancels: inside the group it is cut away."""
    top = 2.0**trials.range.top
    small = top * 2.0 ** -(kept + 1)
    if group + 1 >= trials.unit.depth or not _representable(trials, small):
        return Decision("running", True, "there is one group only; both readings give the same")
    (answer,) = trials.run([[trials.product(0, small), trials.product(group, top), trials.product(group + 1, -top)]])
    running = answer == 0
    fate = "is cut away" if running else "survives"
    return Decision("running", running, f"a running sum of 2**-{kept + 1} {fate} in a group with +-1")


def _cut_direction(trials: Trials, kept: int) -> Decision:
    """Quarters of the last kept unit, of both signs, next to a large pair."""
    top = 2.0**trials.range.top
    unit = top * 2.0**-kept
    wanted = [0.25, 0.5, 0.75, 1.25, 1.5, 1.75]
    parts = [sign * part for part in wanted for sign in (1, -1) if _representable(trials, part * unit)]
    answers = trials.run(
        [[trials.product(0, top), trials.product(1, x * unit), trials.product(2, -top)] for x in parts]
    )
    seen = {x: answer / unit for x, answer in zip(parts, answers, strict=True)}
    down = any(x < 0 and value < x for x, value in seen.items())
    shown = ", ".join(f"{x:g} -> {value:g}" for x, value in seen.items())
    return Decision("cut", "down" if down else "zero", f"parts of the last kept unit: {shown}")


def _product_exponent(trials: Trials, kept: int) -> Decision:
    """1.5 * 1.5 leads: its own exponent is one more than the sum of its operands' exponents."""
    half = trials.range.top // 2
    a, b = 1.5 * 2.0**half, 1.5 * 2.0 ** (trials.range.top - half)
    small = 2.0 ** (trials.range.top - kept)
    (answer,) = trials.run([[(0, a, b), trials.product(1, small), (2, -a, b)]])
    value = "operands" if answer == small else "product"
    fate = "kept" if answer == small else "lost"
    return Decision("product_exponent", value, f"next to 1.5 * 1.5 the last kept unit of 1 * 1 is {fate}")


def _final(trials: Trials, kept: int, group: int) -> Decision:
    """2**m large products and a small one, in the last group: what the sum still shows of the small one."""
    top = 2.0**trials.range.top
    start = trials.unit.depth - group if group < trials.unit.depth else 0
    carries = [m for m in range(6) if 2**m < min(group, trials.unit.depth)]
    pairs = [(m, d) for m in carries for d in range(1, kept + 1)]
    answers = trials.run(
        [[*_ones(trials, start, m, top), trials.product(start + 2**m, top * 2.0**-d)] for m, d in pairs]
    )
    seen = {m + d for (m, d), answer in zip(pairs, answers, strict=True) if answer - top * 2**m == top * 2.0**-d}
    lost = {m + d for m, d in pairs} - seen
    final = 0
    while final + 1 in seen:
        final += 1
    if not lost:
        return Decision("final", 23, f"sums keep all they hold, up to {final} bits below their exponent")
    return Decision("final", max(1, final), f"2**m + 2**-d is kept while m + d <= {final}, lost from {min(lost)} on")


def _rounding(trials: Trials, kept: int, final: int, group: int) -> Decision:
    """Quarters of the sum's last unit, of both signs."""
    top = 2.0**trials.range.top
    start = trials.unit.depth - group if group < trials.unit.depth else 0
    for m in range(max(0, final - kept + 2), 6):
        if 2**m + 1 > group:
            break
        unit = top * 2.0 ** (m - final)
        if not _representable(trials, 0.25 * unit):
            continue
        parts = [sign * part for part in (0.25, 0.5, 0.75) for sign in (1, -1)]
        cases = [
            [*_ones(trials, start, m, top if x > 0 else -top), trials.product(start + 2**m, x * unit)] for x in parts
        ]
        answers = trials.run(cases)
        lead = top * 2**m
        seen = {x: (answer - (lead if x > 0 else -lead)) / unit for x, answer in zip(parts, answers, strict=True)}
        value = "nearest" if seen[0.75] == 1 else "down" if seen[-0.25] == -1 else "zero"
        shown = ", ".join(f"{x:g} -> {part:g}" for x, part in seen.items())
        return Decision("rounding", value, f"parts of the sum's last unit: {shown}")
    return Decision("rounding", "zero", "a group holds no more bits than its sum keeps; nothing is rounded")


def _subnormals(trials: Trials, kept: int, product_exponent: str) -> Decision:
    """A subnormal operand leads the group, then a zero next to the largest operand."""
    if product_exponent == "product":
        return Decision("subnormals", "minimum", "operands' exponents play no part")
    low, high = trials.range.low, trials.range.high - 1
    tiny = 2.0 ** (low - 2)
    lead = low - 2 + high
    small = 2.0 ** (lead - kept)
    if not _representable(trials, small, subnormal=True):
        return Decision("subnormals", "minimum", "the format is too narrow for it to matter")
    little = _split(trials, small)
    answer, flushed = trials.run([[(0, tiny, 2.0**high), (1, *little), (2, -tiny, 2.0**high)], [(0, tiny, 2.0**high)]])
    if flushed == 0:
        return Decision("subnormals", "minimum", "subnormal operands count as zero here, which no model has")
    if answer == small:
        reason = f"next to a subnormal leader of true exponent {lead} a product of 2**{lead - kept} is kept"
        return Decision("subnormals", "normalised", reason)
    normal = low + high - 2
    small = 2.0 ** (normal - kept)
    if not _representable(trials, small, subnormal=True):
        return Decision("subnormals", "minimum", "next to a subnormal leader its last kept unit is lost")
    (answer,) = trials.run(
        [
            [
                trials.product(0, 2.0**normal),
                (1, *_split(trials, small)),
                trials.product(2, -(2.0**normal)),
                (3, 0.0, 2.0**high),
            ]
        ]
    )
    value = "minimum" if answer == small else "minimum, zeros too"
    fate = "is nothing" if answer == small else "leads a group too"
    reason = f"next to a subnormal leader its last kept unit is lost; a zero times 2**{high} {fate}"
    return Decision("subnormals", value, reason)


def _ones(trials: Trials, start: int, carry: int, value: float) -> list[Term]:
    return [trials.product(start + i, value) for i in range(2**carry)]


def _split(trials: Trials, value: float) -> tuple[float, float]:
    """Two operands, subnormal if they must be, whose product is a power of two."""
    exponent = math.frexp(value)[1] - 1
    half = exponent // 2
    return 2.0**half, 2.0 ** (exponent - half)


def _representable(trials: Trials, value: float, subnormal: bool = False) -> bool:
    """Whether a product can be that small (or has few enough bits below its leading one): two operands make it."""
    lowest = 2 * (trials.range.low - (2 if subnormal else 0))
    return abs(value) >= 2.0**lowest

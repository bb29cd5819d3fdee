"""Compares a model of a matrix unit's dots with random dots, and looks for the closest model when none fits.

Works on any ``DotUnit`` of ``probe_search``, simulated ones included.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from parity.numerics.arithmetic import IEEE, Grouped
from parity.tensorcore.probe_search import RANGES, Decision, DotUnit, Trials, search

DISTRIBUTIONS = ("gaussian", "heavy-tailed", "positive", "few terms", "cancellation")
SUBNORMAL = "subnormal"
"""A sixth one, rows of subnormal operands. In e4m3 these are ordinary values and the heavy tails have them; in the wide
formats they are exotic, so they are compared and reported, but a model that misses them still holds elsewhere."""
CANDIDATES: dict[str, tuple[Any, ...]] = {
    "group": (1, 2, 4, 8, 16, 32, 64, 128),
    "kept": tuple(range(8, 31)),
    "final": tuple(range(8, 25)),
    "running": (True, False),
    "cut": ("zero", "down"),
    "rounding": ("zero", "down", "nearest"),
    "product_exponent": ("operands", "product"),
    "subnormals": ("minimum", "normalised", "minimum, zeros too"),
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """What is known about a matrix unit's dots.

    model        the grouped model that gave every answer and every random dot, or None
    closest      the best candidate, whether or not it fits
    decided      what decided each of its parameters
    dots         random dots compared, by distribution in ``mismatches``
    unexplained  targeted trials whose results the closest model does not give
    ieee_ratio   worst error of a random dot over the bound of an IEEE float32 dot; up to 1 it is consistent with one
    notes        behaviour at zeros, infinities and the like
    """

    unit: str
    operand: str
    model: Grouped | None
    closest: Grouped
    decided: tuple[Decision, ...]
    dots: int
    mismatches: dict[str, int]
    unexplained: int
    ieee_ratio: float
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """The report, a line each."""
        missed = sum(self.mismatches.values())
        if self.model is not None:
            head = f"{self.unit}: {self.model}, 0 of {self.dots:,} random dots differ"
        elif self.ieee_ratio <= 1:
            head = f"{self.unit}: no grouped model; every error is within the bound of an ieee float32 dot"
        else:
            head = f"{self.unit}: no model; the proved bound has to serve"
        found = [head]
        if self.model is None:
            found.append(
                f"  closest is {self.closest}: it misses {missed:,} of {self.dots:,} random dots and "
                f"{self.unexplained} targeted ones"
            )
        found += [f"  {decision.parameter} = {decision.value}: {decision.reason}" for decision in self.decided]
        found.append("  mismatches: " + ", ".join(f"{name} {count}" for name, count in self.mismatches.items()))
        found.append(f"  worst error is {self.ieee_ratio:.3g} of an ieee float32 dot's bound")
        return found + [f"  {note}" for note in self.notes]


def probe(unit: DotUnit, tiles: int = 56, seed: int = 0) -> Finding:
    """Search, then check on ``5 * tiles`` tiles of random dots (56 tiles of 64 x 64: 1,146,880 dots)."""
    model, decided, trials = search(unit)
    unexplained = trials.disagreements(model)
    if unexplained or sum(_compare(unit, model, 1, seed + 1)[0].values()):
        better = _descend(unit, model, seed + 1)
        if better != model:
            reason = "chosen afterwards, because it leaves fewer random dots unexplained"
            for name in CANDIDATES:
                if getattr(better, name) != getattr(model, name):
                    decided = [d for d in decided if d.parameter != name]
                    decided.append(Decision(name, getattr(better, name), reason))
            model, unexplained = better, trials.disagreements(better)
    mismatches, ratio = _compare(unit, model, tiles, seed)
    notes = special_values(unit, model)
    if unit.operand != "e4m3":
        a, b = draw(unit, SUBNORMAL, max(1, tiles // 4), seed)
        got, predicted = unit.dot(a, b), model.exact_dot(a, b)
        differ = int(((got != predicted) & ~(got.isnan() & predicted.isnan())).sum())
        notes.append(f"subnormal operands: {differ:,} of {got.numel():,} dots differ from the model")
    fits = not unexplained and not sum(mismatches.values())
    return Finding(
        unit=str(unit),
        operand=unit.operand,
        model=model if fits else None,
        closest=model,
        decided=tuple(decided),
        dots=len(DISTRIBUTIONS) * tiles * unit.rows * unit.columns,
        mismatches=mismatches,
        unexplained=unexplained,
        ieee_ratio=ratio,
        notes=tuple(notes),
    )


def count_mismatches(unit: DotUnit, model: Grouped, dots: int, seed: int = 0) -> tuple[int, int]:
    """(dots that differ, dots compared), at least ``dots`` of them over the five distributions."""
    tiles = max(1, math.ceil(dots / (len(DISTRIBUTIONS) * unit.rows * unit.columns)))
    wrong, _ = _compare(unit, model, tiles, seed, ratio=False)
    return sum(wrong.values()), len(DISTRIBUTIONS) * tiles * unit.rows * unit.columns


def draw(unit: DotUnit, distribution: str, tiles: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands a [tiles, rows, depth], b [tiles, columns, depth] of a distribution, in the unit's dtype and device."""
    g = torch.Generator(device=unit.device).manual_seed(seed * 31 + (*DISTRIBUTIONS, SUBNORMAL).index(distribution))
    span = RANGES[unit.operand]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=unit.device)

    def integer(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=g, device=unit.device)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        """Rows brought to a largest value of 448, so that every format uses its whole significand range."""
        return x * (448.0 / x.abs().amax(-1, keepdim=True).clamp_min(1e-20))

    def side(count: int) -> torch.Tensor:
        shape = (tiles, count, unit.depth)
        x = normal(*shape)
        if distribution in ("heavy-tailed", SUBNORMAL):  # e4m3 has 18 octaves: all of them occur
            return x * torch.exp2(integer(-9, 8, *shape).to(torch.float32))
        if distribution == "positive":
            return scaled(x.abs())
        if distribution == "few terms":
            filled = torch.rand(shape, generator=g, device=unit.device) < 1 / 16
            return scaled(x * filled * torch.exp2(integer(-8, 1, *shape).to(torch.float32)))
        return scaled(x)

    a, b = side(unit.rows), side(unit.columns)
    if distribution == SUBNORMAL or (distribution == "heavy-tailed" and unit.operand == "e4m3"):
        below = a[:, ::4].abs().amax(-1, keepdim=True) * 2.0  # every fourth row lies below the smallest normal value
        a[:, ::4] = a[:, ::4] / below * 2.0**span.low
        if distribution == SUBNORMAL:  # some of the others are large, or the products would all underflow
            b[:, ::2] *= 2.0 ** max(0, span.high - 30)
    if distribution == "cancellation":
        half = unit.depth // 2
        order = torch.randperm(unit.depth, generator=g, device=unit.device)
        a[..., half:] = a[..., :half]
        b[..., half:] = -b[..., :half] * (1 + 2.0**-4 * integer(-1, 2, tiles, unit.columns, half))
        a, b = a[..., order], b[..., order]
    return unit.cast(a), unit.cast(b)


def _compare(
    unit: DotUnit, model: Grouped, tiles: int, seed: int, *, ratio: bool = True
) -> tuple[dict[str, int], float]:
    """(mismatches by distribution, worst error over the ieee bound, 0 without ``ratio``).

    The ratio needs a matrix product in float64, and so the start of a whole library: too long for a quick check."""
    wrong, worst = {}, 0.0
    for distribution in DISTRIBUTIONS:
        a, b = draw(unit, distribution, tiles, seed)
        got = unit.dot(a, b)
        predicted = model.exact_dot(a, b)
        wrong[distribution] = int((got != predicted).sum())
        if not ratio:
            continue
        sample = slice(0, 1)
        wide_a, wide_b = (x[sample].to(torch.float32).to(torch.float64) for x in (a, b))
        exact, sizes = wide_a @ wide_b.mT, wide_a.abs() @ wide_b.abs().mT
        error = (got[sample].to(torch.float64) - exact).abs()
        worst = max(worst, float((error / IEEE.dot_bound(wide_a, wide_b, exact, sizes)).max()))
    return wrong, worst


def _descend(unit: DotUnit, model: Grouped, seed: int) -> Grouped:
    """From a model that misses some dots to one that misses fewest, one parameter at a time."""
    corner = slice(0, 16)  # a thousand dots tell candidates apart; the full check follows
    sample = []
    for name in DISTRIBUTIONS:
        a, b = draw(unit, name, 1, seed)
        sample.append((a[:, corner], b[:, corner], unit.dot(a, b)[:, corner, corner]))

    def misses(candidate: Grouped) -> int:
        return sum(int((candidate.exact_dot(a, b) != got).sum()) for a, b, got in sample)

    best, fewest = model, misses(model)
    for _ in range(2):
        before = fewest
        for name, values in CANDIDATES.items():
            for value in values:
                if value == getattr(best, name) or not fewest:
                    continue
                other = dataclasses.replace(best, **{name: value})
                count = misses(other)
                if count < fewest:
                    best, fewest = other, count
        if fewest in (0, before):
            break
    return best


def special_values(unit: DotUnit, model: Grouped) -> list[str]:
    """What the unit does where arithmetic ends, and whether the model says the same; one sentence each."""
    inf, nan = math.inf, math.nan
    large = 448.0 if unit.operand == "e4m3" else 2.0**15 if unit.operand == "fp16" else 2.0**120
    tiny = {"e4m3": 2.0**-9, "fp16": 2.0**-24}.get(unit.operand, 2.0**-75)
    cases: list[tuple[str, list[tuple[float, float]]]] = [
        ("0 * 1", [(0.0, 1.0)]),
        ("-0 * 1", [(-0.0, 1.0)]),
        ("1 * 1 - 1 * 1", [(1.0, 1.0), (-1.0, 1.0)]),
        ("NaN * 1", [(nan, 1.0)]),
        ("NaN * 0", [(nan, 0.0)]),
        ("largest * largest", [(large, large), (large, large)]),
        ("smallest * smallest", [(tiny, tiny)]),
        ("1.5 smallest * smallest", [(1.5 * tiny, tiny)]),
    ]
    if unit.operand != "e4m3":
        cases += [
            ("inf * 1", [(inf, 1.0)]),
            ("-inf * 1", [(-inf, 1.0)]),
            ("inf * 0", [(inf, 0.0)]),
            ("inf - inf", [(inf, 1.0), (-inf, 1.0)]),
            ("inf in a later group - inf", [(inf, 1.0)] + [(0.0, 0.0)] * 99 + [(-inf, 1.0)]),
        ]
    trials = Trials(unit)
    trials.run([[(index, a, b) for index, (a, b) in enumerate(terms)] for _, terms in cases])
    notes = []
    for (name, _), got, said, differs in zip(cases, *(x.tolist() for x in trials.compared(model)), strict=True):
        sign = " (negative zero)" if got == 0 and math.copysign(1.0, got) < 0 else ""
        notes.append(f"{name} = {got:g}{sign}" + (f", the model says {said:g}" if differs else ""))
    return notes

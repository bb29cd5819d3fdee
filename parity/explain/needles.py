"""Needles: keys added to a context at a known margin over its cutoff, to see which margins survive an arithmetic.

The margin is in standard deviations of the row's scores over the k-th largest of them, both in the `unrounded`
configuration. A needle is no key of the context: it is scored next to them, and is lost when k keys score higher.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from parity.explain import draws
from parity.explain.choices import Configuration, preset
from parity.explain.pipeline import Pipeline
from parity.explain.samples import projected
from parity.pages.layout import DIM

CLIMB = 30  # steps uphill
STEPS = 40  # halvings of the angle: float32 has no finer ones


@dataclasses.dataclass(frozen=True)
class Needles:
    """m needles for each of n queries: pooled float32 [n, m, 128], windows int64 [n, m], margins of length m.

    `reached` bool [n, m] tells which have their margin: a query whose best key scores less has no such needle.
    """

    pooled: Tensor
    windows: Tensor
    margins: tuple[float, ...]
    reached: Tensor


def plant(pipeline: Pipeline, margins: tuple[float, ...], seed: int) -> Needles:
    """Needles at these margins, at random places of the context; ValueError if none can be reached.

    Between a random key and a key that the query likes best lies every score, so the angle between the two is halved
    until the unrounded score is the wanted one.
    """
    sample, plain = pipeline.sample, preset("unrounded")
    rows, device = sample.gate.shape[0], sample.device
    place = torch.arange(rows * len(margins), device=device)
    windows = draws.integers(seed, "needle", 0, place, sample.keys).view(rows, -1) % sample.lens[:, None]
    start = draws.gaussian(seed, "needle", 0, place, DIM).view(rows, -1, DIM)
    best = _direction(pipeline, windows)
    best = best * (start.norm(dim=-1) / best.norm(dim=-1))[..., None]
    logits = pipeline.logits(plain)
    width = pipeline.width(plain)
    if int(sample.lens.min()) <= width:
        raise ValueError(f"margins: a needle needs a context longer than the {width} keys that are selected")
    cutoff = logits.topk(width, dim=1).values[:, -1:]
    wanted = cutoff + _spread(logits) * torch.tensor(margins, device=device)
    low, high = torch.full_like(wanted, -torch.pi / 2), torch.full_like(wanted, torch.pi / 2)

    def at(angle: Tensor) -> Tensor:
        return start * torch.cos(angle)[..., None] + best * torch.sin(angle)[..., None]

    reached = pipeline.scores_of(plain, at(high), windows) >= wanted
    if not bool(reached.any()):
        raise ValueError(f"margins: no key scores {min(margins)} deviations above the cutoff of any row")
    for _ in range(STEPS):
        middle = (low + high) / 2
        above = pipeline.scores_of(plain, at(middle), windows) >= wanted
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return Needles(at(high), windows, tuple(margins), reached)


def _spread(logits: Tensor) -> Tensor:
    """Standard deviation of each row's visible scores, float32 [n, 1]."""
    seen = torch.isfinite(logits)
    count = seen.sum(1, keepdim=True)
    mean = torch.where(seen, logits, 0).sum(1, keepdim=True) / count
    return (torch.where(seen, logits - mean, 0).square().sum(1, keepdim=True) / count).sqrt()


def _direction(pipeline: Pipeline, windows: Tensor) -> Tensor:
    """A pooled direction that each query scores high at each window, float32 [n, m, 128].

    From the direction of the positively weighted heads upwards along the score's own gradient, which is the weighted
    sum of the queries of the heads that fire; the best direction met is kept.
    """
    sample, plain = pipeline.sample, preset("unrounded")
    weight, q = pipeline.head_weights(plain), projected(sample)
    here = torch.einsum("nh,nhd->nd", weight.clamp_min(0), q)
    most, liked = torch.full_like(weight[:, 0], -torch.inf), here
    for _ in range(CLIMB):
        here = here / here.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
        dots = torch.einsum("nhd,nd->nh", q, here)
        score = (weight * dots.relu()).sum(1)
        liked = torch.where((score > most)[:, None], here, liked)
        most = torch.maximum(score, most)
        here = here + torch.einsum("nh,nhd->nd", weight * (dots > 0), q) / q.norm(dim=2).mean(1, keepdim=True)
    liked = liked[:, None]
    turned = pipeline.rotated(plain, liked, sample.positions[:, None])
    # A rotation back is a rotation by the negative angle.
    back = pipeline.rotated(plain, turned.expand(-1, windows.shape[1], -1), windows * sample.config.ratio, -1.0)
    return sample.norm * back


def kept(pipeline: Pipeline, c: Configuration, needles: Needles) -> Tensor:
    """Share of the needles of each margin that are selected, float64 [m]; NaN where no query reaches the margin."""
    hit = (ranks(pipeline, c, needles) <= pipeline.width(c)) & needles.reached
    return hit.double().sum(0) / needles.reached.double().sum(0)


def ranks(pipeline: Pipeline, c: Configuration, needles: Needles) -> Tensor:
    """Rank int64 [n, m] of each needle among the visible keys: 1 plus the number of keys that score higher."""
    own = pipeline.scores_of(c, needles.pooled, needles.windows)
    logits = pipeline.logits(c)
    return torch.stack([1 + (logits > own[:, i : i + 1]).sum(1) for i in range(own.shape[1])], dim=1)

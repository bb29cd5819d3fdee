"""What a configuration costs on one context, against another: recall, regret, ties, needles and error of the logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from parity.explain.choices import Configuration, mixed
from parity.explain.needles import Needles, ranks
from parity.explain.pipeline import Pipeline

METRICS = ("loss", "ties", "regret", "needles_lost", "needle_rank", "error")
ABOUT = {
    "loss": "share of the reference's selection that is missing: 1 - recall",
    "ties": "the part of loss that swaps keys of equal reference score",
    "regret": "reference score lost, over the reference score of the best selection",
    "needles_lost": "share of needles that k keys outscore",
    "needle_rank": "median rank of the needles",
    "error": "root mean square error of the logits over their root mean square",
}


class Measure:
    """Metrics of any configuration on one pipeline, against a reference configuration; each is computed once."""

    def __init__(self, pipeline: Pipeline, reference: Configuration, needles: Needles | None = None) -> None:
        self.pipeline, self.reference, self.needles = pipeline, reference, needles
        self._found: dict[Configuration, np.ndarray] = {}

    def __call__(self, c: Configuration) -> np.ndarray:
        """Values in the order of METRICS, float64 [6], each the mean over the context's rows."""
        if c not in self._found:
            needles = self.needles
            rank = ranks(self.pipeline, c, needles)[needles.reached] if needles is not None else None
            self._found[c] = self.judge(self.pipeline.select(c), self.pipeline.logits(c), self.pipeline.width(c), rank)
        return self._found[c]

    def mixture(self, target: Configuration, taken: Iterable[str]) -> np.ndarray:
        """Metrics of the reference with the target's values of the choices `taken`."""
        return self(mixed(self.reference, target, taken))

    def judge(self, chosen: Tensor, logits: Tensor, width: int, rank: Tensor | None) -> np.ndarray:
        """Metrics of a selection bool [n, S] of `width` keys made by logits float32 [n, S], with ranks of needles."""
        wanted, scores = self.pipeline.select(self.reference), self.pipeline.logits(self.reference)
        size = wanted.sum(1)
        kept = (wanted & chosen).sum(1)
        cutoff = torch.where(wanted, scores, torch.inf).amin(1, keepdim=True)
        ties = torch.minimum((chosen & ~wanted & (scores == cutoff)).sum(1), size - kept)
        lost = [1 - kept / size, ties / size, regret(wanted, chosen, scores, int(size.max()))]
        seen = torch.isfinite(scores)
        error = torch.where(seen, logits - scores, 0).double().square().sum()
        scale = torch.where(seen, scores, 0).double().square().sum()
        needles = [math.nan, math.nan]
        if rank is not None:
            needles = [float((rank > width).double().mean()), float(rank.double().median())]
        means = [float(x.double().mean()) for x in lost]
        return np.array([*means, *needles, float((error / scale).sqrt())])


def regret(wanted: Tensor, chosen: Tensor, scores: Tensor, width: int) -> Tensor:
    """Reference score of the wanted keys minus that of as many chosen ones, over the wanted keys' sum of |score|."""
    best = torch.where(wanted, scores, 0).double()
    held = torch.where(chosen, scores, -torch.inf).topk(min(width, scores.shape[1]), dim=1).values.double()
    # A wider selection counts by its best keys; a narrower one lacks what it did not take.
    held = torch.where(torch.isfinite(held), held, 0)
    return (best.sum(1) - held.sum(1)) / best.abs().sum(1).clamp_min(torch.finfo(torch.float64).tiny)


# Two-sided 95 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def interval(values: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(mean, half width of the 95 % interval of the mean) over independent contexts; infinite for a single one.

    Rows of a context share its keys, so the context is the unit: Student's t over contexts.
    """
    table = np.stack([np.asarray(value, dtype=np.float64) for value in values])
    count = len(table)
    if count < 2:
        return table.mean(0), np.full(table.shape[1:], math.inf)
    t = _T95[count - 2] if count <= 31 else 1.96 + 2.5 / count
    return table.mean(0), t * table.std(0, ddof=1) / math.sqrt(count)

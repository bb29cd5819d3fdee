"""Which choice does an unknown implementation make differently? Found from nothing but its logits.

Every value of every choice is tried on the same context, and the one whose logits come closest to those observed is
kept; then again from there, until nothing comes closer. No knowledge of the implementation is used.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from parity.explain.choices import CHOICES, Configuration
from parity.explain.pipeline import Pipeline

CLOSER = 0.9  # a step has to leave at most this part of the residual
WIDTHS = "topk"


@dataclasses.dataclass(frozen=True)
class Step:
    """One choice taken: its value, the residual that is left, and the runner-up's residual."""

    choice: str
    value: str
    residual: float
    runner_up: float


def residual(observed: Tensor, logits: Tensor) -> float:
    """Root mean square of the difference over that of the observed logits, where both are finite."""
    seen = torch.isfinite(observed) & torch.isfinite(logits)
    if not bool(seen.any()):
        raise ValueError("logits: no cell is finite in both the observed and the evaluated ones")
    error, scale = ((observed - logits)[seen], observed[seen])
    return float((error.double().square().sum() / scale.double().square().sum()).sqrt())


def identify(
    pipeline: Pipeline, observed: Tensor, start: Configuration, *, width: int | None = None, steps: int = 3
) -> tuple[float, list[Step]]:
    """(residual at `start`, choices in the order in which they explain most) for observed logits float32 [n, S].

    `width` is the number of keys that the implementation selected, if it is known: only it decides on `topk`.
    """
    if tuple(observed.shape) != tuple(pipeline.logits(start).shape):
        raise ValueError(
            f"logits: expected {list(pipeline.logits(start).shape)} as the context has, got {list(observed.shape)}"
        )
    first = left = residual(observed, pipeline.logits(start))
    found, here = [], start
    if width is not None and width != pipeline.width(start):
        found.append(Step(WIDTHS, str(width), left, left))
    for _ in range(steps):
        tried = []
        for choice in CHOICES:
            if choice.name == WIDTHS or (choice.name in POOLING and pipeline.sample.pooled is not None):
                continue
            if choice.name == "projection_q" and pipeline.sample.q is not None:
                continue
            for value in choice.values:
                if value != here[choice.name]:
                    there = here.having(**{choice.name: value})
                    tried.append((residual(observed, pipeline.logits(there)), choice.name, value))
        tried.sort()
        best = tried[0]
        if left == 0 or best[0] > CLOSER * left:
            break
        other = next((entry[0] for entry in tried if entry[1] != best[1]), left)
        found.append(Step(best[1], best[2], best[0], other))
        left, here = best[0], here.having(**{best[1]: best[2]})
    return first, found


POOLING = ("projection_k", "pooling")

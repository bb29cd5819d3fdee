"""Acceptance rules of public suites, written from what they state, on the same fault models and the same cases.

Each rule sees what its owners' tests see: the result, a reference, and the lengths. A rule kills a model when it
refuses its result on at least one case; it falsely rejects a correct kernel when it refuses that kernel's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

K_SHARE = 4  # index sets are compared at k = a quarter of the longest row


@dataclass(frozen=True)
class Seen:
    """What a rule may look at: float32 results [T, W], two references float64 [T, W] (from operands before and after
    quantisation), lengths int64 [T], and positions int64 [T, k] of the result and of the reference."""

    out: Tensor
    unquantised: Tensor
    reference: Tensor
    lens: Tensor
    chosen: Tensor
    wanted: Tensor

    def visible(self) -> Tensor:
        return torch.arange(self.out.shape[1]) < self.lens[:, None]


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>): one number for a whole tensor."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def same_masks(seen: Seen) -> bool:
    """-inf stands where the reference has it, as these suites ask before they compare."""
    return torch.equal(seen.out == -math.inf, ~seen.visible())


def masked(seen: Seen, x: Tensor) -> Tensor:
    return torch.where(seen.visible(), x.to(torch.float64), 0.0)


def cosine(limit: float) -> Callable[[Seen], bool]:
    return lambda seen: same_masks(seen) and calc_diff(masked(seen, seen.out), masked(seen, seen.unquantised)) < limit


def cosine_pair(seen: Seen) -> bool:
    """1e-3 against the reference of unquantised operands and 5e-6 against that of the quantised ones."""
    close = calc_diff(masked(seen, seen.out), masked(seen, seen.reference)) < 5e-6
    return close and cosine(1e-3)(seen)


def allclose(absolute: float, relative: float) -> Callable[[Seen], bool]:
    def rule(seen: Seen) -> bool:
        out, wanted = masked(seen, seen.out), masked(seen, seen.reference)
        return bool(((out - wanted).abs() <= absolute + relative * wanted.abs()).all())

    return rule


def row_maximum(limit: float) -> Callable[[Seen], bool]:
    """Largest error of each row over the row's largest magnitude."""

    def rule(seen: Seen) -> bool:
        out, wanted = masked(seen, seen.out), masked(seen, seen.reference)
        size = wanted.abs().amax(1).clamp_min(1e-12)
        return bool(((out - wanted).abs().amax(1) / size <= limit).all())

    return rule


def shares(seen: Seen) -> tuple[Tensor, Tensor]:
    """(overlap, Jaccard) of each row's index sets, float64 [T]; 1 where nothing is to be selected."""
    found = []
    for mine, theirs in zip(seen.chosen.tolist(), seen.wanted.tolist(), strict=True):
        a, b = {x for x in mine if x >= 0}, {x for x in theirs if x >= 0}
        found.append((len(a & b) / max(1, len(b)) if b else 1.0, len(a & b) / max(1, len(a | b)) if a | b else 1.0))
    both = torch.tensor(found, dtype=torch.float64).view(-1, 2)
    return both[:, 0], both[:, 1]


def overlap(limit: float) -> Callable[[Seen], bool]:
    return lambda seen: not len(seen.lens) or float(shares(seen)[0].min()) >= limit


def mean_jaccard(limit: float) -> Callable[[Seen], bool]:
    return lambda seen: not len(seen.lens) or float(shares(seen)[1].mean()) >= limit


@dataclass(frozen=True)
class Rule:
    """A rule: name, whose it is, the judgement (True: accepted), and the ops whose results it can look at."""

    name: str
    owner: str
    accepts: Callable[[Seen], bool]
    ops: tuple[str, ...] = ("paged_logits",)


SETS = ("paged_logits", "topk")
RULES = (
    Rule("cosine 1e-3", "DeepGEMM, vLLM, TensorRT-LLM", cosine(1e-3)),
    Rule("cosine 1e-3 and 5e-6", "DeepGEMM", cosine_pair),
    Rule("allclose 5e-5 / 1e-5", "SGLang", allclose(5e-5, 1e-5)),
    Rule("allclose 1.0 / 0.2", "vLLM", allclose(1.0, 0.2)),
    Rule("row maximum 1e-2", "aiter and others", row_maximum(1e-2)),
    Rule("overlap of index sets 0.95", "several", overlap(0.95), SETS),
    Rule("overlap of index sets 0.9", "several", overlap(0.9), SETS),
    Rule("mean Jaccard 0.95", "several", mean_jaccard(0.95), SETS),
)


def run_rules(json_file: str | None, markdown_file: str | None) -> int:
    """`parity mutants --rules`: print the table of kill rates and false rejections; always exit code 0."""
    from parity.command import write_json, write_text
    from parity.faults.rules_run import measure, table

    report = measure()
    text = table(report)
    write_json(json_file, report)
    if markdown_file:
        write_text(markdown_file, text)
    print(text)
    return 0

"""Is a selection a correct top-k of scores known within bounds? (Signatures; the test follows.)"""

from __future__ import annotations

import torch

from parity.judge.outcome import Verdict


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
) -> Verdict:
    """slots, positions int32 [R, k]; low, high [R, W] any float dtype (equal: a test of the implementation's own
    logits).

    context_lens [B, next_n] or the R rows' lengths; block_table [B, max_pages]; ``rows`` int64 [R] names sampled
    rows."""
    raise NotImplementedError


def recall(positions: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|S & S_ref| / |S_ref| per row, float64 [R]; both int [R, k] with -1 for none; 1 where S_ref is empty."""
    raise NotImplementedError


def regret(positions: torch.Tensor, scores: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """(best sum - chosen sum) / sum of |best|, per row, float64 [R], under reference scores [R, W] and lengths [R]."""
    raise NotImplementedError

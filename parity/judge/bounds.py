"""The exact logits of a case and the bound of each, in float64. (Signatures; the evaluation follows.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from parity.judge.contract import Contract


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a contract allows, for some rows of a case. R rows, W keys, W the longest of their context lengths.

    logits    float64 [R, W]: the exact logits; NaN and infinities where the exact evaluation ends there; -inf past the
              length
    bound     float64 [R, W]: |returned - logits| may not exceed it; inf where an intermediate may overflow; 0 past the
              length
    free      bool [R, W]: an infinity or NaN is accepted (some intermediate of the contract may overflow)
    nan_ok    bool [R, W]: NaN is accepted beside the class of ``logits`` (an infinite scale)
    rows      int64 [R]: row numbers, request * next_n + draft
    lens      int64 [R]: their context lengths
    """

    logits: torch.Tensor
    bound: torch.Tensor
    free: torch.Tensor
    nan_ok: torch.Tensor
    rows: torch.Tensor
    lens: torch.Tensor

    def visible(self) -> torch.Tensor:
        """bool [R, W]: keys inside each row's context length."""
        return torch.arange(self.logits.shape[1], device=self.lens.device) < self.lens[:, None]

    def interval(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(low, high) float64 [R, W], rounded outward: [-inf, inf] for NaN and free cells, a point for exact
        infinities."""
        raise NotImplementedError


def expected(
    operands: Any, contract: Contract, rows: torch.Tensor | None = None, *, chunk_bytes: int = 256 << 20
) -> Expected:
    """Exact logits and bounds of ``operands`` (cases.operands.Operands) under ``contract``, for all rows or those given
    (int64).

    ValueError for a negative scale in a readable slot, or a contract whose roundings have no bound."""
    raise NotImplementedError


def exact_expected(operands: Any, contract: Contract, rows: torch.Tensor | None = None) -> Expected:
    """On exact data: the logits that every order must return, bound 0 (the contract's rounding points applied)."""
    raise NotImplementedError


def is_exact_data(operands: Any, contract: Contract, rows: torch.Tensor | None = None) -> bool:
    """Whether every order of summation under the contract's arithmetic is exact on these very operands."""
    raise NotImplementedError

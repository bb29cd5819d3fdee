"""The exact logits that a case is judged by, of as many rows as one case may cost."""

from typing import Any

import torch

from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.ops.paged_logits.case import Case
from parity.run.runner import Outcome, Runner

ORACLE_PRODUCTS = {"cpu": 2.5e8, "cuda": 4.0e9}
"""Products of the float64 evaluation that one case may cost; beyond it rows are sampled."""


def sampled_rows(case: Case, device: torch.device) -> torch.Tensor | None:
    """Rows for the float64 evaluation: None (all) where that is cheap, else ends, page borders and a seeded draw."""
    lengths = [length for request in case.lengths for length in request]
    # A row costs something even without keys.
    cost = 128.0 * case.heads * (max(lengths, default=0) + 64)
    keep = max(4, int(ORACLE_PRODUCTS[device.type] / cost))
    if keep >= len(lengths):
        return None
    borders = [row for row, length in enumerate(lengths) if length % 64 in (0, 1, 63)]
    generator = torch.Generator().manual_seed(case.seed)
    drawn = torch.randperm(len(lengths), generator=generator)[:keep].tolist()
    chosen = {0, len(lengths) - 1, *borders[:2], *borders[-2:], *drawn}
    return torch.tensor(sorted(chosen), dtype=torch.int64, device=device)


def oracle(outcome: Outcome, runner: Runner, case: Case) -> tuple[Any, bool]:
    """(expected, exact): the exact logits of the sampled rows, with bound zero where the data are exact."""
    rows = sampled_rows(case, runner.device)
    operands, contract = outcome.operands, runner.impl.contract
    if is_exact_data(operands, contract, rows):
        return exact_expected(operands, contract, rows), True
    return expected(operands, contract, rows), False

"""The exact logits that a case is judged by, of as many rows as one case may cost."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parity.numerics.blocks import Expected
from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.ops.paged_logits.case import Case
from parity.pages.layout import PAGE
from parity.run.runner import Outcome, Runner

ORACLE_PRODUCTS = {"cpu": 2.5e8, "cuda": 4.0e9}
"""Products of the float64 evaluation that one case may cost; beyond it rows are sampled."""

READING = 16
"""Heads whose products cost as much as reading a request's keys and finding their quanta."""


def sampled_rows(case: Case, device: torch.device) -> torch.Tensor | None:
    """Rows for the float64 evaluation: None (all) where that is cheap, else ends, page borders and a seeded draw."""
    lengths = [length for request in case.lengths for length in request]
    # A row costs something even without keys, keys that repeat are evaluated once, and reading the keys of a request
    # costs as much as some heads.
    longest = min(case.longest, case.period * PAGE or case.longest)
    cost = 128.0 * (case.heads + READING / case.next_n) * (longest + 64)
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
    once = distinct(operands, case)
    given = operands if once is None else once.operands
    exact = is_exact_data(given, contract, rows)
    found = (exact_expected if exact else expected)(given, contract, rows)
    return (found if once is None else once.spread(found, operands)), exact


@dataclass(frozen=True)
class Distinct:
    """A case whose table names the same page again and again, with every page of a request named once.

    operands  those of the case under a table [B, U] of each request's distinct pages, every row as long as they are
    places    int64 [B, pages]: which column of that table holds a logical page
    """

    operands: Any
    places: Tensor

    def spread(self, found: Expected, operands: Any) -> Expected:
        """What was found for the distinct keys, at every position that has such a key; rows end where theirs end."""
        lens = operands.context_lens.reshape(-1)[found.rows].to(torch.int64)
        width = int(lens.max()) if lens.numel() else 0
        position = torch.arange(width, device=lens.device)
        requests = found.rows // operands.q.shape[1]
        inside = position < lens[:, None]
        source = self.places[requests][:, position // PAGE] * PAGE + position % PAGE
        source = torch.where(inside, source, 0)

        def at(values: Tensor, past: Any) -> Tensor:
            return torch.where(inside, values.gather(1, source), past)

        return Expected(
            at(found.logits, float("-inf")),
            at(found.bound, 0.0),
            at(found.free, False),
            at(found.nan_ok, False),
            found.rows,
            lens,
        )


def distinct(operands: Any, case: Case) -> Distinct | None:
    """The same keys named once; None where that would save nothing.

    A page that is only partly visible stands last among its request's, so that no hidden slot is read."""
    if not case.period or case.pages <= 2 * case.period:
        return None
    lens = operands.context_lens.amax(1).tolist()
    places, tables, lengths = [], [], []
    for row, length in zip(operands.block_table, lens, strict=True):
        pages = -(-length // PAGE)
        whole = length // PAGE
        names = torch.unique(row[:whole])
        if pages > whole and not bool((names == row[whole]).any()):
            names = torch.cat([names, row[whole : whole + 1]])
            lengths.append((len(names) - 1) * PAGE + length % PAGE)
        else:
            lengths.append(len(names) * PAGE)
        order = torch.argsort(names)
        places.append(order[torch.searchsorted(names[order], row[:pages])])
        tables.append(names)
    pad = torch.nn.utils.rnn.pad_sequence
    device = operands.block_table.device
    longest = torch.tensor(lengths, dtype=torch.int32, device=device)[:, None]
    given = replace(
        operands,
        block_table=pad(tables, batch_first=True),
        context_lens=longest.expand(-1, case.next_n).contiguous(),
    )
    return Distinct(given, pad(places, batch_first=True))

"""What the wrong cells of a result have in common: rows, pages, slots and residues, said in a few sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parity.pages.layout import PAGE

MODULI = (4, 16, 64, 128)


def listed(values: Sequence[int], most: int = 8) -> str:
    """Numbers as ranges: `0..3, 7`."""
    parts: list[str] = []
    first = last = None
    for value in [*sorted(values), None]:
        if last is not None and value == last + 1:
            last = value
            continue
        if first is not None:
            parts.append(str(first) if first == last else f"{first}..{last}")
        first = last = value
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")


def describe(bad: Tensor, operands: Any) -> list[str]:
    """Sentences about wrong cells, bool [T, W], of a logits result; operands give lengths and the block table."""
    lens = operands.context_lens.reshape(-1).to(torch.int64)
    next_n = operands.context_lens.shape[1]
    visible = torch.arange(bad.shape[1]) < lens[:, None]
    found = [
        f"{int(bad.sum())} of {bad.numel()} cells are wrong, {int((bad & ~visible).sum())} of them past the length"
    ]
    rows = bad.any(1)
    if bool(rows.all()):
        found.append("every row is wrong somewhere")
    else:
        found.append(f"wrong rows: {listed(rows.nonzero()[:, 0].tolist())} of {len(rows)}")
        if next_n > 1:
            drafts = {row % next_n for row in rows.nonzero()[:, 0].tolist()}
            found.append(f"wrong draft rows within a request: {listed(sorted(drafts))} of {next_n}")
    inside = bad & visible
    if not bool(inside.any()):
        return found
    keys = inside.any(0).nonzero()[:, 0]
    pages = sorted({int(key) // PAGE for key in keys})
    last = {(int(n) - 1) // PAGE for n in lens if n}
    note = (
        ", the last page of some row each" if set(pages) <= last else ", never the first page" if 0 not in pages else ""
    )
    found.append(f"wrong logical pages: {listed(pages)}{note}")
    physical = sorted({int(operands.block_table[row // next_n, key // PAGE]) for row, key in inside.nonzero().tolist()})
    found.append(f"wrong physical pages: {listed(physical)}")
    for modulus in MODULI:
        seen = {int(key) % modulus for key in (visible.any(0)).nonzero()[:, 0]}
        wrong = {int(key) % modulus for key in keys}
        if len(wrong) < len(seen):
            found.append(f"keys modulo {modulus}: only {listed(sorted(wrong))} are wrong")
    ends = [
        (int(inside[row].nonzero()[0]), int(inside[row].nonzero()[-1]), int(lens[row]))
        for row in range(len(lens))
        if bool(inside[row].any())
    ]
    if ends and all(end == n - 1 for _, end, n in ends) and all(start > 0 for start, _, _ in ends):
        found.append("in every wrong row the wrong keys reach up to the newest one")
    return found

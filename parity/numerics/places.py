"""Where a cell of the logits lives in the pool, for messages."""

from __future__ import annotations

import torch

from parity.pages.layout import PAGE


def coordinates(row: int, key: int | None, context_lens: torch.Tensor, block_table: torch.Tensor) -> dict[str, int]:
    """Request, row, draft, and page and slot of a key; ``context_lens`` [B, next_n], ``block_table`` [B, max_pages]."""
    next_n = context_lens.shape[1]
    where = {"request": row // next_n, "row": row, "draft": row % next_n}
    if key is not None:
        page = key // PAGE
        where |= {"key": key, "logical_page": page}
        if page < block_table.shape[1]:
            physical = int(block_table[row // next_n, page])
            where |= {"physical_page": physical, "slot": physical * PAGE + key % PAGE}
    return where

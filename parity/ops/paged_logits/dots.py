"""Compares the dots that a kernel returns, head by head, with those of a verified model, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import torch

from parity.numerics.arithmetic import Grouped
from parity.numerics.blocks import Expected, blocks
from parity.numerics.headsum import predicted_dots
from parity.numerics.places import coordinates
from parity.results import Labels, Status, Verdict

CHUNK_BYTES = 256 << 20


def compare_dots(
    out: torch.Tensor,
    operands: Any,
    layout: str,
    arithmetic: Grouped,
    *,
    rows: torch.Tensor | None = None,
    impl: str = "NAME",
    level: str = "bits",
    check: str = "dots",
    chunk_bytes: int = CHUNK_BYTES,
) -> Verdict:
    """Every visible dot has the bits that the model gives (any NaN for NaN).

    out float32 [T, H, max_context_len]; cells at and past a row's length are not read. ``operands`` and ``rows`` as in
    ``bounds.expected``."""
    labels = Labels(level=level, check=check, case=str(getattr(operands, "case", "")), impl=impl)
    frame = Expected.empty(operands, rows)
    heads = operands.q.shape[2]
    cells = wrong = 0
    first: dict[str, Any] | None = None
    for block in blocks(operands, layout, frame, chunk_bytes):
        wanted = predicted_dots(block, arithmetic)
        place = frame.rows[block.place.clamp_min(0)]  # [b, r]
        got = out[place.to(out.device)][..., block.keys].to(wanted.device)
        same = got.contiguous().view(torch.int32) == wanted.view(torch.int32)
        bad = block.real[:, :, None] & ~same & ~(got.isnan() & wanted.isnan())
        cells += heads * int(block.real.sum())
        count = int(bad.sum())
        if count and first is None:
            index = tuple(int(i) for i in bad.nonzero()[0])
            row, key = int(place[index[0], index[1]]), block.keys.start + index[3]
            first = {
                "where": coordinates(row, key, operands.context_lens, operands.block_table) | {"head": index[2]},
                "got": float(got[index]),
                "wanted": float(wanted[index]),
            }
        wrong += count
    if first is None:
        return labels.verdict(Status.PASSED, cells=cells)
    distance = math.inf if first["wanted"] == 0 else abs(first["got"] / first["wanted"] - 1)
    note = f"head {first['where']['head']}: {wrong:,} of {cells:,} dots are not those of {arithmetic}"
    note += f", the first is {distance:.1e} off" if math.isfinite(distance) else ""
    return labels.failed(cells=cells, note=note, **first)

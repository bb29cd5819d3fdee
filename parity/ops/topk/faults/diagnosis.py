"""How a top-k function is compared with the fault models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from parity.ops.diagnosis import Cells, Diagnosis
from parity.ops.fault import Fault, Function
from parity.ops.shared.drawing import before, drawn_fields
from parity.ops.topk.case import TopkCase
from parity.ops.topk.faults import staged
from parity.pages.layout import PAGE

DATA = ("random", "negative", "narrow", "large", "neginf", "ulps", "zeros", "few", "nan")


def cells(operands: Any, layout: str) -> Callable[[tuple[Tensor, Tensor]], Cells]:
    """Scores chosen (ties do not count), where -1 stands, how often a position stands twice, and slot errors."""
    logits, table = operands.logits, operands.block_table
    rows, width = logits.shape
    lens = operands.context_lens.reshape(-1).to(torch.int64)[:, None]

    def of(out: tuple[Tensor, Tensor]) -> Cells:
        slots, positions = (x.to(torch.int64) for x in out)
        inside = (positions >= 0) & (positions < width)
        score = logits.gather(1, positions.clamp(0, max(0, width - 1))).to(torch.float64) if width else slots * 0.0
        score = score.nan_to_num(5e38, 6e38, -6e38)
        score = score.masked_fill(~inside | (positions >= lens), 4e38).masked_fill(positions < 0, -4e38)
        ordered = positions.sort(1).values
        twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(1).to(torch.float64)
        page = positions.clamp_min(0) // PAGE
        known = page < table.shape[1]
        row = (torch.arange(rows) // operands.context_lens.shape[1])[:, None].expand_as(page)
        safe = page.clamp_max(max(0, table.shape[1] - 1))
        image = table[row, safe].to(torch.int64) * PAGE + positions.clamp_min(0) % PAGE if table.shape[1] else page
        off = torch.where(positions < 0, slots + 1, torch.where(known, slots - image, 0)).to(torch.float64)
        parts = [score.sort(1).values, (positions < 0).to(torch.float64), off.sort(1).values, twice[:, None]]
        values = torch.cat([part.reshape(-1) for part in parts])
        return Cells(values, torch.zeros_like(values))

    return of


def function(layout: str, facts: Mapping[str, Any], change: Mapping[str, Function]) -> Function:
    """The staged implementation, with steps replaced."""
    return staged.function(change)


def draw(fault: Fault, source: random.Random) -> TopkCase:
    """A case with rows shorter and longer than k."""
    data, k = source.choice(DATA), source.choice((1, 64, 512, 1100, 2048))
    spare = source.choice((3, 1200, 1 << 19))
    strides = source.choice(((), ("logits",), ("table",), ("logits", "table")))
    fields = drawn_fields(source, 4400, 4300 if source.random() < 0.3 else 70)
    return TopkCase(data=data, k=k, spare=spare, strides=strides, **fields)


DIAGNOSIS = Diagnosis(
    draw=draw,
    cells=cells,
    before=before,
    tensors=("logits", "context_lens", "block_table"),
    numbers={"k": int},
    results=("slots", "positions"),
)

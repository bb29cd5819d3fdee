"""Verdicts on a chunked compressor: which tokens close a group, and the pooled key of each, against float64.

A pooled key is sum_i kv_i p_i over the eight slots of a window, p the softmax of the scores. With u = 2^-24, x_i the
score with its position encoding and d_i = x_i - max x, a float32 evaluation makes these relative errors in exp(d_i):
the encoding's addition and the two operands of the subtraction u (|x_i| + |max x| + |d_i|), and the exponential itself
(2 + 1.173 |d_i|) ulp of at most 2^-23, which NVIDIA states for its fast exponential and a library's keeps easily. Call
their sum e_i. Quotient, product and two sums of eight add gamma(20), and the denominator at most the largest e_j:

    |error| <= (1 + 2^-8) sum_i |kv_i| p_i (e_i + max_j e_j + gamma(20)) + 2^-126

The factor covers products of these errors while each is below 2^-9.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parity.ops.compressor.case import RATIO
from parity.ops.compressor.operands import CompressorOperands, Step
from parity.pages.layout import DIM
from parity.results import Labels, Status, Verdict

U = 2.0**-24
GAMMA_20 = 20 * U / (1 - 20 * U)

Window = tuple[Tensor, Tensor]


def windows(operands: CompressorOperands) -> list[tuple[Tensor, Window]]:
    """For each call (closes bool [N], (kv, score) float64 [m, 8, 128] of the m windows that it closes).

    A request's tokens are kept in a plain list, which a rollback cuts: whatever the split, a window is eight of them.
    """
    steps = operands.steps
    # Row 0 stands for tokens before a sequence's start; the others are all tokens of all calls in order.
    kv = torch.cat([steps[0].kv[:1] * 0, *(step.kv for step in steps)]).to(torch.float64)
    encoded = [step.score + operands.ape[step.positions.long() % RATIO] for step in steps]
    score = torch.cat([torch.full_like(encoded[0][:1], -torch.inf), *encoded]).to(torch.float64)
    kept: dict[int, list[int]] = {}
    found, row = [], 0
    for step in steps:
        closes: list[bool] = []
        rows: list[list[int]] = []
        for request, position in zip(*(x.tolist() for x in step.names[:2]), strict=True):
            row += 1
            tokens = kept.setdefault(request, [])
            del tokens[position:]
            tokens.append(row)
            closes.append(position % RATIO == RATIO - 1)
            if closes[-1]:
                rows.append(([0] * RATIO + tokens)[-2 * RATIO :])
        index = torch.tensor(rows, dtype=torch.int64, device=kv.device).view(-1, 2 * RATIO)
        first, own = index[:, :RATIO], index[:, RATIO:]
        pair = (
            torch.cat((kv[first][..., :DIM], kv[own][..., DIM:]), 1),
            torch.cat((score[first][..., :DIM], score[own][..., DIM:]), 1),
        )
        found.append((torch.tensor(closes, dtype=torch.bool, device=kv.device), pair))
    return found


def expected(window: Window) -> tuple[Tensor, Tensor]:
    """(pooled, bound), both float64 [m, 128]."""
    kv, x = window
    top = x.amax(1, keepdim=True)
    d = x - top
    p = torch.softmax(x, 1)
    error = U * (x.abs() + top.abs() + d.abs()) + (2 + 1.173 * d.abs()) * 2.0**-23
    error = torch.where(p > 0, error, 0.0)
    terms = kv.abs() * p * (error + error.amax(1, keepdim=True) + GAMMA_20)
    return (kv * p).sum(1), terms.sum(1) * (1 + 2.0**-8) + 2.0**-126


def judge_compressor(outputs: list[tuple[Tensor, Tensor]], operands: CompressorOperands, labels: Labels) -> Verdict:
    """One verdict on all calls of a case: outputs[i] = (pooled [N, 128], closes [N]) of call i."""
    cells, worst = 0, 0.0
    exact = operands.case.data == "exact"
    for at, ((pooled, closes), (wanted_closes, window)) in enumerate(zip(outputs, windows(operands), strict=True)):
        step = operands.steps[at]
        differ = (closes != wanted_closes).nonzero()
        if len(differ):
            i = int(differ[0, 0])
            note = f"call {at}, token at position {int(step.positions[i])}: whether it closes a group"
            return _failed(labels, step, i, str(bool(closes[i])), str(bool(wanted_closes[i])), note, cells)
        wanted, bound = expected(window)
        bound = torch.zeros_like(bound) if exact else bound
        got = pooled[wanted_closes].to(torch.float64)
        error = (got - wanted).abs()
        bad = ~(error <= bound)
        cells += wanted.numel()
        if bool(bad.any()):
            key, channel = divmod(int(bad.reshape(-1).to(torch.uint8).argmax()), DIM)
            i = int(wanted_closes.nonzero()[key, 0])
            note = f"call {at}, key closed at position {int(step.positions[i])}, channel {channel}"
            note += f", {int(bad.sum())} of {bad.numel()} wrong"
            values = (float(got[key, channel]), float(wanted[key, channel]))
            return _failed(labels, step, i, *values, note, cells, float(bound[key, channel]))
        if not exact and wanted.numel():
            worst = max(worst, float((error / bound).max()))
    return labels.verdict(Status.PASSED, cells=cells, **({} if exact else {"ratio": worst}))


def _failed(
    labels: Labels,
    step: Step,
    token: int,
    got: float | str,
    wanted: float | str,
    note: str,
    cells: int,
    bound: float | None = None,
) -> Verdict:
    where = {"request": int(step.names[0][token]), "row": token}
    return labels.failed(where=where, got=got, wanted=wanted, bound=bound, note=note, cells=cells)

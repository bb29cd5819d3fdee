"""Comparators of logits: exact, bounded, bitwise, tail and non-finite. Each returns a verdict that names the worst
cell.

``out`` is what an implementation returned, float32 ``[T, max_context_len]``; ``operands`` is anything with
``context_lens`` [B, next_n], ``block_table`` [B, max_pages], ``max_context_len``, ``clean_logits`` and (for the repro
line) ``case``. Cells at or past a row's context length are read by ``compare_tail`` only.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.bounds import Expected
from parity.numerics.places import coordinates
from parity.results import Labels, Status, Verdict, merge

__all__ = [
    "Status",
    "Verdict",
    "compare_bits",
    "compare_bounded",
    "compare_exact",
    "compare_nonfinite",
    "compare_tail",
    "merge",
]


def compare_exact(
    out: torch.Tensor,
    expected: Expected,
    operands: Any,
    *,
    impl: str = "NAME",
    level: str = "layout",
    check: str = "exact",
) -> Verdict:
    """Zero tolerance, for ``exact_expected``: every visible cell equals the expected one, zeros of any sign."""
    labels = _labels(operands, impl, level, check)
    if refused := _refuse(out, operands, labels):
        return refused
    got, wanted, visible = _rows(out, expected)
    bad = visible & (got != wanted) & ~(got.isnan() & wanted.isnan())
    cells = int(visible.sum())
    if not bool(bad.any()):
        return labels.verdict(Status.PASSED, cells=cells)
    row, key = _first(bad)
    return labels.failed(
        cells=cells,
        where=_where(operands, expected.rows, row, key),
        got=float(got[row, key]),
        wanted=float(wanted[row, key]),
        note=_count(bad, visible),
    )


def compare_bounded(
    out: torch.Tensor,
    expected: Expected,
    operands: Any,
    *,
    contract: Contract | None = None,
    impl: str = "NAME",
    level: str = "rounding",
    check: str = "bounded",
) -> Verdict:
    """|out - exact| <= bound in every visible cell; infinities and NaN only where ``expected`` allows or asks for them.

    Reports the worst ratio and the resolution. One verdict is never vacuous by itself: ``verdict.merge`` decides that
    per check."""
    labels = _labels(operands, impl, level, check)
    if refused := _refuse(out, operands, labels):
        return refused
    got, wanted, visible = _rows(out, expected)
    finite = torch.isfinite(wanted)
    error = (got - wanted).abs()
    bound = expected.bound
    # NaN and infinite ``got`` give a NaN or infinite error, which no finite bound admits.
    good = torch.where(finite, (error <= bound) & torch.isfinite(got), _same_class(got, wanted))
    good |= expected.free & ~torch.isfinite(got) | expected.nan_ok & got.isnan()
    if contract is not None and contract.nonfinite == "unspecified":
        good |= ~finite
    bad = visible & ~good
    ratio = torch.where(error == 0, 0.0, error / bound)
    ratio = torch.where(finite & torch.isfinite(got), ratio, torch.where(good, 0.0, math.inf))
    ratio = torch.where(visible, ratio, -1.0)
    cells = int(visible.sum())
    numbers = {
        "cells": cells,
        "ratio": max(0.0, float(ratio.max())) if cells else 0.0,
        "resolution": _resolution(expected, visible & finite),
    }
    note = "" if contract is None or contract.describe_dot() == "ieee float32" else f"dot: {contract.describe_dot()}"
    if not bool(bad.any()):
        return labels.verdict(Status.PASSED, note=note, **numbers)
    worst = torch.where(bad, ratio, -2.0)
    row, key = divmod(int(worst.argmax()), worst.shape[1])
    return labels.failed(
        **{**numbers, "ratio": float(worst[row, key])},
        where=_where(operands, expected.rows, row, key),
        got=float(got[row, key]),
        wanted=float(wanted[row, key]),
        bound=float(bound[row, key]),
        note=_count(bad, visible) + (f", {note}" if note else ""),
    )


def compare_nonfinite(
    out: torch.Tensor,
    expected: Expected,
    operands: Any,
    *,
    contract: Contract | None = None,
    impl: str = "NAME",
    level: str = "rounding",
    check: str = "nonfinite",
) -> Verdict:
    """Every visible cell has the class (finite, NaN, +inf, -inf) of the exact evaluation; values are not looked at.

    UNSUPPORTED where the contract leaves non-finite operands unspecified."""
    labels = _labels(operands, impl, level, check)
    if contract is not None and contract.nonfinite == "unspecified":
        return labels.verdict(Status.UNSUPPORTED, message="the contract leaves non-finite operands unspecified")
    if refused := _refuse(out, operands, labels):
        return refused
    got, wanted, visible = _rows(out, expected)
    good = _same_class(got, wanted) | (expected.free & ~torch.isfinite(got)) | (expected.nan_ok & got.isnan())
    bad = visible & ~good
    cells = int(visible.sum())
    if not bool(bad.any()):
        return labels.verdict(Status.PASSED, cells=cells)
    row, key = _first(bad)
    return labels.failed(
        cells=cells,
        where=_where(operands, expected.rows, row, key),
        got=float(got[row, key]),
        wanted=_class_name(float(wanted[row, key])),
        note=_count(bad, visible),
    )


def compare_tail(
    out: torch.Tensor,
    operands: Any,
    contract: Contract | None = None,
    *,
    impl: str = "NAME",
    level: str = "layout",
    check: str = "tail",
) -> Verdict:
    """With ``clean_logits`` every cell at or past its row's length is -inf. Without, or where the contract promises no
    tail, nothing
    is read and the verdict has no cells."""
    labels = _labels(operands, impl, level, check)
    if refused := _refuse(out, operands, labels):
        return refused
    if not operands.clean_logits or (contract is not None and contract.tail == "unspecified"):
        return labels.verdict(Status.PASSED)
    lens = operands.context_lens.reshape(-1).to(out.device)
    tail = torch.arange(out.shape[1], device=out.device) >= lens[:, None]
    bad = tail & (out != -math.inf)
    cells = int(tail.sum())
    if not bool(bad.any()):
        return labels.verdict(Status.PASSED, cells=cells)
    row, key = _first(bad)
    where = coordinates(row, None, operands.context_lens, operands.block_table) | {"key": key}
    note = f"past the context length {int(lens[row])}, {_count(bad, tail)}"
    return labels.failed(cells=cells, where=where, got=float(out[row, key]), wanted=-math.inf, note=note)


def compare_bits(
    out: torch.Tensor,
    other: torch.Tensor,
    operands: Any,
    *,
    rows: torch.Tensor | None = None,
    other_rows: torch.Tensor | None = None,
    impl: str = "NAME",
    level: str = "invariance",
    check: str = "bits",
) -> Verdict:
    """Two outputs have the same bits in every visible cell (NaN equals NaN). ``operands`` belong to ``out``.

    ``rows`` and ``other_rows`` (int64, same length) pair rows of the two where they are not the same rows in the same
    order."""
    labels = _labels(operands, impl, level, check)
    if refused := _refuse(out, operands, labels):
        return refused
    rows = torch.arange(out.shape[0], device=out.device) if rows is None else rows.to(out.device)
    other_rows = rows if other_rows is None else other_rows.to(out.device)
    lens = operands.context_lens.reshape(-1).to(out.device)[rows]
    width = int(lens.max()) if lens.numel() else 0
    mine, theirs = out[rows, :width], other.to(out.device)[other_rows, :width]
    visible = torch.arange(width, device=out.device) < lens[:, None]
    same = mine.contiguous().view(torch.int32) == theirs.contiguous().view(torch.int32)
    bad = visible & ~same & ~(mine.isnan() & theirs.isnan())
    cells = int(visible.sum())
    if not bool(bad.any()):
        return labels.verdict(Status.PASSED, cells=cells)
    row, key = _first(bad)
    return labels.failed(
        cells=cells,
        where=_where(operands, rows, row, key),
        got=float(mine[row, key]),
        wanted=float(theirs[row, key]),
        note=f"bits differ, {_count(bad, visible)}",
    )


def _labels(operands: Any, impl: str, level: str, check: str) -> Labels:
    return Labels(level=level, check=check, case=str(getattr(operands, "case", "")), impl=impl)


def _refuse(out: Any, operands: Any, labels: Labels) -> Verdict | None:
    """A failure when ``out`` has not the shape and type that the calling convention names."""
    shape = (operands.context_lens.numel(), operands.max_context_len)
    if not isinstance(out, torch.Tensor):
        return labels.failed(got=type(out).__name__, wanted=f"a float32 tensor {list(shape)}")
    if out.dtype != torch.float32 or tuple(out.shape) != shape:
        return labels.failed(got=f"{out.dtype} {list(out.shape)}", wanted=f"torch.float32 {list(shape)}")
    return None


def _rows(out: torch.Tensor, expected: Expected) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(got float64, wanted float64, visible), all [R, W] on the device of ``expected``."""
    device, width = expected.logits.device, expected.logits.shape[1]
    got = out[expected.rows.to(out.device), :width].to(device).to(torch.float64)
    return got, expected.logits, expected.visible()


def _same_class(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    both_finite = torch.isfinite(got) & torch.isfinite(wanted)
    return both_finite | (got.isnan() & wanted.isnan()) | ((got == wanted) & got.isinf())


def _class_name(value: float) -> str:
    return "NaN" if math.isnan(value) else ("+inf" if value > 0 else "-inf") if math.isinf(value) else "a finite value"


def _resolution(expected: Expected, cells: torch.Tensor) -> float | None:
    """Median bound over median |logit| of the given cells: inf when the median logit is zero, None without cells."""
    if not bool(cells.any()):
        return None
    size = float(expected.logits[cells].abs().median())
    bound = float(expected.bound[cells].median())
    return bound / size if size else math.inf


def _first(bad: torch.Tensor) -> tuple[int, int]:
    return divmod(int(bad.flatten().to(torch.uint8).argmax()), bad.shape[1])


def _where(operands: Any, rows: torch.Tensor, row: int, key: int) -> dict[str, int]:
    return coordinates(int(rows[row]), key, operands.context_lens, operands.block_table)


def _count(bad: torch.Tensor, judged: torch.Tensor) -> str:
    rows = int(bad.any(1).sum())
    return f"{int(bad.sum())} of {int(judged.sum())} cells wrong, in {rows} of {bad.shape[0]} rows"

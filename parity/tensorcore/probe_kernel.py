"""Dots of a GPU through Triton's ``tl.dot``, tile by tile, in the tile shapes that the kernels under test use.

Imports triton, so only a process that has decided on interpretation may import it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from parity.tensorcore.probe_search import DotUnit

DEPTH = 128


@triton.jit
def tile_dots(
    a,
    b,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    IMPRECISE: tl.constexpr,
    TF32: tl.constexpr,
):
    """out[p] = a[p] @ b[p]^T for tiles a [ROWS, DEPTH], b [COLUMNS, DEPTH]; keys lie along the rows, as in impl."""
    tile = tl.program_id(0).to(tl.int64)
    row, column, depth = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    x = tl.load(a + tile * ROWS * DEPTH + row[:, None] * DEPTH + depth[None, :])
    y = tl.load(b + tile * COLUMNS * DEPTH + column[:, None] * DEPTH + depth[None, :])
    if TF32:
        s = tl.dot(x, tl.trans(y), input_precision="tf32")
    elif IMPRECISE >= 0:
        s = tl.dot(x, tl.trans(y), max_num_imprecise_acc=IMPRECISE)
    else:
        s = tl.dot(x, tl.trans(y))
    tl.store(out + tile * ROWS * COLUMNS + row[:, None] * COLUMNS + column[None, :], s)


def triton_unit(
    operand: str,
    device: torch.device,
    *,
    rows: int = 128,
    columns: int = 64,
    warps: int = 4,
    imprecise: int | None = None,
) -> DotUnit:
    """The present GPU's matrix units as ``probe_search`` wants them, for one operand type and tile shape."""

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = torch.full((a.shape[0], rows, columns), float("nan"), dtype=torch.float32, device=device)
        if a.shape[0]:
            with torch.cuda.device(device):
                tile_dots[(a.shape[0],)](
                    a.contiguous(),
                    b.contiguous(),
                    out,
                    rows,
                    columns,
                    DEPTH,
                    -1 if imprecise is None else imprecise,
                    operand == "tf32",
                    num_warps=warps,
                )
        return out

    name = operand if imprecise is None else f"{operand} imprecise {imprecise}"
    return DotUnit(operand, dot, device, rows, columns, DEPTH, name)

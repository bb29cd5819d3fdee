"""The indexer's three matrix products, whose order of summation the published code leaves to the library.

`how="library"` makes the same torch call as the published code: its bits depend on the machine, and for a few rows also
on how many rows are computed together. `how="exact"` evaluates in float64 and rounds where the published code stores.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from reference import exact, formats

HOW = ("exact", "library")
_ROWS = 256  # rows whose partial sums stay in a CPU's cache
_BLOCK = 128  # fp8 quantisation block along the inner dimension, and both ways in the weight


def project_float32(x: Tensor, weight: Tensor, how: str = "exact") -> Tensor:
    """x [..., K] times weight [N, K] transposed -> float32 [..., N]; operands are widened, never rounded.

    "exact" adds the K products in order in float64, element by element, so that a row's bits cannot depend on which
    other rows are computed with it: this is what makes a prompt's keys independent of how the prompt is split.
    """
    _check("project_float32", x, weight, how)
    if how == "library":
        return F.linear(x.to(torch.float32), weight.to(torch.float32))
    wide, columns = exact.widen(x).reshape(-1, x.shape[-1]), exact.widen(weight).t().contiguous()
    out = torch.zeros((wide.shape[0], weight.shape[0]), dtype=torch.float64, device=x.device)
    for start in range(0, wide.shape[0], _ROWS):
        rows, total = wide[start : start + _ROWS], out[start : start + _ROWS]
        for k in range(rows.shape[1]):
            total.add_(rows[:, k : k + 1] * columns[k])
    return out.to(torch.float32).view(*x.shape[:-1], weight.shape[0])


def project_bfloat16(x: Tensor, weight: Tensor, how: str = "exact") -> Tensor:
    """x bfloat16 [..., K] times weight bfloat16 [N, K] transposed -> bfloat16 [..., N], rounded once."""
    _check("project_bfloat16", x, weight, how)
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        raise TypeError(f"project_bfloat16: x and weight must be bfloat16, got {x.dtype} and {weight.dtype}")
    if how == "library":
        return F.linear(x, weight)
    return formats.round_to(exact.widen(x) @ exact.widen(weight).t(), torch.bfloat16)


def quantise_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Published fp8 quantiser of bfloat16 [..., K], blocks of 128: e4m3 uint8 [..., K], exponents [..., K/128]."""
    blocks = x.unflatten(-1, (-1, _BLOCK))
    exponent = formats.fp8_pow2_exponent(blocks)
    # Dividing by a power of two is exact in float64, so the only rounding is the one to e4m3.
    return formats.e4m3_encode(exact.widen(blocks) * formats.pow2(-exponent)[..., None]).flatten(-2), exponent


def project_fp8(x: Tensor, weight: Tensor, weight_exponent: Tensor, how: str = "exact") -> Tensor:
    """Published fp8 product: x bfloat16 [..., K], weight e4m3 [N, K], exponents [N/128, K/128] -> bfloat16 [..., N].

    Per block of 128 along K a float32 partial sum, times the two powers of two, added in float32; then one rounding.
    """
    _check("project_fp8", x, weight, how)
    if weight.shape[0] % _BLOCK or weight.shape[1] % _BLOCK:
        raise ValueError(f"project_fp8: weight must have sizes divisible by {_BLOCK}, got {list(weight.shape)}")
    blocks = (weight.shape[0] // _BLOCK, weight.shape[1] // _BLOCK)
    if tuple(weight_exponent.shape) != blocks:
        raise ValueError(f"project_fp8: weight_exponent must be {list(blocks)}, got {list(weight_exponent.shape)}")
    payload, exponent = quantise_activation(x)
    left, right = formats.e4m3_decode(payload), formats.e4m3_decode(weight)
    total = torch.zeros((*x.shape[:-1], weight.shape[0]), dtype=torch.float32, device=x.device)
    for block in range(blocks[1]):
        part = slice(block * _BLOCK, (block + 1) * _BLOCK)
        if how == "library":
            partial = F.linear(left[..., part], right[:, part])
        else:
            partial = (exact.widen(left[..., part]) @ exact.widen(right[:, part]).t()).to(torch.float32)
        column = weight_exponent[:, block].to(torch.int32).repeat_interleave(_BLOCK)
        total = total + partial * formats.pow2(exponent[..., block, None] + column).to(torch.float32)
    return total.to(torch.bfloat16)


def _check(function: str, x: Tensor, weight: Tensor, how: str) -> None:
    if how not in HOW:
        raise ValueError(f"{function}: how must be one of {', '.join(HOW)}, got {how!r}")
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{function}: expected x [..., K] and weight [N, K], got {list(x.shape)}, {list(weight.shape)}"
        )

"""The indexer evaluated in float64 from operands exactly as stored: what error bounds are measured against.

Nothing here rounds to a narrower type. Sums of D products carry at most D * 2**-53 of relative error on the absolute
terms, which a caller's bound accounts for; on small-integer data every result is exact.
"""

import torch
from torch import Tensor

from reference import formats

ROPE_DIM = 64
"""Rotated channels of a key, the last ones."""


def widen(x: Tensor) -> Tensor:
    """float64 copy of any float tensor, float8_e4m3fn included; exact, NaN kept."""
    if x.dtype == torch.float8_e4m3fn:
        return formats.e4m3_decode(x).to(torch.float64)
    if not x.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, got {x.dtype}")
    return x.to(torch.float64)


def dots(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Per-head dots of q [n, H, D] with keys k [S, D], any float dtypes.

    Returns (dot, absdot), both float64 [n, H, S]: sum_d q k and sum_d |q| |k|.
    """
    if q.dim() != 3 or k.dim() != 2 or q.shape[2] != k.shape[1]:
        raise ValueError(f"dots: expected q [n, H, D] and k [S, D], got {list(q.shape)} and {list(k.shape)}")
    rows, heads, dim = q.shape
    wide_q, wide_k = widen(q).reshape(rows * heads, dim), widen(k).t()
    shape = (rows, heads, k.shape[0])
    return (wide_q @ wide_k).view(shape), (wide_q.abs() @ wide_k.abs()).view(shape)


def logits_from_dots(dot: Tensor, w: Tensor, s: Tensor | None = None) -> Tensor:
    """s * sum_h w_h relu(dot_h), float64 [n, S], from dot float64 [n, H, S], w [n, H] and per-key scales s [S] or None.

    NaN passes through the ReLU.
    """
    if dot.dim() != 3 or tuple(w.shape) != tuple(dot.shape[:2]):
        raise ValueError(f"logits: expected dot [n, H, S] and w [n, H], got {list(dot.shape)} and {list(w.shape)}")
    total = torch.bmm(widen(w)[:, None, :], torch.relu(dot))[:, 0, :]
    if s is None:
        return total
    if tuple(s.shape) != (dot.shape[2],):
        raise ValueError(f"logits: expected scales s [{dot.shape[2]}], got {list(s.shape)}")
    return total * widen(s)


def logits(q: Tensor, k: Tensor, w: Tensor, s: Tensor | None = None) -> Tensor:
    """Index scores s * sum_h w_h relu(sum_d q k), float64 [n, S]: q [n, H, D], k [S, D], w [n, H], s [S] or None."""
    if q.dim() != 3 or k.dim() != 2 or q.shape[2] != k.shape[1]:
        raise ValueError(f"logits: expected q [n, H, D] and k [S, D], got {list(q.shape)} and {list(k.shape)}")
    dot = (widen(q).reshape(-1, q.shape[2]) @ widen(k).t()).view(q.shape[0], q.shape[1], k.shape[0])
    return logits_from_dots(dot, w, s)


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal Sylvester Hadamard transform of the last dimension (a power of two), float64."""
    x = widen(x)
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"hadamard: the last dimension must be a power of two, got {dim}")
    y, stride = x, 1
    while stride < dim:
        even, odd = y.unflatten(-1, (dim // (2 * stride), 2, stride)).unbind(-2)
        y = torch.stack((even + odd, even - odd), dim=-2).flatten(-3)
        stride *= 2
    return y * float(dim) ** -0.5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary step on the last 64 of x [..., D] as adjacent pairs, cos and sin [..., 32] broadcast; all float64.

    Returns the rotated values and the sums of absolute terms (|x| on channels that do not turn).
    """
    keep, turn = x[..., :-ROPE_DIM], x[..., -ROPE_DIM:]
    re, im = turn[..., 0::2], turn[..., 1::2]
    c, s = widen(cos), widen(sin)
    value = torch.stack((re * c - im * s, re * s + im * c), dim=-1).flatten(-2)
    terms = torch.stack(((re * c).abs() + (im * s).abs(), (re * s).abs() + (im * c).abs()), dim=-1).flatten(-2)
    return torch.cat((keep, value), dim=-1), torch.cat((keep.abs(), terms), dim=-1)


def key_chain(
    pooled: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, rope_table: Tensor
) -> tuple[Tensor, Tensor]:
    """Stored keys before quantisation: Hadamard(rope(norm(pooled))), with the sums of absolute terms of each.

    pooled [N, 128], norm_weight [128], positions int [N] (the group's first token), rope_table float32
    [max_position, 64] as 32 (cos, sin) pairs. Returns (z, A), both float64 [N, 128]: with y = pooled * w / sqrt(mean
    pooled^2 + eps) and the absolute terms of each rotated y, A = 128**-0.5 * their sum, equal in all channels of a row.
    """
    if pooled.dim() != 2 or tuple(norm_weight.shape) != (pooled.shape[1],):
        raise ValueError(
            "key_chain: expected pooled [N, D] and norm_weight [D], "
            f"got {list(pooled.shape)} and {list(norm_weight.shape)}"
        )
    if rope_table.dim() != 2 or rope_table.shape[1] != ROPE_DIM:
        raise ValueError(f"key_chain: expected rope_table [max_position, {ROPE_DIM}], got {list(rope_table.shape)}")
    if tuple(positions.shape) != (pooled.shape[0],):
        raise ValueError(f"key_chain: expected positions [{pooled.shape[0]}], got {list(positions.shape)}")
    a = widen(pooled)
    y = a / torch.sqrt(a.square().mean(dim=-1, keepdim=True) + eps) * widen(norm_weight)
    pairs = widen(rope_table[positions.long()])
    turned, terms = rotate(y, pairs[:, 0::2], pairs[:, 1::2])
    dim = pooled.shape[1]
    total = terms.sum(dim=-1, keepdim=True) * float(dim) ** -0.5
    return hadamard(turned), total.expand(-1, dim).contiguous()

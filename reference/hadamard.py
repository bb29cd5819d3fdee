"""The orthonormal Hadamard transform of 128 channels: as published (float32 butterflies) and exact (float64)."""

import torch
from torch import Tensor

from reference import exact


def hadamard(x: Tensor) -> Tensor:
    """Published transform of bfloat16 [..., D], D a power of two: one rounding to bfloat16 at the end.

    Butterflies (u, v) -> (u + v, u - v) in float32 at element strides 1, 2, 4 .. D/2 (Sylvester order), then one
    float32 multiplication by f32(D**-0.5).
    """
    if x.dtype != torch.bfloat16:
        raise TypeError(f"hadamard: x must be bfloat16, got {x.dtype}")
    dim = x.shape[-1]
    if dim < 1 or dim & (dim - 1):
        raise ValueError(f"hadamard: the last dimension must be a power of two, got {dim}")
    y, stride = x.to(torch.float32), 1
    while stride < dim:
        u, v = y.unflatten(-1, (dim // (2 * stride), 2, stride)).unbind(-2)
        y = torch.stack((u + v, u - v), dim=-2).flatten(-3)
        stride *= 2
    return (y * torch.tensor(dim**-0.5, dtype=torch.float32, device=x.device)).to(torch.bfloat16)


def hadamard_exact(x: Tensor) -> Tensor:
    """The same transform in float64, of any float dtype, without rounding in between."""
    return exact.hadamard(x)

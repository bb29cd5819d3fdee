"""The store's published schedule in torch, rounding point by rounding point; a layout encodes its keys.

An independent transcription with the order of every float32 operation written out, so that a store can be compared
bit for bit. Elementwise float32 products and sums are IEEE in torch on every device; roots and quotients of a row are
taken by numpy, because torch's float32 square root is not correctly rounded on some CPUs.
"""

import numpy as np
import torch
from torch import Tensor

from reference.hadamard import hadamard
from reference.rope import rotate

MEAN_TERMS = 128


def mean_square(a: Tensor) -> Tensor:
    """Mean of squares float32 [N] of a float32 [N, 128], in the order of the fused store: four channels of a chunk one
    after the other from zero, then the 32 chunks pairwise, those farthest apart first."""
    squares = (a * a).unflatten(1, (32, 4))
    parts = torch.zeros_like(squares[:, :, 0])
    for i in range(4):
        parts = parts + squares[:, :, i]
    while parts.shape[1] > 1:
        half = parts.shape[1] // 2
        parts = parts[:, :half] + parts[:, half:]
    return parts[:, 0] * (1.0 / MEAN_TERMS)


def inverse_root(mean: Tensor, eps: float) -> Tensor:
    """f32(1 / f32(sqrt(f32(mean + eps)))), float32 [N]."""
    total = mean.cpu().numpy() + np.float32(eps)
    return torch.from_numpy(np.float32(1.0) / np.sqrt(total)).to(mean.device)


def rows_from_root(pooled: Tensor, norm_weight: Tensor, root: Tensor, positions: Tensor, rope_table: Tensor) -> Tensor:
    """Published keys before quantisation, bfloat16 [N, 128]; root: inverse root mean square of each row [N]."""
    a = pooled.to(torch.bfloat16).to(torch.float32)
    normed = (a * root[:, None] * norm_weight.to(torch.float32)).to(torch.bfloat16)
    return hadamard(rotate(normed, rope_table[positions.long()]))


def rows(pooled: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, rope_table: Tensor) -> Tensor:
    """Published keys before quantisation, bfloat16 [N, 128], the mean summed in the fused store's order."""
    root = inverse_root(mean_square(pooled.to(torch.bfloat16).to(torch.float32)), eps)
    return rows_from_root(pooled, norm_weight, root, positions, rope_table)

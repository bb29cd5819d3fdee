"""Faults of the key chain: norm, rotary step and Hadamard transform."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.store.faults import staged as ok
from parity.ops.store.faults.staged import Call, butterflies

MODELS, add = collector("store")
BF16 = {"layout": "bf16"}
FP8 = {"layout": "fp8"}
PUBLISHED = {"layout": "bf16", "extra": {"contract": {"schedule": "published"}}}


def rounded(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype).to(torch.float32)


def at(c: Call, positions: Tensor) -> Tensor:
    """Rows of the rotary table at other positions."""
    return c.rope_table[positions.long().clamp(0, len(c.rope_table) - 1)]


def turned_by(theta: float, factor: float) -> object:
    """Angles of positions by a theta and a linear interpolation instead of the table."""

    def angles(c: Call) -> Tensor:
        step = theta ** (-torch.arange(32, dtype=torch.float32) / 32) / factor
        angle = c.positions.to(torch.float32)[:, None] * step
        return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)

    return angles


# --------------------------------------------------------------------------------------------------------------- norm
add(
    "norm-weight-bf16",
    "norm",
    "precision",
    "the norm weight is read as bf16",
    "ROCm/aiter#3451, ROCm/ATOM#1796",
    weight=lambda c: rounded(ok.weight(c)),
    **FP8,
)
add(
    "norm-not-rounded",
    "norm",
    "precision",
    "the published bf16 rounding between norm and rotation is missing",
    "sgl-project/sglang#36665, vllm-project/vllm#50803",
    normed=lambda c, a, r, w: a * r * w,
    **PUBLISHED,
)
add(
    "norm-rounded",
    "norm",
    "precision",
    "a fused store rounds to bf16 between norm and rotation",
    normed=lambda c, a, r, w: rounded(a * r * w),
    **FP8,
)
add(
    "pooled-bf16",
    "norm",
    "precision",
    "pooled keys are rounded to bf16 first",
    pooled=lambda c: rounded(ok.pooled(c)),
    **FP8,
)
add(
    "pooled-not-rounded",
    "norm",
    "precision",
    "the published bf16 rounding of the pooled key is missing",
    pooled=lambda c: c.pooled.to(torch.float32),
    **PUBLISHED,
)
add("norm-weight-missing", "norm", "formula", "the norm weight is not applied", normed=lambda c, a, r, w: a * r, **FP8)
add("norm-weight-plus-1", "norm", "formula", "1 + weight is applied", normed=lambda c, a, r, w: a * r * (1 + w), **FP8)
add(
    "norm-missing",
    "norm",
    "formula",
    "keys are not normalised",
    root=lambda c, mean: torch.ones_like(mean),
    **FP8,
)
add(
    "norm-without-eps",
    "norm",
    "formula",
    "eps is left out, so a zero row is 0 / 0",
    root=lambda c, mean: 1.0 / mean.sqrt(),
    **FP8,
)
add(
    "norm-eps-outside-root",
    "norm",
    "formula",
    "eps is added to the root instead of the mean",
    root=lambda c, mean: 1.0 / (mean.sqrt() + c.eps),
    **FP8,
)
add(
    "norm-eps-fixed",
    "norm",
    "formula",
    "eps is a constant of another model, 1e-5",
    root=lambda c, mean: 1.0 / torch.sqrt(mean + 1e-5),
    **FP8,
)
add(
    "norm-sum",
    "norm",
    "formula",
    "the sum of squares stands for their mean",
    mean_square=lambda c, a: ok.mean_square(c, a) * 128,
    **FP8,
)
add(
    "norm-mean-of-64",
    "norm",
    "formula",
    "the mean of squares is taken over the first 64 channels",
    mean_square=lambda c, a: ok.mean_square(c, a[:, :64]),
    **FP8,
)
add(
    "norm-centred",
    "norm",
    "formula",
    "the mean is subtracted, as layer norm does",
    pooled=lambda c: ok.pooled(c) - ok.pooled(c).mean(1, keepdim=True),
    **FP8,
)
add(
    "norm-root-12-bits",
    "norm",
    "precision",
    "the reciprocal root is an approximation of 12 bits",
    root=lambda c, mean: (ok.root(c, mean).view(torch.int32) & -(1 << 12)).view(torch.float32),
    **FP8,
)

# --------------------------------------------------------------------------------------------------------------- rope
add(
    "rope-half-split",
    "rope",
    "formula",
    "pairs are channel i and i + 32 instead of neighbours",
    "sgl-project/sglang#13439, huggingface/transformers#46842",
    rotate=lambda c, x, pairs: _half_split(c, x, pairs),
    **FP8,
)
add(
    "rope-first-64",
    "rope",
    "formula",
    "the first 64 channels are turned instead of the last",
    "sgl-project/sglang#30111, d9d-project/d9d#38",
    rotate=lambda c, x, pairs: ok.rotate(c, x.roll(64, 1), pairs).roll(64, 1),
    **FP8,
)
add(
    "rope-position-j",
    "rope",
    "formula",
    "the key's position is j instead of 4 j",
    "ml-explore/mlx-lm#1189",
    angles=lambda c: at(c, c.positions // 4),
    **FP8,
)
add(
    "rope-position-last-token",
    "rope",
    "formula",
    "the position of the group's last token is used",
    angles=lambda c: at(c, c.positions + 3),
    **FP8,
)
add(
    "rope-other-theta",
    "rope",
    "formula",
    "angles are those of the uncompressed layers: another theta, no interpolation",
    "NVIDIA-NeMo/Automodel#2103, 1CatAI/1Cat-vLLM#251",
    angles=turned_by(10000.0, 1.0),
    **FP8,
)
add("rope-missing", "rope", "formula", "keys are not turned", rotate=lambda c, x, pairs: x, **FP8)
add(
    "rope-twice",
    "rope",
    "formula",
    "keys are turned twice",
    rotate=lambda c, x, pairs: ok.rotate(c, ok.rotate(c, x, pairs), pairs),
    **FP8,
)
add(
    "rope-backwards",
    "rope",
    "formula",
    "keys are turned by the opposite angle",
    rotate=lambda c, x, pairs: ok.rotate(c, x, pairs * torch.tensor([1.0, -1.0]).repeat(32)),
    **FP8,
)
add(
    "rope-table-by-halves",
    "rope",
    "bytes",
    "the table is read as 32 cosines, then 32 sines",
    angles=lambda c: torch.stack((ok.angles(c)[:, :32], ok.angles(c)[:, 32:]), -1).flatten(-2),
    **FP8,
)
add(
    "rope-table-bf16",
    "rope",
    "precision",
    "cosine and sine are rounded to bf16",
    angles=lambda c: rounded(ok.angles(c)),
    **FP8,
)
add(
    "rope-not-rounded",
    "rope",
    "precision",
    "the published bf16 rounding after the rotation is missing",
    rotate=lambda c, x, pairs: _unrounded(c, x, pairs),
    **PUBLISHED,
)
add(
    "rope-row-0",
    "rope",
    "rows",
    "all tokens are turned by the first one's angle",
    angles=lambda c: at(c, c.positions[:1].expand(len(c.positions))),
    **FP8,
)
add(
    "rope-token-order",
    "rope",
    "rows",
    "the token's place in the batch stands for its position",
    angles=lambda c: at(c, 4 * torch.arange(len(c.positions))),
    **FP8,
)
add(
    "rope-position-16-bits",
    "rope",
    "integers",
    "positions are kept in 16 bits",
    angles=lambda c: at(c, c.positions & 0xFFFF),
    **FP8,
)
add(
    "rope-position-clamped",
    "rope",
    "launch",
    "positions stop at the original context of 65,536 tokens",
    angles=lambda c: at(c, c.positions.clamp_max(65535)),
    **FP8,
)


def _half_split(c: Call, x: Tensor, pairs: Tensor) -> Tensor:
    order = torch.cat((torch.arange(64), 64 + torch.arange(64).view(2, 32).t().reshape(-1)))
    return ok.rotate(c, x[:, order], pairs)[:, order.argsort()]


def _unrounded(c: Call, x: Tensor, pairs: Tensor) -> Tensor:
    from dataclasses import replace

    return ok.rotate(replace(c, schedule="fused"), x, pairs)


# ----------------------------------------------------------------------------------------------------------- hadamard
add(
    "hadamard-query-only",
    "hadamard",
    "formula",
    "only queries are transformed; keys are stored without",
    "ROCm/ATOM#1507, NVIDIA/TensorRT-LLM#13889",
    hadamard=lambda c, x: x,
    **FP8,
)
add(
    "hadamard-neither",
    "hadamard",
    "formula",
    "neither side is transformed, which leaves logits nearly as they were: the stored bytes alone tell",
    "vllm-project/vllm#55459, sgl-project/sglang#14926",
    hadamard=lambda c, x: x,
    **BF16,
)
add(
    "hadamard-not-scaled",
    "hadamard",
    "formula",
    "the factor 128^-1/2 is left out",
    "vllm-project/vllm#55459",
    hadamard=lambda c, x: butterflies(x),
    **FP8,
)
add(
    "hadamard-scaled-twice",
    "hadamard",
    "formula",
    "the factor 128^-1/2 is applied twice",
    hadamard=lambda c, x: ok.hadamard(c, x) * 128**-0.5,
    **FP8,
)
add(
    "hadamard-twice",
    "hadamard",
    "formula",
    "the transform is applied twice",
    hadamard=lambda c, x: ok.hadamard(c, ok.hadamard(c, x)),
    **FP8,
)
add(
    "hadamard-of-halves",
    "hadamard",
    "formula",
    "each half of 64 channels is transformed by itself",
    hadamard=lambda c, x: butterflies(x, (1, 2, 4, 8, 16, 32)) * 64**-0.5,
    **FP8,
)
add(
    "hadamard-bit-reversed",
    "hadamard",
    "formula",
    "the outputs come in bit-reversed order",
    hadamard=lambda c, x: ok.hadamard(c, x)[:, [int(f"{i:07b}"[::-1], 2) for i in range(128)]],
    **FP8,
)
add(
    "hadamard-before-rope",
    "hadamard",
    "formula",
    "the transform comes before the rotation",
    rotate=lambda c, x, pairs: ok.rotate(c, ok.hadamard(c, x), pairs),
    hadamard=lambda c, x: x,
    **FP8,
)
add(
    "hadamard-bf16-inputs",
    "hadamard",
    "precision",
    "a fused store rounds to bf16 before the transform",
    hadamard=lambda c, x: ok.hadamard(c, rounded(x)),
    **FP8,
)
add(
    "hadamard-rounded-twice",
    "hadamard",
    "precision",
    "the published transform is rounded before its factor and again after it",
    hadamard=lambda c, x: rounded(rounded(butterflies(x)) * 128**-0.5),
    **PUBLISHED,
)

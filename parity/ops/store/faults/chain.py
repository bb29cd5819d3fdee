"""Faults of the key chain: norm, rotary step and Hadamard transform."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.store.faults import staged as ok
from parity.ops.store.faults.staged import Call, butterflies

MODELS, fault = collector("store")
bf16, fp8 = fault, partial(fault, layout="fp8")
published = partial(bf16, contract={"schedule": "published"})


def rounded(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return x.to(dtype).to(torch.float32)


def at(c: Call, positions: Tensor) -> Tensor:
    """Rows of the rotary table at other positions."""
    return c.rope_table[positions.long().clamp(0, len(c.rope_table) - 1)]


def turned_by(theta: float, factor: float) -> Callable[[Call], Tensor]:
    """Angles of positions by a theta and a linear interpolation instead of the table."""

    def angles(c: Call) -> Tensor:
        step = theta ** (-torch.arange(32, dtype=torch.float32) / 32) / factor
        angle = c.positions.to(torch.float32)[:, None] * step
        return torch.stack((angle.cos(), angle.sin()), -1).flatten(-2)

    return angles


# --------------------------------------------------------------------------------------------------------------- norm
fp8("norm-weight-bf16 (norm, precision): the norm weight is read as bf16 [ROCm/aiter#3451, ROCm/ATOM#1796]").by(
    weight=lambda c: rounded(ok.weight(c))
)
published(
    "norm-not-rounded (norm, precision): the published bf16 rounding between norm and rotation is missing "
    "[sgl-project/sglang#36665, vllm-project/vllm#50803]"
).by(normed=lambda c, a, r, w: a * r * w)
fp8("norm-rounded (norm, precision): a fused store rounds to bf16 between norm and rotation").by(
    normed=lambda c, a, r, w: rounded(a * r * w)
)
fp8("pooled-bf16 (norm, precision): pooled keys are rounded to bf16 first").by(pooled=lambda c: rounded(ok.pooled(c)))
published("pooled-not-rounded (norm, precision): the published bf16 rounding of the pooled key is missing").by(
    pooled=lambda c: c.pooled.to(torch.float32)
)
fp8("norm-weight-missing (norm, formula): the norm weight is not applied").by(normed=lambda c, a, r, w: a * r)
fp8("norm-weight-plus-1 (norm, formula): 1 + weight is applied").by(normed=lambda c, a, r, w: a * r * (1 + w))
fp8("norm-missing (norm, formula): keys are not normalised").by(root=lambda c, mean: torch.ones_like(mean))
fp8("norm-without-eps (norm, formula): eps is left out, so a zero row is 0 / 0").by(
    root=lambda c, mean: 1.0 / mean.sqrt()
)
fp8("norm-eps-outside-root (norm, formula): eps is added to the root instead of the mean").by(
    root=lambda c, mean: 1.0 / (mean.sqrt() + c.eps)
)
fp8("norm-eps-fixed (norm, formula): eps is a constant of another model, 1e-5").by(
    root=lambda c, mean: 1.0 / torch.sqrt(mean + 1e-5)
)
fp8("norm-sum (norm, formula): the sum of squares stands for their mean").by(
    mean_square=lambda c, a: ok.mean_square(c, a) * 128
)
fp8("norm-mean-of-64 (norm, formula): the mean of squares is taken over the first 64 channels").by(
    mean_square=lambda c, a: ok.mean_square(c, a[:, :64])
)
fp8("norm-centred (norm, formula): the mean is subtracted, as layer norm does").by(
    pooled=lambda c: ok.pooled(c) - ok.pooled(c).mean(1, keepdim=True)
)
fp8("norm-root-12-bits (norm, precision): the reciprocal root is an approximation of 12 bits").by(
    root=lambda c, mean: (ok.root(c, mean).view(torch.int32) & -(1 << 12)).view(torch.float32)
)


# --------------------------------------------------------------------------------------------------------------- rope
def _half_split(c: Call, x: Tensor, pairs: Tensor) -> Tensor:
    order = torch.cat((torch.arange(64), 64 + torch.arange(64).view(2, 32).t().reshape(-1)))
    return ok.rotate(c, x[:, order], pairs)[:, order.argsort()]


def _unrounded(c: Call, x: Tensor, pairs: Tensor) -> Tensor:
    return ok.rotate(replace(c, schedule="fused"), x, pairs)


fp8(
    "rope-half-split (rope, formula): pairs are channel i and i + 32 instead of neighbours "
    "[sgl-project/sglang#13439, huggingface/transformers#46842]"
).by(rotate=_half_split)
fp8(
    "rope-first-64 (rope, formula): the first 64 channels are turned instead of the last "
    "[sgl-project/sglang#30111, d9d-project/d9d#38]"
).by(rotate=lambda c, x, pairs: ok.rotate(c, x.roll(64, 1), pairs).roll(64, 1))
fp8("rope-position-j (rope, formula): the key's position is j instead of 4 j [ml-explore/mlx-lm#1189]").by(
    angles=lambda c: at(c, c.positions // 4)
)
fp8("rope-position-last-token (rope, formula): the position of the group's last token is used").by(
    angles=lambda c: at(c, c.positions + 3)
)
fp8(
    "rope-other-theta (rope, formula): angles are those of the uncompressed layers: another theta, no interpolation "
    "[NVIDIA-NeMo/Automodel#2103, 1CatAI/1Cat-vLLM#251]"
).by(angles=turned_by(10000.0, 1.0))
fp8("rope-missing (rope, formula): keys are not turned").by(rotate=lambda c, x, pairs: x)
fp8("rope-twice (rope, formula): keys are turned twice").by(
    rotate=lambda c, x, pairs: ok.rotate(c, ok.rotate(c, x, pairs), pairs)
)
fp8("rope-backwards (rope, formula): keys are turned by the opposite angle").by(
    rotate=lambda c, x, pairs: ok.rotate(c, x, pairs * torch.tensor([1.0, -1.0]).repeat(32))
)
fp8("rope-table-by-halves (rope, bytes): the table is read as 32 cosines, then 32 sines").by(
    angles=lambda c: torch.stack((ok.angles(c)[:, :32], ok.angles(c)[:, 32:]), -1).flatten(-2)
)
fp8("rope-table-bf16 (rope, precision): cosine and sine are rounded to bf16").by(angles=lambda c: rounded(ok.angles(c)))
published("rope-not-rounded (rope, precision): the published bf16 rounding after the rotation is missing").by(
    rotate=_unrounded
)
fp8("rope-row-0 (rope, rows): all tokens are turned by the first one's angle").by(
    angles=lambda c: at(c, c.positions[:1].expand(len(c.positions)))
)
fp8("rope-token-order (rope, rows): the token's place in the batch stands for its position").by(
    angles=lambda c: at(c, 4 * torch.arange(len(c.positions)))
)
fp8("rope-position-16-bits (rope, integers): positions are kept in 16 bits").by(
    angles=lambda c: at(c, c.positions & 0xFFFF)
)
fp8("rope-position-clamped (rope, launch): positions stop at the original context of 65,536 tokens").by(
    angles=lambda c: at(c, c.positions.clamp_max(65535))
)

# ----------------------------------------------------------------------------------------------------------- hadamard
fp8(
    "hadamard-query-only (hadamard, formula): only queries are transformed; keys are stored without "
    "[ROCm/ATOM#1507, NVIDIA/TensorRT-LLM#13889]"
).by(hadamard=lambda c, x: x)
bf16(
    "hadamard-neither (hadamard, formula): "
    "neither side is transformed, which leaves logits nearly as they were: the stored bytes alone tell "
    "[vllm-project/vllm#55459, sgl-project/sglang#14926]"
).by(hadamard=lambda c, x: x)
fp8("hadamard-not-scaled (hadamard, formula): the factor 128^-1/2 is left out [vllm-project/vllm#55459]").by(
    hadamard=lambda c, x: butterflies(x)
)
fp8("hadamard-scaled-twice (hadamard, formula): the factor 128^-1/2 is applied twice").by(
    hadamard=lambda c, x: ok.hadamard(c, x) * 128**-0.5
)
fp8("hadamard-twice (hadamard, formula): the transform is applied twice").by(
    hadamard=lambda c, x: ok.hadamard(c, ok.hadamard(c, x))
)
fp8("hadamard-of-halves (hadamard, formula): each half of 64 channels is transformed by itself").by(
    hadamard=lambda c, x: butterflies(x, (1, 2, 4, 8, 16, 32)) * 64**-0.5
)
fp8("hadamard-bit-reversed (hadamard, formula): the outputs come in bit-reversed order").by(
    hadamard=lambda c, x: ok.hadamard(c, x)[:, [int(f"{i:07b}"[::-1], 2) for i in range(128)]]
)
fp8("hadamard-before-rope (hadamard, formula): the transform comes before the rotation").by(
    rotate=lambda c, x, pairs: ok.rotate(c, ok.hadamard(c, x), pairs), hadamard=lambda c, x: x
)
fp8("hadamard-bf16-inputs (hadamard, precision): a fused store rounds to bf16 before the transform").by(
    hadamard=lambda c, x: ok.hadamard(c, rounded(x))
)
published(
    "hadamard-rounded-twice (hadamard, precision): "
    "the published transform is rounded before its factor and again after it"
).by(hadamard=lambda c, x: rounded(rounded(butterflies(x)) * 128**-0.5))

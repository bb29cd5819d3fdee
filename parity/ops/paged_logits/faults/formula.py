"""Faults of the logits' arithmetic: head weights, dot, ReLU, scale, head sum, and what is rounded where."""

from __future__ import annotations

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.paged_logits.faults import staged as ok
from parity.ops.paged_logits.faults.staged import Call

MODELS, add = collector("logits")
BF16, FP16 = torch.bfloat16, torch.float16


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).to(torch.float32)


def cut(x: Tensor, bits: int) -> Tensor:
    """float32 with its lowest bits cleared: truncation toward zero."""
    return (x.contiguous().view(torch.int32) & -(1 << bits)).view(torch.float32)


def running(x: Tensor, dtype: torch.dtype, dim: int) -> Tensor:
    """A sum whose accumulator is rounded to dtype after every term."""
    total = torch.zeros_like(x.select(dim, 0))
    for term in x.unbind(dim):
        total = rounded(total + term, dtype)
    return total


def _padded_heads(c: Call, rows: Tensor, heads: int) -> Tensor:
    kept = torch.arange(c.heads) < heads
    return torch.where(kept, ok.weights(c, rows), 0.0)


def _remembered(c: Call, base: Tensor, offset: Tensor) -> Tensor:
    c.memory["at"] = (base, offset)
    return ok.payload(c, base, offset)


# ------------------------------------------------------------------------------------------------------- head weights
add(
    "weight-no-head-norm",
    "head-weight",
    "formula",
    "the factor n_heads^-1/2 is dropped from the gate",
    "tenstorrent/tt-metal#55642",
    weights=lambda c, rows: ok.weights(c, rows) * c.heads**0.5,
)
add(
    "weight-bf16",
    "head-weight",
    "precision",
    "gates are rounded to bf16",
    "sgl-project/sglang#13459, sgl-project/sglang#23856",
    weights=lambda c, rows: rounded(ok.weights(c, rows), BF16),
)
add(
    "weight-bf16-truncated",
    "head-weight",
    "precision",
    "gates are cut to bf16 by dropping their low half",
    weights=lambda c, rows: cut(ok.weights(c, rows), 16),
)
add(
    "weight-fp16",
    "head-weight",
    "precision",
    "gates are rounded to fp16",
    weights=lambda c, rows: rounded(ok.weights(c, rows), FP16),
)
add(
    "weight-tf32",
    "head-weight",
    "precision",
    "gates enter a tf32 matrix product: 10 bits of fraction are left",
    weights=lambda c, rows: cut(ok.weights(c, rows), 13),
)
add(
    "weight-sign-lost",
    "head-weight",
    "formula",
    "gates lose their sign",
    weights=lambda c, rows: ok.weights(c, rows).abs(),
)
add(
    "weight-softmaxed",
    "head-weight",
    "formula",
    "gates are normalised to sum one, as attention weights are",
    weights=lambda c, rows: torch.softmax(ok.weights(c, rows), 1),
)
add(
    "weight-only-32-heads",
    "head-weight",
    "formula",
    "only heads 0 to 31 are summed: the local shard without the all-reduce",
    "sgl-project/DeepGEMM#43",
    weights=lambda c, rows: _padded_heads(c, rows, 32),
)
add(
    "weight-one-head-tile",
    "head-weight",
    "launch",
    "only the first tile of 16 heads is summed: the loop over head tiles is missing",
    weights=lambda c, rows: _padded_heads(c, rows, 16),
)
add(
    "weight-last-head-lost",
    "head-weight",
    "formula",
    "the last head is left out of the sum",
    weights=lambda c, rows: _padded_heads(c, rows, c.heads - 1),
)
add(
    "weight-head-twice",
    "head-weight",
    "formula",
    "head 0 is counted twice",
    weights=lambda c, rows: ok.weights(c, rows) * torch.where(torch.arange(c.heads) == 0, 2.0, 1.0),
)
add(
    "weight-heads-reversed",
    "head-weight",
    "rows",
    "heads meet the gates of the opposite end",
    weights=lambda c, rows: ok.weights(c, rows).flip(1),
)
add(
    "weight-head-shifted",
    "head-weight",
    "rows",
    "heads meet the gates of their neighbours",
    weights=lambda c, rows: ok.weights(c, rows).roll(1, 1),
)
add(
    "weight-folded-before-relu",
    "head-weight",
    "formula",
    "the gate is folded into the query, so that the ReLU sees its sign",
    relu=lambda c, x: x,
    product=lambda c, w, x: torch.relu(w[..., None] * x),
)

# ---------------------------------------------------------------------------------------------------------------- dot
add(
    "dot-bf16",
    "dot",
    "precision",
    "each head's dot is rounded to bf16",
    "sgl-project/sglang#30012",
    dot=lambda c, q, k: rounded(ok.dot(c, q, k), BF16),
)
add(
    "dot-fp16",
    "dot",
    "precision",
    "each head's dot is rounded to fp16, and past 65504 infinite",
    dot=lambda c, q, k: rounded(ok.dot(c, q, k), FP16),
)
add(
    "dot-18-bits",
    "dot",
    "precision",
    "each head's dot keeps 18 significant bits",
    dot=lambda c, q, k: cut(ok.dot(c, q, k), 6),
)
add(
    "dot-bf16-accumulator",
    "dot",
    "precision",
    "the dot is accumulated in bf16 over blocks of 32 dims",
    dot=lambda c, q, k: running(
        torch.stack([q[..., i : i + 32] @ k[..., i : i + 32].mT for i in range(0, 128, 32)]), BF16, 0
    ),
)
add(
    "dot-half-of-the-dims",
    "dot",
    "formula",
    "only the first 64 dims enter the dot",
    dot=lambda c, q, k: ok.dot(c, q[..., :64], k[..., :64]),
)
add(
    "dot-last-dim-lost",
    "dot",
    "formula",
    "the last of the 128 dims is left out",
    dot=lambda c, q, k: ok.dot(c, q[..., :127], k[..., :127]),
)
add(
    "dot-halves-swapped",
    "dot",
    "formula",
    "the query's halves are exchanged: rotary part first on one side only",
    dot=lambda c, q, k: ok.dot(c, q.roll(64, -1), k),
)
add(
    "dot-pairs-split",
    "dot",
    "formula",
    "the query's rotary pairs are ordered by halves, the key's interleaved",
    "sgl-project/sglang#13439",
    dot=lambda c, q, k: ok.dot(c, torch.cat([q[..., :64], q[..., 64::2], q[..., 65::2]], -1), k),
)
add(
    "dot-softmax-scale-twice",
    "dot",
    "formula",
    "the softmax scale, already part of the gates, is applied to the dot as well",
    dot=lambda c, q, k: ok.dot(c, q, k) * 128**-0.5,
)
add(
    "dot-magnitudes",
    "dot",
    "formula",
    "keys lose their sign bit",
    dot=lambda c, q, k: ok.dot(c, q, k.abs()),
)
add(
    "query-e4m3",
    "dot",
    "precision",
    "bf16 queries are cast to e4m3 on the way to the matrix unit",
    query=lambda c, rows: rounded(ok.query(c, rows).clamp(-448, 448), torch.float8_e4m3fn),
)
add(
    "key-e4m3",
    "dot",
    "precision",
    "bf16 keys are cast to e4m3 on the way to the matrix unit",
    decode=lambda c, words: rounded(ok.decode(c, words).clamp(-448, 448), torch.float8_e4m3fn),
)
add(
    "key-fp16",
    "dot",
    "precision",
    "keys pass through fp16: small ones become subnormal, large ones infinite",
    decode=lambda c, words: rounded(ok.decode(c, words), FP16),
)
add(
    "key-subnormals-flushed",
    "dot",
    "precision",
    "subnormal e4m3 keys are read as zero",
    layout="fp8",
    decode=lambda c, words: torch.where(ok.decode(c, words).abs() < 2.0**-6, 0.0, ok.decode(c, words)),
)
add(
    "key-other-fp8",
    "gather",
    "bytes",
    "e4m3fn bytes are read as the other flavour, whose exponent bias is one larger",
    "vllm-project/vllm#52109",
    layout="fp8",
    decode=lambda c, words: ok.decode(c, words) * 0.5,
)
add(
    "key-e5m2",
    "gather",
    "bytes",
    "e4m3fn bytes are read as e5m2",
    layout="fp8",
    decode=lambda c, words: words.view(torch.float8_e5m2).to(torch.float32),
)

# --------------------------------------------------------------------------------------------------------------- relu
add(
    "relu-missing",
    "relu",
    "formula",
    "there is no ReLU",
    "huggingface/transformers#44364",
    relu=lambda c, x: x,
)
add(
    "relu-after-sum",
    "relu",
    "formula",
    "the ReLU comes after the sum over heads",
    "sgl-project/sglang#33271",
    relu=lambda c, x: x,
    head_sum=lambda c, x: torch.relu(x.sum(1)),
)
add(
    "relu-and-again-after-sum",
    "relu",
    "formula",
    "a second ReLU comes after the sum over heads",
    head_sum=lambda c, x: torch.relu(x.sum(1)),
)
add(
    "relu-nan-to-zero",
    "relu",
    "stale",
    "the ReLU turns NaN into 0 and hides a spoiled key",
    "sgl-project/sglang#32477, deepseek-ai/DeepGEMM#452",
    relu=lambda c, x: torch.where(x > 0, x, 0.0),
)
add("relu-leaky", "relu", "formula", "a leaky ReLU", relu=lambda c, x: torch.where(x < 0, 2.0**-7 * x, x))
add("relu-absolute", "relu", "formula", "the absolute value stands for the ReLU", relu=lambda c, x: x.abs())
add(
    "relu-saturating",
    "relu",
    "precision",
    "activations are clamped to the fp16 range",
    relu=lambda c, x: torch.relu(x).clamp(max=65504.0),
)
add(
    "relu-squared",
    "relu",
    "formula",
    "the ReLU is squared",
    relu=lambda c, x: torch.relu(x).square(),
)
add(
    "relu-twice",
    "relu",
    "formula",
    "the ReLU is applied twice",
    relu=lambda c, x: torch.relu(torch.relu(x)),
    equivalent="max(max(x, 0), 0) = max(x, 0) for every x, NaN included: the ReLU is idempotent.",
)
add(
    "relu-minus-zero",
    "relu",
    "formula",
    "the ReLU gives -0 for negative dots",
    relu=lambda c, x: torch.where(x > 0, x, torch.where(x.isnan(), x, -0.0)),
    equivalent="w * -0 is a zero, and a zero of either sign added to a sum changes at most the sign of a zero result; "
    "the contract compares zeros as equal, so no input tells it apart. With w infinite both give NaN.",
)

# ---------------------------------------------------------------------------------------------------------- key scale
add(
    "scale-missing",
    "k-scale",
    "formula",
    "the key's scale is not applied",
    "hw-native-sys/pypto-lib#170, flagos-ai/FlagGems#6241",
    layout="fp8",
    scale=lambda c, total, s: total,
)
add(
    "scale-twice",
    "k-scale",
    "formula",
    "the key's scale is applied twice",
    layout="fp8",
    scale=lambda c, t, s: t * s * s,
)
add(
    "scale-inverse",
    "k-scale",
    "formula",
    "the logit is divided by the scale",
    layout="fp8",
    scale=lambda c, t, s: t / s,
)
add(
    "scale-bf16",
    "k-scale",
    "precision",
    "key scales are rounded to bf16",
    layout="fp8",
    scale=lambda c, total, s: total * rounded(s, BF16),
)
add(
    "scale-power-of-two",
    "k-scale",
    "precision",
    "only the exponent of the key's scale is used",
    layout="fp8",
    scale=lambda c, total, s: total * (s.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32),
)
add(
    "scale-floored",
    "k-scale",
    "precision",
    "key scales are not allowed below 2^-20",
    layout="fp8",
    scale=lambda c, total, s: total * s.clamp_min(2.0**-20),
)
add(
    "scale-on-keys",
    "k-scale",
    "formula",
    "keys are dequantised before the dot instead of after the head sum",
    layout="fp8",
    payload=_remembered,
    decode=lambda c, words: ok.decode(c, words) * ok.scales(c, *c.memory["at"])[..., None],  # type: ignore[index]
    scale=lambda c, total, s: total,
    equivalent="s >= 0 by the contract, so s relu(x) = relu(s x) and s distributes over the sum over heads; float32 "
    "roundings move but number no more than the bound allows for, which holds for the scale folded in anywhere.",
)

# ----------------------------------------------------------------------------------------------- head sum and rounding
add(
    "product-bf16",
    "head-sum",
    "precision",
    "each weighted head is rounded to bf16",
    product=lambda c, w, x: rounded(ok.product(c, w, x), BF16),
)
add(
    "sum-bf16",
    "head-sum",
    "precision",
    "the sum over heads is accumulated in bf16",
    head_sum=lambda c, x: running(x, BF16, 1),
)
add(
    "sum-fp16",
    "head-sum",
    "precision",
    "the sum over heads is accumulated in fp16",
    head_sum=lambda c, x: running(x, FP16, 1),
)
add(
    "sum-mean",
    "head-sum",
    "formula",
    "the mean over heads stands for the sum",
    head_sum=lambda c, x: x.mean(1),
)
add(
    "output-bf16",
    "head-sum",
    "precision",
    "logits are rounded to bf16 before they are returned",
    scale=lambda c, total, s: rounded(ok.scale(c, total, s), BF16),
)
add(
    "output-fp16",
    "head-sum",
    "precision",
    "logits are rounded to fp16 before they are returned",
    scale=lambda c, total, s: rounded(ok.scale(c, total, s), FP16),
)
add(
    "output-tf32",
    "head-sum",
    "precision",
    "logits keep 11 significant bits",
    scale=lambda c, total, s: cut(ok.scale(c, total, s), 13),
)

"""Faults of the logits' arithmetic: head weights, dot, ReLU, scale, head sum, and what is rounded where."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from parity.ops.fault import collector
from parity.ops.paged_logits.faults import staged as ok
from parity.ops.paged_logits.faults.staged import Call

MODELS, fault = collector("paged_logits")
fp8 = partial(fault, layout="fp8")
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
fault(
    "weight-no-head-norm (head-weight, formula): the factor n_heads^-1/2 is dropped from the gate "
    "[tenstorrent/tt-metal#55642]"
).by(weights=lambda c, rows: ok.weights(c, rows) * c.heads**0.5)
fault(
    "weight-bf16 (head-weight, precision): gates are rounded to bf16 "
    "[sgl-project/sglang#13459, sgl-project/sglang#23856]"
).by(weights=lambda c, rows: rounded(ok.weights(c, rows), BF16))
fault("weight-bf16-truncated (head-weight, precision): gates are cut to bf16 by dropping their low half").by(
    weights=lambda c, rows: cut(ok.weights(c, rows), 16)
)
fault("weight-fp16 (head-weight, precision): gates are rounded to fp16").by(
    weights=lambda c, rows: rounded(ok.weights(c, rows), FP16)
)
fault("weight-tf32 (head-weight, precision): gates enter a tf32 matrix product: 10 bits of fraction are left").by(
    weights=lambda c, rows: cut(ok.weights(c, rows), 13)
)
fault("weight-sign-lost (head-weight, formula): gates lose their sign").by(
    weights=lambda c, rows: ok.weights(c, rows).abs()
)
fault("weight-softmaxed (head-weight, formula): gates are normalised to sum one, as attention weights are").by(
    weights=lambda c, rows: torch.softmax(ok.weights(c, rows), 1)
)
fault(
    "weight-only-32-heads (head-weight, formula): "
    "only heads 0 to 31 are summed: the local shard without the all-reduce [sgl-project/DeepGEMM#43]"
).by(weights=lambda c, rows: _padded_heads(c, rows, 32))
fault(
    "weight-one-head-tile (head-weight, launch): "
    "only the first tile of 16 heads is summed: the loop over head tiles is missing"
).by(weights=lambda c, rows: _padded_heads(c, rows, 16))
fault("weight-last-head-lost (head-weight, formula): the last head is left out of the sum").by(
    weights=lambda c, rows: _padded_heads(c, rows, c.heads - 1)
)
fault("weight-head-twice (head-weight, formula): head 0 is counted twice").by(
    weights=lambda c, rows: ok.weights(c, rows) * torch.where(torch.arange(c.heads) == 0, 2.0, 1.0)
)
fault("weight-heads-reversed (head-weight, rows): heads meet the gates of the opposite end").by(
    weights=lambda c, rows: ok.weights(c, rows).flip(1)
)
fault("weight-head-shifted (head-weight, rows): heads meet the gates of their neighbours").by(
    weights=lambda c, rows: ok.weights(c, rows).roll(1, 1)
)
fault(
    "weight-folded-before-relu (head-weight, formula): "
    "the gate is folded into the query, so that the ReLU sees its sign"
).by(relu=lambda c, x: x, product=lambda c, w, x: torch.relu(w[..., None] * x))

# ---------------------------------------------------------------------------------------------------------------- dot
fault("dot-bf16 (dot, precision): each head's dot is rounded to bf16 [sgl-project/sglang#30012]").by(
    dot=lambda c, q, k: rounded(ok.dot(c, q, k), BF16)
)
fault("dot-fp16 (dot, precision): each head's dot is rounded to fp16, and past 65504 infinite").by(
    dot=lambda c, q, k: rounded(ok.dot(c, q, k), FP16)
)
fault("dot-18-bits (dot, precision): each head's dot keeps 18 significant bits").by(
    dot=lambda c, q, k: cut(ok.dot(c, q, k), 6)
)
fault("dot-bf16-accumulator (dot, precision): the dot is accumulated in bf16 over blocks of 32 dims").by(
    dot=lambda c, q, k: running(
        torch.stack([q[..., i : i + 32] @ k[..., i : i + 32].mT for i in range(0, 128, 32)]), BF16, 0
    )
)
fault("dot-half-of-the-dims (dot, formula): only the first 64 dims enter the dot").by(
    dot=lambda c, q, k: ok.dot(c, q[..., :64], k[..., :64])
)
fault("dot-last-dim-lost (dot, formula): the last of the 128 dims is left out").by(
    dot=lambda c, q, k: ok.dot(c, q[..., :127], k[..., :127])
)
fault("dot-halves-swapped (dot, formula): the query's halves are exchanged: rotary part first on one side only").by(
    dot=lambda c, q, k: ok.dot(c, q.roll(64, -1), k)
)
fault(
    "dot-pairs-split (dot, formula): the query's rotary pairs are ordered by halves, the key's interleaved "
    "[sgl-project/sglang#13439]"
).by(dot=lambda c, q, k: ok.dot(c, torch.cat([q[..., :64], q[..., 64::2], q[..., 65::2]], -1), k))
fault(
    "dot-softmax-scale-twice (dot, formula): "
    "the softmax scale, already part of the gates, is applied to the dot as well"
).by(dot=lambda c, q, k: ok.dot(c, q, k) * 128**-0.5)
fault("dot-magnitudes (dot, formula): keys lose their sign bit").by(dot=lambda c, q, k: ok.dot(c, q, k.abs()))
fault("query-e4m3 (dot, precision): bf16 queries are cast to e4m3 on the way to the matrix unit").by(
    query=lambda c, rows: rounded(ok.query(c, rows).clamp(-448, 448), torch.float8_e4m3fn)
)
fault("key-e4m3 (dot, precision): bf16 keys are cast to e4m3 on the way to the matrix unit").by(
    decode=lambda c, words: rounded(ok.decode(c, words).clamp(-448, 448), torch.float8_e4m3fn)
)
fault("key-fp16 (dot, precision): keys pass through fp16: small ones become subnormal, large ones infinite").by(
    decode=lambda c, words: rounded(ok.decode(c, words), FP16)
)
fp8("key-subnormals-flushed (dot, precision): subnormal e4m3 keys are read as zero").by(
    decode=lambda c, words: torch.where(ok.decode(c, words).abs() < 2.0**-6, 0.0, ok.decode(c, words))
)
fp8(
    "key-other-fp8 (gather, bytes): e4m3fn bytes are read as the other flavour, whose exponent bias is one larger "
    "[vllm-project/vllm#52109]"
).by(decode=lambda c, words: ok.decode(c, words) * 0.5)
fp8("key-e5m2 (gather, bytes): e4m3fn bytes are read as e5m2").by(
    decode=lambda c, words: words.view(torch.float8_e5m2).to(torch.float32)
)

# --------------------------------------------------------------------------------------------------------------- relu
fault("relu-missing (relu, formula): there is no ReLU [huggingface/transformers#44364]").by(relu=lambda c, x: x)
fault("relu-after-sum (relu, formula): the ReLU comes after the sum over heads [sgl-project/sglang#33271]").by(
    relu=lambda c, x: x, head_sum=lambda c, x: torch.relu(x.sum(1))
)
fault("relu-and-again-after-sum (relu, formula): a second ReLU comes after the sum over heads").by(
    head_sum=lambda c, x: torch.relu(x.sum(1))
)
fault(
    "relu-nan-to-zero (relu, stale): the ReLU turns NaN into 0 and hides a spoiled key "
    "[sgl-project/sglang#32477, deepseek-ai/DeepGEMM#452]"
).by(relu=lambda c, x: torch.where(x > 0, x, 0.0))
fault("relu-leaky (relu, formula): a leaky ReLU").by(relu=lambda c, x: torch.where(x < 0, 2.0**-7 * x, x))
fault("relu-absolute (relu, formula): the absolute value stands for the ReLU").by(relu=lambda c, x: x.abs())
fault("relu-saturating (relu, precision): activations are clamped to the fp16 range").by(
    relu=lambda c, x: torch.relu(x).clamp(max=65504.0)
)
fault("relu-squared (relu, formula): the ReLU is squared").by(relu=lambda c, x: torch.relu(x).square())
fault("relu-twice (relu, formula): the ReLU is applied twice").by(
    relu=lambda c, x: torch.relu(torch.relu(x)),
    equivalent="max(max(x, 0), 0) = max(x, 0) for every x, NaN included: the ReLU is idempotent.",
)
fault("relu-minus-zero (relu, formula): the ReLU gives -0 for negative dots").by(
    relu=lambda c, x: torch.where(x > 0, x, torch.where(x.isnan(), x, -0.0)),
    equivalent=(
        "w * -0 is a zero, and a zero of either sign added to a sum changes at most the sign of a zero result; "
        "the contract compares zeros as equal, so no input tells it apart. With w infinite both give NaN."
    ),
)

# ---------------------------------------------------------------------------------------------------------- key scale
fp8(
    "scale-missing (k-scale, formula): the key's scale is not applied "
    "[hw-native-sys/pypto-lib#170, flagos-ai/FlagGems#6241]"
).by(scale=lambda c, total, s: total)
fp8("scale-twice (k-scale, formula): the key's scale is applied twice").by(scale=lambda c, t, s: t * s * s)
fp8("scale-inverse (k-scale, formula): the logit is divided by the scale").by(scale=lambda c, t, s: t / s)
fp8("scale-bf16 (k-scale, precision): key scales are rounded to bf16").by(
    scale=lambda c, total, s: total * rounded(s, BF16)
)
fp8("scale-power-of-two (k-scale, precision): only the exponent of the key's scale is used").by(
    scale=lambda c, total, s: total * (s.contiguous().view(torch.int32) & 0x7F800000).view(torch.float32)
)
fp8("scale-floored (k-scale, precision): key scales are not allowed below 2^-20").by(
    scale=lambda c, total, s: total * s.clamp_min(2.0**-20)
)
fp8("scale-on-keys (k-scale, formula): keys are dequantised before the dot instead of after the head sum").by(
    payload=_remembered,
    decode=lambda c, words: ok.decode(c, words) * ok.scales(c, *c.memory["at"])[..., None],  # type: ignore[index]
    scale=lambda c, total, s: total,
    equivalent=(
        "s >= 0 by the contract, so s relu(x) = relu(s x) and s distributes over the sum over heads; float32 "
        "roundings move but number no more than the bound allows for, which holds for the scale folded in anywhere."
    ),
)

# ----------------------------------------------------------------------------------------------- head sum and rounding
fault("product-bf16 (head-sum, precision): each weighted head is rounded to bf16").by(
    product=lambda c, w, x: rounded(ok.product(c, w, x), BF16)
)
fault("sum-bf16 (head-sum, precision): the sum over heads is accumulated in bf16").by(
    head_sum=lambda c, x: running(x, BF16, 1)
)
fault("sum-fp16 (head-sum, precision): the sum over heads is accumulated in fp16").by(
    head_sum=lambda c, x: running(x, FP16, 1)
)
fault("sum-mean (head-sum, formula): the mean over heads stands for the sum").by(head_sum=lambda c, x: x.mean(1))
fault("output-bf16 (head-sum, precision): logits are rounded to bf16 before they are returned").by(
    scale=lambda c, total, s: rounded(ok.scale(c, total, s), BF16)
)
fault("output-fp16 (head-sum, precision): logits are rounded to fp16 before they are returned").by(
    scale=lambda c, total, s: rounded(ok.scale(c, total, s), FP16)
)
fault("output-tf32 (head-sum, precision): logits keep 11 significant bits").by(
    scale=lambda c, total, s: cut(ok.scale(c, total, s), 13)
)

"""Paged indexer logits over fp8 (e4m3 payload, one float32 scale a key) pages in Triton."""

from typing import Any

import torch

from impl.launch import paged_logits


def fp8_paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
    *,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> torch.Tensor:
    """Logits `s_j sum_h w_h relu(q_h . k_j)` of every row against its request's paged fp8 keys.

    q `[B, next_n, H, 128]` e4m3fn whose scale is already folded into `weights`; kv_cache uint8 `[pages, 64, 1, 132]`,
    a page's bytes being 64 x 128 of payload, then 64 float32 scales. The dot is the tensor core's own e4m3 arithmetic,
    which on sm_90 keeps fewer bits than float32; head sum and scaling are float32. Everything else is as
    `impl.logits_bf16.bf16_paged_mqa_logits`; e4m3 needs compute capability 8.9.
    """
    result, _ = paged_logits(
        "fp8", q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, out, validate
    )
    return result


def fp8_paged_mqa_dots(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """Per-head dots of the payloads, without scales, from the same matrix instruction and tile as the logits.

    Arguments as `fp8_paged_mqa_logits`. Returns float32 `[B * next_n, H, max_context_len]`, NaN past a row's length.
    """
    result, _ = paged_logits("fp8", q, kv_cache, None, context_lens, block_table, max_context_len)
    return result


CONTRACT: dict[str, Any] = {
    "layout": "fp8",
    "op": "paged_logits",
    "arithmetic": "auto",
    "tail": "-inf",
    "batch_invariant": True,
    "devices": ["cpu", "cuda"],
}
fp8_paged_mqa_logits.parity_contract = CONTRACT  # type: ignore[attr-defined]

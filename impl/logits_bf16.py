"""Paged indexer logits over bf16 pages in Triton."""

from typing import Any

import torch

from impl.launch import paged_logits


def bf16_paged_mqa_logits(
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
    """Logits `sum_h w_h relu(q_h . k_j)` of every row against its request's paged keys, float32 accumulation.

    q `[B, next_n, H, 128]` bf16, H one of 8, 16, 32, 64; kv_cache `[pages, 64, 1, 128]` bf16, any page stride that is
    a multiple of 16 bytes; weights `[B * next_n, H]` float32; context_lens `[B, next_n]` int32 in compressed keys;
    block_table `[B, max_pages]` int32. Returns float32 `[B * next_n, max_context_len]` (`out` if given); positions at
    and past a row's length are -inf with `clean_logits`, else untouched. Lengths are clamped to the table and to
    max_context_len; table entries past the length are never used. A row's bits depend on nothing but its own operands.
    `validate` also checks lengths and page ids, which waits for the device. Raises TypeError or ValueError naming the
    argument, Unsupported where the kernel cannot run. Formula: DeepSeek-V4 indexer scores without its bf16 roundings.
    """
    result, _ = paged_logits(
        "bf16", q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, out, validate
    )
    return result


def bf16_paged_mqa_dots(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
) -> torch.Tensor:
    """Per-head dots `q_h . k_j` from the same matrix instruction and tile as the logits, for judging the arithmetic.

    Arguments as `bf16_paged_mqa_logits`. Returns float32 `[B * next_n, H, max_context_len]`, NaN past a row's length.
    """
    result, _ = paged_logits("bf16", q, kv_cache, None, context_lens, block_table, max_context_len)
    return result


CONTRACT: dict[str, Any] = {
    "layout": "bf16",
    "op": "paged_logits",
    "arithmetic": "ieee",
    "tail": "-inf",
    "batch_invariant": True,
    "devices": ["cpu", "cuda"],
}
bf16_paged_mqa_logits.parity_contract = CONTRACT  # type: ignore[attr-defined]

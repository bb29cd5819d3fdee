"""Logits and dots as an H200 would return them, from the models: the right one and the nearest wrong ones."""

from __future__ import annotations

import types
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.numerics.arithmetic import Grouped, named_model
from parity.numerics.blocks import Expected, blocks
from parity.numerics.headsum import HeadSum, predicted_dots, predicted_logits, recorded_order
from parity.run.implementation import Implementation

RULE = named_model("sm_90 e4m3").arithmetic
IMPRECISE = named_model("sm_90 e4m3 imprecise 32").arithmetic


def order_for(heads: int) -> HeadSum:
    """The order on record for triton 3.6."""
    found = recorded_order("sm_90", "3.6.0", True, "", heads)
    assert not isinstance(found, str)
    return found.order


def logits_function(model: Grouped = RULE, order: Any = order_for, weigh: Any = None) -> Any:
    """A logits function of fp8 pages; ``order(heads)`` its head sum, ``weigh`` applied to the weights first."""

    def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
        given = types.SimpleNamespace(
            q=q,
            kv_cache=kv_cache,
            weights=weights if weigh is None else weigh(weights),
            context_lens=context_lens,
            block_table=block_table,
        )
        found = predicted_logits(given, "fp8", model, order(q.shape[2])).logits
        out = torch.full((context_lens.numel(), max_context_len), -float("inf"))
        out[:, : found.shape[1]] = found.to(torch.float32)
        return out

    return logits


def dots_function(model: Grouped = RULE) -> Any:
    """The companion of a logits function: the dots of every head."""

    def dots(q, kv_cache, context_lens, block_table, max_context_len):
        given = types.SimpleNamespace(
            q=q,
            kv_cache=kv_cache,
            weights=torch.zeros(context_lens.numel(), q.shape[2]),
            context_lens=context_lens,
            block_table=block_table,
        )
        out = torch.full((context_lens.numel(), q.shape[2], max_context_len), float("nan"))
        for block in blocks(given, "fp8", Expected.empty(given, None), 64 << 20):
            values = predicted_dots(block, model)
            for b, r in (block.place >= 0).nonzero().tolist():
                keys = block.keys.start + int(block.real[b, r].sum())
                out[block.place[b, r], :, block.keys.start : keys] = values[b, r, :, : keys - block.keys.start]
        return out

    return dots


def simulated(**changes: Any) -> Implementation:
    """Our fp8 kernel on a GPU whose rule is verified."""
    contract = Contract.default("fp8", "cuda", capability=(9, 0)).verified()
    fields = {"function": logits_function(), "companion": dots_function(), "kernel": "triton", "contract": contract}
    return Implementation(**{"name": "gpu", "op": "paged_logits", "layout": "fp8", **fields, **changes})

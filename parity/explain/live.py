"""A real implementation in the place of the emulated scores: its logits on the pages that a configuration stores."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from parity.explain.choices import Configuration
from parity.explain.pipeline import Pipeline
from parity.explain.rounding import LAYOUTS
from parity.pages.layout import PAGE, find
from parity.run import loading, runner
from parity.run.implementation import Implementation
from reference import pages

READ = ("bf16", "fp8", "fp8-pow2")  # storage formats whose keys and queries logits functions read
OPERATION = "paged_logits"


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """Operands of the calling convention without a case behind them."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int
    clean_logits: bool = True

    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of a logits function."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Operands)}


def layout_of(c: Configuration) -> str:
    """The page layout whose logits functions can read this configuration's keys and queries.

    ValueError where there is none: queries and keys must both be bf16 or both fp8.
    """
    store, query = c["store"], c["query"]
    if store not in READ or query not in READ or LAYOUTS[query] != LAYOUTS[store]:
        raise ValueError(
            "store, query: a logits function reads bf16 queries with bf16 keys, or fp8 queries with fp8 keys, got "
            f"{query} queries and {store} keys"
        )
    return LAYOUTS[store]


def operands(pipeline: Pipeline, c: Configuration, seed: int = 0) -> Operands:
    """Queries, pages, weights, lengths and table of a configuration, as a server would hold them."""
    layout, sample = find(layout_of(c)), pipeline.sample
    key, q = pipeline.keys(c), pipeline.queries(c)
    device, count = sample.device, sample.keys
    used = -(-count // PAGE)
    order = torch.randperm(used + 1, generator=torch.Generator().manual_seed(seed))[:used].to(device)
    number = torch.arange(count, device=device)
    slots = order[number // PAGE] * PAGE + number % PAGE
    pool = layout.empty_cache(used + 1, device)
    pages.write_keys(pool, layout.name, slots, key.payload.to(layout.element.dtype), key.scale)
    return Operands(
        q=q.payload.to(layout.query_dtype)[None].contiguous(),
        kv_cache=pool,
        weights=q.folded(pipeline.head_weights(c)).contiguous(),
        context_lens=sample.lens.to(torch.int32)[None].contiguous(),
        block_table=order.to(torch.int32)[None].contiguous(),
        max_context_len=count,
    )


def logits(impl: Implementation, pipeline: Pipeline, c: Configuration, seed: int = 0) -> Tensor:
    """The implementation's own logits of a configuration, float32 [n, S], -inf where nothing is visible.

    It runs in this process: a crash of it ends the command. ValueError for a layout that does not fit, RuntimeError
    for a result of another form or for an exception.
    """
    layout = layout_of(c)
    if impl.op != OPERATION or impl.layout != layout:
        raise ValueError(f"impl: expected {OPERATION} of {layout} pages, got {impl.name}: {impl.op} of {impl.layout}")
    function = impl.function or loading.resolve_name(str(impl.spec))
    given = operands(pipeline, c, seed)
    named = given.kwargs()
    if "schedule_meta" in impl.parameters:
        raise ValueError(f"impl: {impl.name} needs schedule_meta, which `parity explain` does not build")
    with runner.interpreter.corrected():
        try:
            out = function(**named)
        except Exception as error:
            raise RuntimeError(f"{impl.name} failed: {runner.sentence(error)}") from error
    shape = (given.weights.shape[0], given.max_context_len)
    if not isinstance(out, Tensor) or tuple(out.shape) != shape or out.dtype != torch.float32:
        raise RuntimeError(f"{impl.name} returned no float32 tensor {list(shape)}")
    hidden = torch.arange(shape[1], device=out.device) >= given.context_lens.reshape(-1, 1)
    return out.masked_fill(hidden, -torch.inf)

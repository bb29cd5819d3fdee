"""How store functions are called: what they leave in the pool is the result."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.ops.store.case import StoreCase
from parity.ops.store.operands import StoreOperands, build_store
from parity.run.graph import capture
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, sentence

LIGHT_TOKENS, LIGHT_BYTES = 512, 1 << 25
"""Tokens stored and bytes of pages, up to which a case is drawn and judged on the CPU."""


def collect(given: Any, operands: StoreOperands) -> Tensor:
    """The bytes of the pool's windows, uint8; what the function returns is ignored."""
    return operands.contents()


def kept(given: Any, operands: StoreOperands) -> list[Tensor]:
    """The pool's windows themselves: a later call stores into a pool of its own."""
    return [operands.pool[start:stop] for start, stop in operands.windows]


def inspect(output: Tensor, operands: StoreOperands) -> None:
    """Any bytes can be judged."""
    return


def light(case: StoreCase) -> bool:
    """Whether a CPU evaluates the case about as fast as a GPU launches the steps of it."""
    return case.tokens <= LIGHT_TOKENS and case.pages * case.page_stride <= LIGHT_BYTES


def replay(
    impl: Implementation, function: Callable[..., Any], wide: StoreCase, narrow: StoreCase, device: torch.device
) -> Outcome:
    """Capture a CUDA graph on `wide`, put `narrow`'s operands into its buffers, replay; the output is narrow's pool.

    Both cases must have the same numbers of tokens, pages and table rows, gap and eps.
    """
    if device.type != "cuda":
        return Outcome(unsupported="CUDA graphs need a CUDA device")
    captured, fresh = build_store(wide, device), build_store(narrow, device)
    try:
        graph, _ = capture(function, captured.kwargs(), device)
        for name, value in captured.kwargs().items():
            if isinstance(value, Tensor) and name != "kv_cache":
                value.copy_(fresh.kwargs()[name])
        captured.pool.copy_(fresh.pool)
        graph.replay()
        torch.cuda.synchronize(device)
    except Exception as error:  # a user's function may raise anything
        return Outcome(error=sentence(error))
    fresh.pool.copy_(captured.pool)
    return Outcome(output=fresh.contents(), operands=fresh)

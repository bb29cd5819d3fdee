"""One call of a store function: operands built, the function called by keyword, the bytes that it left taken out.

The counterpart of `runner.execute` and `graph.replay` for stores, whose result is the pool itself.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from parity.ops.store.case import StoreCase
from parity.ops.store.operands import StoreOperands, build_store
from parity.run import interpreter, memory
from parity.run.registry import Implementation
from parity.run.runner import Outcome, poisoned_allocations, sentence


def execute_store(
    impl: Implementation,
    function: Callable[..., Any],
    operands: StoreOperands,
    *,
    measure: bool = False,
    repeats: int = 1,
) -> Outcome:
    """Call `function` on operands that exist; the output is what the pool's windows hold, uint8 [bytes].

    What the function returns is ignored: a store writes kv_cache in place. Repeats start from the same pool. Python
    exceptions become `error`; a process that dies is the worker's business.
    """
    outcome = Outcome(operands=operands)
    inputs = {name: tensor.clone() for name, tensor in operands.inputs().items()}
    started = time.perf_counter()

    def call() -> torch.Tensor:
        function(**operands.kwargs())
        if operands.device.type == "cuda":
            torch.cuda.synchronize(operands.device)
        return operands.contents()

    try:
        with poisoned_allocations(), interpreter.corrected(), interpreter.watched():
            if measure:
                with memory.peak_bytes(operands.device) as peak:
                    function(**operands.kwargs())
                outcome.peak_bytes, outcome.peak_note = peak.bytes, peak.largest
                contents = operands.contents()
            else:
                contents = call()
            for index in range(1, repeats):
                operands.restore()
                again = call()
                if not torch.equal(contents, again):
                    outcome.differing = (index, again)
                    operands.restore(contents)
                    break
    except Exception as error:
        root = interpreter.cause(error)
        if isinstance(root, interpreter.OutOfBounds):
            outcome.defect = f"address out of bounds: {root}"
        else:
            outcome.error = sentence(error)
        outcome.seconds = time.perf_counter() - started
        return outcome
    outcome.seconds = time.perf_counter() - started
    for name, tensor in operands.inputs().items():
        if not torch.equal(_bits(inputs[name]), _bits(tensor)):
            outcome.defect = f"inputs: the call wrote {name}"
            return outcome
    outcome.output = contents
    return outcome


def replay_store(function: Callable[..., Any], wide: StoreCase, narrow: StoreCase, device: torch.device) -> Outcome:
    """Capture a CUDA graph on `wide`, put `narrow`'s operands into its buffers, replay; the output is narrow's pool.

    Both cases must have the same numbers of tokens, pages and table rows, gap and eps.
    """
    if device.type != "cuda":
        return Outcome(unsupported="CUDA graphs need a CUDA device")
    captured, fresh = build_store(wide, device), build_store(narrow, device)
    try:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            function(**captured.kwargs())  # compiles and warms up outside of the capture
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function(**captured.kwargs())
        for name, value in captured.kwargs().items():
            if isinstance(value, torch.Tensor) and name != "kv_cache":
                value.copy_(fresh.kwargs()[name])
        captured.pool.copy_(fresh.pool)
        graph.replay()
        torch.cuda.synchronize(device)
    except Exception as error:
        return Outcome(error=sentence(error))
    fresh.pool.copy_(captured.pool)
    return Outcome(output=fresh.contents(), operands=fresh)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

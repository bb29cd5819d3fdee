"""CUDA graph capture of one case and replay of another through the same buffers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.run.implementation import Implementation
from parity.run.runner import Outcome, over_tensors, sentence
from parity.vocabulary import Grounds


def capture(function: Callable[..., Any], named: dict[str, Any], device: torch.device) -> tuple[Any, Any]:
    """(graph, output) of one call, captured after a call on a side stream that compiles and warms up."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        function(**named)
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(**named)
    return graph, output


def replay(impl: Implementation, function: Callable[..., Any], wide: Any, narrow: Any, device: torch.device) -> Outcome:
    """Capture on `wide`, copy `narrow`'s operands into the captured buffers, replay; the output is narrow's.

    Both cases must have operands of the same shapes. An outcome of `unsupported` names why capture is impossible here.
    """
    if device.type != "cuda":
        return Outcome(unsupported="CUDA graphs need a CUDA device")
    if "schedule_meta" in impl.parameters:
        return Outcome(unsupported="schedule_meta is built on the host for each length, outside of a graph")
    operation = impl.operation
    captured, fresh = operation.build(wide, device), operation.build(narrow, device)
    try:
        named, wanted = operation.arguments(impl, captured), operation.arguments(impl, fresh)
        for key, value in named.items():
            if isinstance(value, Tensor) and value.shape != wanted[key].shape:
                raise ValueError(f"{key} has shape {list(value.shape)} wide and {list(wanted[key].shape)} narrow")
        quiet = {"validate": False} if "validate" in impl.parameters else {}
        graph, output = capture(function, named | quiet, device)
        for key, value in named.items():
            if isinstance(value, Tensor) and key != "out":
                value.copy_(wanted[key])
        graph.replay()
        torch.cuda.synchronize(device)
    except Exception as error:  # a user's function may raise anything
        return Outcome(error=sentence(error))
    defect = operation.inspect(output, fresh)
    if defect:
        return Outcome(defect=defect, grounds=Grounds.FORM, operands=fresh)
    return Outcome(output=over_tensors(Tensor.clone, output), operands=fresh)

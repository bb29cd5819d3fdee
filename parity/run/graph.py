"""CUDA graph capture of one case and replay of another through the same buffers."""

from collections.abc import Callable
from typing import Any

import torch

from parity.ops.paged_logits import operands as building
from parity.run.registry import Implementation
from parity.run.runner import Outcome, arguments, inspect, sentence


def replay(impl: Implementation, function: Callable[..., Any], wide: Any, narrow: Any, device: torch.device) -> Outcome:
    """Capture on `wide`, copy `narrow`'s operands into the captured buffers, replay; the output is narrow's.

    Both cases must have operands of the same shapes. An outcome of `unsupported` names why capture is impossible here.
    """
    if impl.stage == "store":
        from parity.ops.store.call import replay_store

        return replay_store(function, wide, narrow, device)
    if device.type != "cuda":
        return Outcome(unsupported="CUDA graphs need a CUDA device")
    if "schedule_meta" in impl.parameters:
        return Outcome(unsupported="schedule_meta is built on the host for each length, outside of a graph")
    captured, fresh = building.build(wide, device), building.build(narrow, device)
    try:
        named, wanted = arguments(impl, captured), arguments(impl, fresh)
        for key, value in named.items():
            if isinstance(value, torch.Tensor) and value.shape != wanted[key].shape:
                raise ValueError(f"{key} has shape {list(value.shape)} wide and {list(wanted[key].shape)} narrow")
        quiet = {"validate": False} if "validate" in impl.parameters else {}
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            function(**named, **quiet)  # compiles and warms up outside of the capture
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = function(**named, **quiet)
        for key, value in named.items():
            if isinstance(value, torch.Tensor) and key != "out":
                value.copy_(wanted[key])
        graph.replay()
        torch.cuda.synchronize(device)
    except Exception as error:
        return Outcome(error=sentence(error))
    defect = inspect(output, fresh, impl.stage)
    copy = tuple(x.clone() for x in output) if isinstance(output, tuple | list) else output.clone()
    return Outcome(output=None if defect else copy, defect=defect, operands=fresh)

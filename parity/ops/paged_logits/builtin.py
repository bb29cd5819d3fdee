"""The logits functions of `impl/` as implementations to judge, called through the dispatch that a server would call."""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.run import interpreter, memory
from parity.run.implementation import Implementation

FLAG, STRICT = "TRITON_INDEXER", "TRITON_INDEXER_STRICT"
KERNELS, LAYOUTS = ("torch", "triton"), ("bf16", "fp8")


def implementations(device: torch.device) -> dict[str, Implementation]:
    """By name, the torch path first; those that cannot run on the device are there too, saying why."""
    missing = _triton_missing(device)
    found = {}
    for kernel in KERNELS:
        for layout in LAYOUTS:
            triton, name = kernel == "triton", f"{kernel}-{layout}"
            found[name] = Implementation(
                name=name,
                op="paged_logits",
                layout=layout,
                contract=Contract.from_dict(_contract_of(kernel, layout), device, layout=layout, op="paged_logits"),
                function=_dispatched(triton),
                parameters=frozenset({"validate"}),
                kernel=kernel,
                workspace=0 if triton else memory.WORKSPACE,
                route=_route_check(kernel),
                companion=_dots_of(layout) if triton and missing is None else None,
                absent=missing if triton else None,
                arguments=("--impl", name),
            )
    return found


def _triton_missing(device: torch.device) -> str | None:
    if sys.platform != "linux":
        return f"Triton runs on Linux, this is {sys.platform}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not interpreter.interpreting():
        return "no CUDA device, and TRITON_INTERPRET was not set before triton was imported"
    return None


def _contract_of(kernel: str, layout: str) -> dict[str, Any]:
    """The contract attribute of the function behind a built-in name."""
    if kernel == "torch":
        module, name = "impl.torch_path", f"torch_{layout}_paged_mqa_logits"
    else:
        if importlib.util.find_spec("triton") is None:
            return {"layout": layout, "batch_invariant": True}
        module, name = f"impl.logits_{layout}", f"{layout}_paged_mqa_logits"
    return dict(getattr(importlib.import_module(module), name).parity_contract)


def _dots_of(layout: str) -> Callable[..., Any]:
    """The debug function that returns the dots of our Triton kernel for a layout."""
    found: Callable[..., Any] = getattr(importlib.import_module(f"impl.logits_{layout}"), f"{layout}_paged_mqa_dots")
    return found


def _dispatched(triton: bool) -> Callable[..., Any]:
    """The server's entry point with the flag set for the call, strict, so that no fallback answers instead."""

    def call(*, validate: bool = True, **named: Any) -> Any:
        from impl import dispatch

        before = {key: os.environ.get(key) for key in (FLAG, STRICT)}
        os.environ.update({FLAG: "1" if triton else "0", STRICT: "1"})
        try:
            return dispatch.paged_mqa_logits(**named, validate=validate)
        finally:
            for key, value in before.items():
                if value is None:
                    os.environ.pop(key, None)
                else:
                    os.environ[key] = value

    return call


def _route_check(kernel: str) -> Callable[[], tuple[str | None, str | None]]:
    def check() -> tuple[str | None, str | None]:
        from impl import dispatch

        route = dispatch.last_route()
        name = route.name if route is not None else None
        if name != kernel:
            return name, f"the dispatcher ran {name or 'nothing'} instead of {kernel}: {route}"
        return name, None

    return check

"""The fused store's modes as implementations to judge: compiled on a GPU, the same source executed on a CPU."""

from collections.abc import Callable
from typing import Any

import torch

from impl.store_modes import MODES, Mode
from parity.domain.contract import Contract
from parity.run.implementation import Implementation

HOST = "cpu (host-executed CUDA source)"


def name_of(mode: Mode) -> str:
    """The built-in name of a mode, such as store-fp8-pow2-published-fake-fp4."""
    return mode.name.replace("_", "-")


NAMES = tuple(name_of(mode) for mode in MODES)


def implementations(device: torch.device) -> dict[str, Implementation]:
    """One implementation a mode; where it cannot run, it says why."""
    absent = missing(device)
    return {
        name_of(mode): Implementation(
            name=name_of(mode),
            op="store",
            layout=mode.layout,
            contract=Contract.from_dict(mode.contract, device),
            function=function_of(mode, device),
            parameters=frozenset({"validate"}),
            kernel="cuda" if device.type == "cuda" else "cuda source on cpu",
            workspace=0,
            absent=absent,
            arguments=("--impl", name_of(mode)),
        )
        for mode in MODES
    }


def missing(device: torch.device) -> str | None:
    """Why no store can run on the device, or None."""
    if device.type == "cuda":
        from impl import store_compile

        return store_compile.missing()
    from parity.build import host_store

    return host_store.missing()


def function_of(mode: Mode, device: torch.device) -> Callable[..., Any]:
    """The mode's function on a device; nothing is compiled before its first call."""
    if device.type == "cuda":
        from impl.fused_store import STORES

        return STORES[mode.name]
    from parity.build import host_store

    return host_store.function(mode)

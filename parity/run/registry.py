"""Implementations that can be judged: the built-in ones by name, and a user's own function by `module:function`.

A user's function is never imported here: a child process loads it, says what it needs to be called with, and later
runs it (`parity.run.worker`), so that whatever its import does stays outside of the judging process.
"""

from dataclasses import replace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.pages import layout as layouts
from parity.run import operation, worker
from parity.run.device import architecture
from parity.run.implementation import Implementation
from parity.run.loading import SpecError, split_spec


def builtin(device: torch.device) -> dict[str, Implementation]:
    """The built-in implementations, by name; those that cannot run on the device are there too, saying why."""
    return {name: impl for each in operation.all_operations() for name, impl in each.implementations(device).items()}


def choose(device: torch.device, op: str | None, layout: str | None) -> dict[str, Implementation]:
    """The built-in implementations of an operation and a layout; a layout without an operation means paged logits.

    ValueError for an unknown name, or (SpecError) where nothing is left."""
    wanted = op or (operation.DEFAULT if layout is not None else None)
    if wanted is not None:
        operation.find(wanted)
    if layout is not None:
        layouts.find(layout)
    found = {
        name: each
        for name, each in builtin(device).items()
        if wanted in (None, each.op) and layout in (None, each.layout or layout)
    }
    if not found:
        raise SpecError(f"no built-in implementation of {wanted}" + (f" has {layout} pages" if layout else ""))
    return found


def load(
    spec: str,
    layout: str | None = None,
    op: str | None = None,
    contract_path: str | None = None,
    device: torch.device | None = None,
    timeout: float = 120.0,
) -> Implementation:
    """The implementation that a spec names: a built-in, or a user's function described by a child process.

    layout is required for a user's function of an operation over pages (unless its contract names it); op defaults to
    paged_logits. The contract is the file's, else the function's `parity_contract`, else the default one. SpecError
    says what is wrong.
    """
    device = device or torch.device("cpu")
    try:
        if op is not None:
            operation.find(op)
        if ":" not in spec:
            return _builtin_named(spec, layout, op, contract_path, device)
        split_spec(spec)
        found = worker.describe(spec, timeout)
        contract = _contract(found["contract"] or {}, contract_path, layout, op, device)
        if operation.find(contract.op).layouts and not contract.layout:
            raise SpecError(f"layout: {spec} has no contract that names one, so say which of the layouts (parity list)")
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, SpecError) else SpecError(str(error)) from error
    named = operation.find(contract.op).layouts
    words = ["--impl", spec]
    words += ["--op", contract.op] if contract.op != operation.DEFAULT else []
    words += ["--layout", contract.layout] if named else []
    words += ["--contract", str(contract_path)] if contract_path is not None else []
    return Implementation(
        name=spec,
        op=contract.op,
        layout=contract.layout if named else "",
        contract=contract,
        parameters=frozenset(found["parameters"]),
        spec=spec,
        absent=_not_here(contract, device),
        arguments=tuple(words),
    )


def _contract(
    given: dict[str, Any], path: str | None, layout: str | None, op: str | None, device: torch.device
) -> Contract:
    if path is not None:
        return Contract.from_toml(path, device, layout=layout, op=op)
    return Contract.from_dict(given, device, layout=layout, op=op)


def _not_here(contract: Contract, device: torch.device) -> str | None:
    """Why a contract's list of devices excludes this one."""
    if device.type in contract.devices or architecture(device) in contract.devices:
        return None
    return f"its contract lists devices {', '.join(contract.devices)}, this is {architecture(device)}"


def _builtin_named(
    name: str, layout: str | None, op: str | None, contract_path: str | None, device: torch.device
) -> Implementation:
    known = builtin(device)
    if name not in known:
        raise SpecError(
            f"impl: expected one of {', '.join(known)}, module:function or path/to/file.py:function, got {name!r}"
        )
    impl = known[name]
    if layout not in (None, impl.layout or layout):
        raise SpecError(f"layout: {name} {impl.operation.verb} {impl.layout} pages, got {layout}")
    if op not in (None, impl.op):
        raise SpecError(f"op: {name} is a function of {impl.op}, got {op}")
    if contract_path is None:
        return impl
    contract = Contract.from_toml(contract_path, device, layout=impl.layout, op=impl.op)
    return replace(impl, contract=contract, arguments=(*impl.arguments, "--contract", str(contract_path)))

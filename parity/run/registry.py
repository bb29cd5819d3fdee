"""Implementations that can be judged: the built-in ones by name, and a user's own function by `module:function`.

A user's function is never imported here: a child process loads it, says what it needs to be called with, and later
runs it (`parity.run.worker`), so that whatever its import does stays outside of the judging process.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from impl.store_modes import MODES
from parity.domain.contract import Contract
from parity.run import interpreter, memory

STORE_NAMES = tuple(mode.name.replace("_", "-") for mode in MODES)
BUILTIN_NAMES = ("torch-bf16", "torch-fp8", "triton-bf16", "triton-fp8", "topk", *STORE_NAMES)
FLAG, STRICT = "TRITON_INDEXER", "TRITON_INDEXER_STRICT"


class SpecError(ValueError):
    """An implementation that cannot be loaded as it was named; the message is for the user (exit code 2)."""


@dataclass(frozen=True)
class Implementation:
    """One function under judgement.

    name        what reports call it; for a user's function its spec
    stage       "logits", "topk", "store" or "compressor"; "dots" of a companion that returns the dots of every head
    layout      "bf16", "fp8" or "fp4" (meaningless for top-k)
    contract    what it promises
    function    callable by keyword, or None: a worker loads `spec` in its own process
    parameters  names that its signature accepts beyond the convention's (validate, out, schedule_meta)
    spec        "module:function" or "file.py:function" of a user's function, None for a built-in
    kernel      "torch", "triton" or "unknown": what is known about how it works, for budgets and sizes of cases
    workspace   bytes that it may allocate beside inputs and result
    route       callable -> (route, complaint) asked after every call, or None
    dots        callable returning the dots of every head, or None; a user's is named by its contract
    absent      why it cannot run here at all, or None
    arguments   the words that repeat the choice on a command line
    """

    name: str
    stage: str
    layout: str
    contract: Contract
    function: Callable[..., Any] | None = None
    parameters: frozenset[str] = frozenset()
    spec: str | None = None
    kernel: str = "unknown"
    workspace: int = memory.WORKSPACE
    route: Callable[[], tuple[str | None, str | None]] | None = None
    dots: Callable[..., Any] | None = None
    absent: str | None = None
    arguments: tuple[str, ...] = field(default=())

    @property
    def short(self) -> str:
        """The name without the folders of a file, for test ids."""
        return self.name.rpartition("/")[2]

    @property
    def interpreted(self) -> bool:
        """Whether a call costs interpreter time (known for our own kernels only)."""
        return self.kernel == "triton" and interpreter.interpreting()


def builtin(device: torch.device) -> dict[str, Implementation]:
    """The built-in implementations, by name; those that cannot run on the device are there too, saying why."""
    from impl import topk

    missing = _triton_missing(device)
    found = {}
    for name in BUILTIN_NAMES[:4]:
        kernel, layout = name.split("-")
        contract = Contract.from_dict(_contract_of(kernel, layout), device, layout=layout, stage="logits")
        found[name] = Implementation(
            name=name,
            stage="logits",
            layout=layout,
            contract=contract,
            function=_dispatched(kernel == "triton"),
            parameters=frozenset({"validate"}),
            kernel=kernel,
            workspace=0 if kernel == "triton" else memory.WORKSPACE,
            route=_route_check(kernel),
            dots=_dots_of(layout) if kernel == "triton" and missing is None else None,
            absent=missing if kernel == "triton" else None,
            arguments=("--impl", name),
        )
    found["topk"] = Implementation(
        name="topk",
        stage="topk",
        layout="bf16",
        contract=Contract.from_dict(
            dict(getattr(topk.topk_to_slots, "parity_contract", {})), device, layout="bf16", stage="topk"
        ),
        function=topk.topk_to_slots,
        kernel="torch",
        arguments=("--impl", "topk"),
    )
    from parity.ops.store.builtin import stores

    return found | stores(device)


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
            return name, f"the dispatcher ran {name or 'nothing'} although {kernel} was asked for: {route}"
        return name, None

    return check


def split_spec(spec: str) -> tuple[str, str]:
    """("module" or "path.py", "function") of a spec; SpecError if it is neither form."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise SpecError(
            f"impl: expected one of {', '.join(BUILTIN_NAMES)}, module:function or path/to/file.py:function, "
            f"got {spec!r}"
        )
    return where, name


def resolve_name(spec: str) -> Any:
    """The object that `module:function` or `path/to/file.py:function` names. Imports code: for child processes.

    SpecError for a file or attribute that is not there; what an import itself raises passes through.
    """
    where, name = split_spec(spec)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise SpecError(f"impl: {where} has no {name!r}; it has {_names(module)}")
        value = getattr(value, part)
    if not callable(value):
        raise SpecError(f"impl: {spec} is a {type(value).__name__}, expected a function")
    return value


def _names(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return ", ".join(names[:8]) or "no function at all"


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise SpecError(f"impl: there is no file {path}")
    name = f"_parity_{path.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(path):
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that helpers beside the file are found and nothing is shadowed
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise SpecError(f"impl: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_path(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise SpecError(
                f"impl: no module {name!r} on PYTHONPATH or in {os.getcwd()} (or give path/to/file.py:function)"
            ) from error
        raise


def load(
    spec: str,
    layout: str | None = None,
    stage: str | None = None,
    contract_path: str | None = None,
    device: torch.device | None = None,
    timeout: float = 120.0,
) -> Implementation:
    """The implementation that a spec names: a built-in, or a user's function described by a child process.

    layout is required for a user's logits function (unless its contract names it); stage defaults to logits. The
    contract is the file's, else the function's `parity_contract`, else the default one. SpecError says what is wrong.
    """
    device = device or torch.device("cpu")
    if ":" not in spec:
        return _builtin_named(spec, layout, stage, contract_path, device)
    split_spec(spec)
    from parity.run import worker

    found = worker.describe(spec, timeout)
    given = found["contract"]
    try:
        if contract_path is not None:
            contract = _contract_file(contract_path, device, layout, stage)
        else:
            words = dict(given or {})
            if (stage or words.get("stage")) == "topk":
                words.setdefault("layout", layout or "bf16")
            elif layout is None and "layout" not in words:
                raise SpecError(f"layout: {spec} has no contract that names one, so say bf16, fp8 or fp4")
            contract = Contract.from_dict(words, device, layout=layout, stage=stage)
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, SpecError) else SpecError(str(error)) from error
    words_to_repeat = ["--impl", spec, "--layout", contract.layout]
    if contract.stage != "logits":
        words_to_repeat = ["--impl", spec, "--stage", contract.stage]
        words_to_repeat += ["--layout", contract.layout] if contract.stage == "store" else []
    if contract_path is not None:
        words_to_repeat += ["--contract", str(contract_path)]
    return Implementation(
        name=spec,
        stage=contract.stage,
        layout=contract.layout,
        contract=contract,
        parameters=frozenset(found["parameters"]),
        spec=spec,
        absent=_not_here(contract, device),
        arguments=tuple(words_to_repeat),
    )


def _contract_file(path: str, device: torch.device, layout: str | None, stage: str | None) -> Contract:
    if stage == "topk" and layout is None:
        try:
            return Contract.from_toml(path, device, stage=stage, layout="bf16")
        except ValueError as error:
            if "'layout'" not in str(error):
                raise
    return Contract.from_toml(path, device, layout=layout, stage=stage)


def _not_here(contract: Contract, device: torch.device) -> str | None:
    """Why a contract's list of devices excludes this one."""
    from parity.run.device import architecture

    if device.type in contract.devices or architecture(device) in contract.devices:
        return None
    return f"its contract lists devices {', '.join(contract.devices)}, this is {architecture(device)}"


def _builtin_named(
    name: str, layout: str | None, stage: str | None, contract_path: str | None, device: torch.device
) -> Implementation:
    if name not in BUILTIN_NAMES:
        split_spec(name)
    impl = builtin(device)[name]
    if layout is not None and impl.stage != "topk" and layout != impl.layout:
        verb = "writes" if impl.stage == "store" else "reads"
        raise SpecError(f"layout: {name} {verb} {impl.layout} pages, got {layout}")
    if stage is not None and stage != impl.stage:
        raise SpecError(f"stage: {name} is a {impl.stage} function, got {stage}")
    if contract_path is None:
        return impl
    from dataclasses import replace

    try:
        contract = Contract.from_toml(contract_path, device, layout=impl.layout, stage=impl.stage)
    except (ValueError, TypeError) as error:
        raise SpecError(str(error)) from error
    return replace(impl, contract=contract, arguments=(*impl.arguments, "--contract", str(contract_path)))

"""The device that kernels are judged on, and the provenance that every recorded number carries."""

import os
import platform
import subprocess
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from parity.vocabulary import DEVICES


def resolve(choice: str) -> torch.device:
    """The torch device for auto, cpu or cuda; ValueError for another word, or for cuda where there is none."""
    if choice not in DEVICES:
        raise ValueError(f"device: expected one of {', '.join(DEVICES)}, got {choice!r}")
    if choice == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: cuda was requested, but torch finds no CUDA device here")
    if choice == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def choose(choice: str, required: str | None, option: str = "--device") -> torch.device:
    """The device of a choice, or the one that is required; ValueError where they contradict or there is none."""
    if required and choice not in ("auto", required):
        raise ValueError(f"{required} contradicts {option} {choice}")
    return resolve(required or choice)


def total_memory() -> int:
    """Bytes of the current CUDA device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def architecture(device: torch.device) -> str:
    """cpu, or the compute capability as sm_90."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def triton_version() -> str | None:
    """Version of the installed triton without importing it (its import decides on interpretation), None if absent."""
    from importlib import metadata

    for name in ("triton", "pytorch-triton"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


@cache
def commit() -> str | None:
    """The commit of the checkout that this package lies in, with + if it has changes; None outside a checkout.

    PARITY_COMMIT names it instead, for a copy of the files that left the history behind."""
    if named := os.environ.get("PARITY_COMMIT"):
        return named
    here = Path(__file__).resolve().parents[2]

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(here), *words], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != here:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def driver_version() -> str | None:
    """The NVIDIA driver's version as nvidia-smi gives it, None where it cannot be read."""
    try:
        words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(words, capture_output=True, text=True, check=True, timeout=20).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return lines[0] if lines else None


def provenance(device: torch.device) -> dict[str, Any]:
    """Where a number comes from: device, versions, commit, and whether kernels were interpreted; JSON types only."""
    from parity.run import interpreter

    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "architecture": architecture(device),
        "driver": driver_version() if cuda else None,
        "cuda": torch.version.cuda if cuda else None,
        "torch": torch.__version__,
        "triton": triton_version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "interpreted": interpreter.interpreting(),
        "fp_fusion": os.environ.get("TRITON_DEFAULT_FP_FUSION"),
        "commit": commit(),
    }


def to_device(operands: Any, device: str | torch.device) -> Any:
    """The same operands (of any operation) on another device: every storage copied as it is, every view laid over its
    copy.

    The storages are those that the operands name, else their tensors, of which kv_cache is a view of the pool. Of one
    that the operands call sparse only the rows in use are copied, for its zeros may be mapped and not there.
    """
    device = torch.device(device)
    tensors = {part.name: getattr(operands, part.name) for part in fields(operands)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    named = getattr(operands, "storages", None)
    storages = {name: value for name, value in tensors.items() if name != "kv_cache"} if named is None else named
    sparse = operands.sparse() if hasattr(operands, "sparse") else {}
    copies = {
        name: _rows_in_use(storage, sparse[name], device) if name in sparse else storage.to(device, copy=True)
        for name, storage in storages.items()
    }
    homes = {storage.untyped_storage().data_ptr(): (storage, copies[name]) for name, storage in storages.items()}

    def view(tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        storage, copy = homes[tensor.untyped_storage().data_ptr()]
        assert storage.is_contiguous()
        start = tensor.storage_offset() * tensor.itemsize - storage.storage_offset() * storage.itemsize
        start += copy.storage_offset() * copy.itemsize
        home = copy.untyped_storage()
        empty: Any = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(home, start // tensor.itemsize, tensor.shape, tensor.stride())

    views: dict[str, Any] = {name: view(value) for name, value in tensors.items()}
    return replace(operands, **views, **({} if named is None else {"storages": copies}))


def _rows_in_use(table: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """A table on the device that holds the given rows (int64) of another, and zeros elsewhere."""
    copy = torch.zeros(table.shape, dtype=table.dtype, device=device)
    copy[rows.to(device)] = table[rows].to(device)
    return copy

"""The device that kernels are judged on, and the provenance that every recorded number carries."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import torch

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

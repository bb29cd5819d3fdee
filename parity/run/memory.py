"""Peak bytes that a call allocates beyond its inputs and outputs, and the budget that a call is held to."""

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

WORKSPACE = 256 << 20
"""Bytes that an implementation may use beside inputs and outputs unless its contract names another number."""


def _storages(tree: Any) -> Iterator[tuple[torch.UntypedStorage, tuple[int, ...] | None]]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage(), tuple(leaf.shape)
        elif isinstance(leaf, torch.UntypedStorage):
            yield leaf, None


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of storages born inside the block while they live. What numpy or C++ allocates is not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.largest: tuple[int, str, Any] = (0, "", None)
        self._owned: dict[int, int] = {}

    def _free(self, ptr: int) -> None:
        self.live -= self._owned.pop(ptr)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage.data_ptr() for storage, _ in _storages((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for storage, shape in _storages(out):
            ptr, size = storage.data_ptr(), storage.nbytes()
            if ptr == 0 or ptr in given or ptr in self._owned:
                continue
            self._owned[ptr] = size
            weakref.finalize(storage, self._free, ptr)
            self.live += size
            self.peak = max(self.peak, self.live)
            if size > self.largest[0]:
                self.largest = (size, str(func), shape)
        return out


@dataclass
class Peak:
    """Result of `peak_bytes`: bytes at the peak, and on a CPU the largest single tensor in words."""

    bytes: int = 0
    largest: str = ""
    _mode: Any = field(default=None, repr=False)


@contextlib.contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Peak of the bytes allocated inside the block: tensors seen by torch on a CPU, the allocator's counter on CUDA."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = torch.cuda.max_memory_allocated(device) - base
        return
    with PeakBytes() as mode:
        yield peak
    peak.bytes = mode.peak
    if mode.largest[0]:
        peak.largest = f"{mode.largest[1]} of {list(mode.largest[2] or ())}, {mode.largest[0]} bytes"


def result_bytes(rows: int, width: int) -> int:
    """Bytes of the float32 result [rows, width]."""
    return 4 * rows * width


def gather_bytes(rows: int, pages: int, page_bytes: int) -> int:
    """Bytes of the gather [rows, pages, page_bytes] that the historical path materialises (for comparison)."""
    return rows * pages * page_bytes

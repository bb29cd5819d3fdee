"""Memory: whether a case fits, the peak bytes that a call allocates beyond its inputs and outputs, and its budget."""

import contextlib
import os
import tracemalloc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from parity.vocabulary import TooLarge

WORKSPACE = 256 << 20
"""Bytes that an implementation may use beside inputs and outputs unless its contract names another number."""


def _storages(tree: Any) -> Iterator[tuple[torch.UntypedStorage, tuple[int, ...] | None]]:
    for leaf in tree_iter(tree):
        if isinstance(leaf, torch.Tensor):
            yield leaf.untyped_storage(), tuple(leaf.shape)
        elif isinstance(leaf, torch.UntypedStorage):
            yield leaf, None


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of storages born inside the block while they live, and with them what Python and numpy have
    allocated meanwhile, by `tracemalloc`. What C++ allocates for itself is not seen.

    peak   of torch's storages alone
    joint  of both together
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.joint = 0
        self._before, self._ours = 0, False
        self.largest: tuple[int, str, Any] = (0, "", None)
        self._owned: dict[int, int] = {}

    def __enter__(self) -> "PeakBytes":
        super().__enter__()
        torch.empty(0)  # the first operator under a mode imports a great deal
        self._ours = not tracemalloc.is_tracing()
        tracemalloc.start()
        self._before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.look()
        if self._ours:
            tracemalloc.stop()

    def look(self) -> None:
        """Add what Python allocated since the last look to what torch held: nothing was born in torch meanwhile."""
        self.joint = max(self.joint, self.live + tracemalloc.get_traced_memory()[1] - self._before)
        tracemalloc.reset_peak()

    def _free(self, ptr: int) -> None:
        self.look()
        self.live -= self._owned.pop(ptr)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage.data_ptr() for storage, _ in _storages((args, kwargs or {}))}
        out = func(*args, **(kwargs or {}))
        for storage, shape in _storages(out):
            ptr, size = storage.data_ptr(), storage.nbytes()
            if ptr == 0 or ptr in given or ptr in self._owned:
                continue
            self.look()
            self._owned[ptr] = size
            weakref.finalize(storage, self._free, ptr)
            self.live += size
            self.peak = max(self.peak, self.live)
            if size > self.largest[0]:
                self.largest = (size, str(func), shape)
        return out


@dataclass
class Peak:
    """Result of `peak_bytes`: bytes of tensors at the peak, on a CPU the largest of them in words, and the bytes of
    tensors and of Python's and numpy's allocations together."""

    bytes: int = 0
    joint: int = 0
    largest: str = ""
    _mode: Any = field(default=None, repr=False)


@contextlib.contextmanager
def peak_bytes(device: torch.device) -> Iterator[Peak]:
    """Peak of the bytes allocated inside the block: on a CPU of tensors seen by torch, without and with what Python and
    numpy allocate; on CUDA the allocator's counter."""
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        base = torch.cuda.memory_allocated(device)
        yield peak
        torch.cuda.synchronize(device)
        peak.bytes = peak.joint = torch.cuda.max_memory_allocated(device) - base
        return
    with PeakBytes() as mode:
        yield peak
    peak.bytes, peak.joint = mode.peak, mode.joint
    if mode.largest[0]:
        peak.largest = f"{mode.largest[1]} of {list(mode.largest[2] or ())}, {mode.largest[0]} bytes"


def result_bytes(rows: int, width: int) -> int:
    """Bytes of the float32 result [rows, width]."""
    return 4 * rows * width


def gather_bytes(rows: int, pages: int, page_bytes: int) -> int:
    """Bytes of the gather [rows, pages, page_bytes] that the historical path materialises (for comparison)."""
    return rows * pages * page_bytes


ALWAYS_FREE = 1 << 28
"""Bytes that every machine is taken to have: small cases, which are nearly all, do not ask it."""


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on the device now, None where the operating system does not say."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux: what there is in all
        names = ("SC_PAGE_SIZE", "SC_PHYS_PAGES")
        known = getattr(os, "sysconf_names", {})
        return os.sysconf(names[0]) * os.sysconf(names[1]) if all(name in known for name in names) else None


def require(needed: int, device: torch.device) -> None:
    """TooLarge, in one sentence with both figures, if `needed` bytes are more than the device has free."""
    if needed <= ALWAYS_FREE:
        return
    free = free_bytes(device)
    if free is not None and needed > free:
        figures = (
            f"{needed / 1e9:,.1f} GB, {'the GPU' if device.type == 'cuda' else 'this machine'} has {free / 1e9:,.1f} GB"
        )
        raise TooLarge(f"the operands and the result of this case take about {figures} free")

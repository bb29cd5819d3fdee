"""From a store case to the tensors that a store function is called with, and what the pool held before."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.ops.shared.operands import lodged, with_singletons
from parity.ops.store import values as store_values
from parity.ops.store.case import StoreCase
from parity.pages import counter
from parity.pages.layout import DIM, PAGE, find
from parity.pages.pools import (
    LAZY_BASE,
    LAZY_BYTES,
    OFFSET_BYTES,
    Windows,
    lazy_buffer,
    windows_around,
    windows_bytes,
)
from parity.run import memory
from reference import rope
from reference.config import FLASH

STREAM_PLACE = 31
ROW_GAP = 16  # elements between the rows of pooled keys that are a view; no power of two together with the rows


@dataclass(frozen=True, eq=False)
class StoreOperands:
    """Operands of a store function. pool: uint8 [bytes], first page to last; kv_cache a view of it.

    windows: the byte ranges of the pool that are compared, all of it unless it is larger than a CPU maps eagerly.
    before: uint8 [bytes of the windows], what they held before the call.
    """

    case: StoreCase
    pooled: Tensor
    norm_weight: Tensor
    eps: float
    positions: Tensor
    rope_table: Tensor
    out_loc: Tensor
    kv_cache: Tensor
    pool: Tensor
    windows: Windows
    before: Tensor
    storages: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of every operand."""
        return self.pool.device

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a store function."""
        names = ("pooled", "norm_weight", "eps", "positions", "rope_table", "out_loc", "kv_cache")
        return {name: getattr(self, name) for name in names}

    def sparse(self) -> dict[str, Tensor]:
        """Names of the operands that are zero but for some rows, and these rows, int64."""
        return {"rope_table": self.positions.long()}

    def contents(self) -> Tensor:
        """A copy of the bytes in the windows, uint8."""
        return torch.cat([self.pool[start:stop] for start, stop in self.windows]) if self.windows else self.pool.clone()

    def restore(self, contents: Tensor | None = None) -> None:
        """Put bytes of the windows back, by default those from before the call."""
        data = self.before if contents is None else contents.to(self.device)
        at = 0
        for start, stop in self.windows:
            self.pool[start:stop] = data[at : at + stop - start]
            at += stop - start

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of what a call must not write."""
        return {name: tensor.clone() for name, tensor in self.inputs().items()}

    def changed(self, before: dict[str, Tensor]) -> tuple[str, ...]:
        """Names of the inputs that differ from the snapshot in any bit."""
        return tuple(name for name, now in self.inputs().items() if not torch.equal(_bits(before[name]), _bits(now)))

    def guarded(self) -> dict[str, Tensor]:
        """The storages that a call must not write, by name."""
        return {name: each for name, each in self.storages.items() if name not in ("pool", "before")}

    def inputs(self) -> dict[str, Tensor]:
        """The operands that must not be written; of the rotary table the rows in use."""
        rows = self.rope_table[self.positions.long()] if self.case.tokens else self.rope_table[:0]
        return {
            "pooled": self.pooled,
            "norm_weight": self.norm_weight,
            "positions": self.positions,
            "rope_table": rows,
            "out_loc": self.out_loc,
        }


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def operand_bytes(case: StoreCase, device: str | torch.device = "cpu") -> int:
    """About how many bytes the operands of a case take on a device; what judging takes comes on top."""
    total = case.pool_pages * case.page_stride
    pool = total if not _lazy(case) else windows_bytes((case.tokens + 2) * 3 * case.page_bytes, total)
    table = case.max_position * 64 * 4
    if torch.device(device).type == "cpu":
        table = min(table, case.tokens << 12)  # mapped lazily: a page of memory per row
    elif _lazy(case):
        pool += total
    # Keys and the words that they are drawn from; places and what they are shuffled by; the pool and its copy.
    return 40 * DIM * case.tokens + 40 * case.places + 2 * pool + table


def build_store(case: StoreCase, device: str | torch.device = "cpu") -> StoreOperands:
    """The operands of a store case on a device; new storages at every call."""
    device = torch.device(device)
    memory.require(operand_bytes(case, device), device)
    names = torch.tensor(case.ids, dtype=torch.int64, device=device)
    out_loc = slots_of(case, device)
    pool, windows, storage = _build_pool(case, out_loc, device)
    view = find(case.layout).cache_view(_page_view(case, pool))
    before = torch.cat([pool[start:stop] for start, stop in windows]) if windows else pool.clone()
    positions = store_values.draw_positions(case, names)
    table = _build_table(case, positions, device)
    storages = {"pool": storage, "rope_table": table, "before": before}

    def lodge(name: str, operand: Tensor, field: str) -> Tensor:
        storages[field] = operand
        return lodged(name, operand, case, storages, field)

    pooled = store_values.draw_pooled(case, names)
    if "pooled" in case.strides:
        storages["pooled"] = torch.full((case.tokens, DIM + ROW_GAP), torch.nan, dtype=pooled.dtype, device=device)
        storages["pooled"][:, :DIM] = pooled
        pooled = lodged("pooled", storages["pooled"][:, :DIM], case, storages)
    else:
        pooled = lodge("pooled", pooled, "pooled")
    return StoreOperands(
        case,
        pooled,
        lodge("weight", store_values.draw_norm_weight(case, device), "norm_weight"),
        case.eps,
        lodge("positions", positions, "positions"),
        table,
        lodge("out_loc", out_loc, "out_loc"),
        with_singletons(view, case),
        pool,
        windows,
        before,
        storages,
    )


def _lazy(case: StoreCase) -> bool:
    """Whether a CPU maps the pool without filling it."""
    return case.pool_pages * case.page_stride > LAZY_BYTES or case.base * case.page_stride > LAZY_BASE


def slots_of(case: StoreCase, device: str | torch.device = "cpu") -> Tensor:
    """Slots int64 [N], distinct, -1 for tokens that are skipped."""
    device = torch.device(device)
    names = torch.tensor(case.ids, dtype=torch.int64, device=device)
    places = torch.arange(case.places, dtype=torch.int64, device=device)
    if case.place == "edges":
        places = places // 2 * PAGE + (places % 2) * (PAGE - 1)
    elif case.place == "last":
        places = places.flip(0)
    if case.place in ("spread", "edges"):
        places = places[_shuffled(case.perm, places)]
    places = places[: case.tokens]
    if case.perm and case.place in ("order", "last"):
        places = places[_shuffled(case.perm, places)]
    return torch.where(store_values.draw_skipped(case, names), -1, case.base * PAGE + places)


def _shuffled(seed: int, places: Tensor) -> Tensor:
    """A permutation of range(len(places)) by keys that are functions of the seed and of the place."""
    keys = counter.row_keys(seed, STREAM_PLACE, (places,))
    return torch.argsort(keys, stable=True)


def _page_view(case: StoreCase, pool: Tensor) -> Tensor:
    """The pool as uint8 [pages, page stride]; its last page has no gap after it."""
    return pool.as_strided((case.pool_pages, case.page_stride), (case.page_stride, 1))


def _build_pool(case: StoreCase, out_loc: Tensor, device: torch.device) -> tuple[Tensor, Windows, Tensor]:
    """The pool uint8 [bytes], the windows of it that are compared, and its storage."""
    # The whole stride of the last page is there too, so that a view of whole strides is legal.
    total = case.pool_pages * case.page_stride
    before = OFFSET_BYTES if "pool" in case.offsets else 0
    if not _lazy(case):
        storage = (
            store_values.draw_bytes(case.fill, 0, before + total, device)
            if total
            else torch.empty(0, dtype=torch.uint8, device=device)
        )
        return storage[before:] if total else storage, ((0, total),) if total else (), storage
    if device.type == "cpu":
        storage = torch.frombuffer(lazy_buffer(before + total), dtype=torch.uint8)
    else:
        storage = torch.empty(before + total, dtype=torch.uint8, device=device)
    pool = storage[before:]
    pages = np.unique(out_loc[out_loc >= 0].cpu().numpy() // PAGE)
    offsets = [page * case.page_stride for page in (0, case.pool_pages - 1, *pages.tolist())]
    windows = windows_around(offsets, case.page_bytes, total)
    for start, stop in windows:
        pool[start:stop] = store_values.draw_bytes(case.fill, start, stop - start, device)
    return pool, windows, storage


def _build_table(case: StoreCase, positions: Tensor, device: torch.device) -> Tensor:
    """The rotary table float32 [max_position, 64]. Rows that no token names are zero, which makes a pair vanish."""
    rows, size = case.max_position, case.max_position * 64 * 4
    if device.type == "cpu" and size > 1 << 20:
        table = torch.frombuffer(lazy_buffer(size), dtype=torch.float32).view(rows, 64)
    else:
        table = torch.zeros(rows, 64, device=device)
    if case.tokens and case.data == "context":
        table[positions.long()] = rope.rope_rows(FLASH, positions)
    elif case.tokens:
        table[positions.long()] = store_values.draw_rope_rows(positions)
    return table


def named_bytes(case: StoreCase, out_loc: Tensor) -> tuple[Tensor, Tensor]:
    """Byte addresses in the pool that the stored slots own, for the m tokens with a slot, in batch order: payload int64
    [m, payload bytes] and scale int64 [m, scale bytes]."""
    slots = out_loc[out_loc >= 0]
    return find(case.layout).addresses(slots, case.page_stride)

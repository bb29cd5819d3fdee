"""What the operands of operations over a block table share: storages that must stay as they are, lengths and table."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.ops.shared.case import PagedCase
from parity.pages import counter
from parity.pages.layout import PAGE
from parity.pages.placement import Placement, block_table, row_names
from parity.pages.pools import Windows

HUGE_ID = 0x7EEEEEEE  # in the gaps of a strided table
DIGEST_BYTES = 1 << 26  # above this a snapshot keeps a digest instead of a copy

OFFSET_BYTES = 16  # what a lodged operand's storage holds before it: vector loads stay aligned
ODD_STRIDE = 977  # of axes of size one

Snapshot = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Stored:
    """What operands over a block table have: the case, and the storages behind the views, to prove them unwritten."""

    case: Any
    placement: Placement
    storages: dict[str, Tensor]
    windows: Windows | None = field(default=None, kw_only=True)

    @property
    def device(self) -> torch.device:
        """The device of every operand."""
        return self.storages["context_lens"].device

    def snapshot(self) -> Snapshot:
        """Copies of all storages, gaps and poison included; of large ones a digest of the bytes."""
        return {name: self._record(name, storage) for name, storage in self.storages.items()}

    def guarded(self) -> dict[str, Tensor]:
        """The storages that a call must not write, by name."""
        return self.storages

    def changed(self, before: Snapshot) -> tuple[str, ...]:
        """Names of the storages that differ from the snapshot."""
        now = self.snapshot()
        return tuple(
            name for name in now if not all(torch.equal(a, b) for a, b in zip(now[name], before[name], strict=True))
        )

    def unchanged(self, before: Snapshot) -> bool:
        """Whether no byte of any storage differs from the snapshot."""
        return not self.changed(before)

    def _record(self, name: str, storage: Tensor) -> tuple[Tensor, ...]:
        flat = storage.reshape(-1).view(torch.uint8)
        if name == "pool" and self.windows is not None:
            return tuple(_record_bytes(flat[start:stop]) for start, stop in self.windows)
        return (_record_bytes(flat),)


def names_of(case: PagedCase, device: torch.device) -> tuple[Tensor, Tensor]:
    requests, rows = row_names(case)
    return torch.from_numpy(requests).to(device), torch.from_numpy(rows).to(device)


def build_lens_and_table(
    case: PagedCase, plan: Placement, device: torch.device, storages: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    lens = torch.from_numpy(plan.lengths).to(torch.int32)
    table = torch.from_numpy(block_table(case))
    if "lens" in case.strides:  # the gap holds the longest legal length, so that a reader of it stops
        base = torch.full((case.requests, case.next_n + 1), case.table_width * PAGE, dtype=torch.int32)
        base[:, : case.next_n] = lens
        storages["context_lens"] = base.to(device)
        lens = storages["context_lens"][:, : case.next_n]
    else:
        storages["context_lens"] = lens = lens.to(device)
    lens = lodged("lens", lens, case, storages, "context_lens")
    if "table" in case.strides:
        base = torch.full((case.requests, case.table_width + 5), HUGE_ID, dtype=torch.int32)
        base[:, : case.table_width] = table
        storages["block_table"] = base.to(device)
        table = storages["block_table"][:, : case.table_width]
    else:
        storages["block_table"] = table = table.to(device)
    return lens, lodged("table", table, case, storages, "block_table")


def lodged(name: str, view: Tensor, case: Any, storages: dict[str, Tensor], storage: str = "") -> Tensor:
    """An operand where the case wants it: some way into a larger storage, axes of size one with a stride of their own.

    name: as the case says it; storage: the name of its storage, by default the same. Bytes before it are 0x7F, which
    no number, length or page of a case is."""
    storage = storage or name
    old = storages[storage]
    if name in case.offsets and old.numel():
        before = OFFSET_BYTES // old.itemsize
        new = torch.full((old.numel() * old.itemsize + OFFSET_BYTES,), 0x7F, dtype=torch.uint8, device=old.device)
        new = new.view(old.dtype)
        new[before:].view(torch.uint8).copy_(old.reshape(-1).view(torch.uint8))
        storages[storage] = new
        view = new.as_strided(view.shape, view.stride(), before + view.storage_offset())
    return with_singletons(view, case)


def with_singletons(view: Tensor, case: Any) -> Tensor:
    """The same elements; where the case says so, every axis of size one but the last has an odd stride."""
    if not case.singletons or 1 not in view.shape[:-1]:
        return view
    strides = [ODD_STRIDE if n == 1 else s for n, s in zip(view.shape[:-1], view.stride()[:-1], strict=True)]
    return view.as_strided(view.shape, (*strides, view.stride(-1)))


def _record_bytes(data: Tensor) -> Tensor:
    if data.numel() <= DIGEST_BYTES:
        return data.clone()
    sums = []
    usable = data.numel() // 8 * 8
    for at in range(0, usable, DIGEST_BYTES):
        words = data[at : min(at + DIGEST_BYTES, usable)].view(torch.int64)
        places = torch.arange(len(words), dtype=torch.int64, device=data.device)
        sums.append(counter.row_keys(at, 23, (words, places)).sum())
    return torch.cat([torch.stack(sums), data[usable:].to(torch.int64)])

"""The paged cache of a case: pages drawn where the placement puts them, poison everywhere that no row may read."""

import mmap
import sys
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from parity.pages import values
from parity.pages.layout import DIM, PAGE, POISON, find
from parity.pages.placement import Paged, Placement
from parity.vocabulary import TooLarge

Windows = tuple[tuple[int, int], ...]

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)  # older Python does not name it
LAZY_BYTES = 1 << 28  # a CPU pool above this is mapped lazily and poisoned around the pages in use only
ADDRESSES = 1 << 47  # what a process can map: of a larger pool every byte counts, so that it is refused
OFFSET_BYTES = 17 << 8  # what the storage of an offset pool holds before its first page
LAZY_BASE = 1 << 22  # so it is above so many bytes that stand before the first page in use
CHUNK_ELEMENTS = 1 << 23  # drawn at a time; the largest temporary is int64 [elements / 64] or int32 [elements]


class Stored(Paged, Protocol):
    """What a pool needs to know of a case, besides where its pages lie."""

    @property
    def layout(self) -> str: ...
    @property
    def data(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def only_keys(self) -> tuple[int, ...] | None: ...
    @property
    def poison(self) -> str: ...
    @property
    def gap(self) -> int: ...
    @property
    def offsets(self) -> tuple[str, ...]: ...


def build_pool(case: Stored, plan: Placement, device: torch.device) -> tuple[Tensor, Windows | None, Tensor]:
    """The pool uint8 [pages, page stride]; the byte windows of its storage in use when it is mapped lazily; its storage
    uint8 [bytes], which begins before it where the case says so."""
    layout = find(case.layout)
    size, stride = layout.page_bytes, layout.page_bytes + case.gap
    before = OFFSET_BYTES if "pool" in case.offsets else 0
    total = plan.pool_pages * stride
    lazy = device.type == "cpu" and (total > LAZY_BYTES or case.base * stride > LAZY_BASE)
    if lazy:
        storage = torch.frombuffer(lazy_buffer(before + total), dtype=torch.uint8)
    else:
        storage = torch.empty(before + total, dtype=torch.uint8, device=device)
        storage[:before] = POISON[case.poison]
    pool = storage[before:].view(plan.pool_pages, stride)
    pattern = layout.poison_page(case.poison, device)
    spare = plan.physical[plan.used :]
    windows = None
    if lazy:
        windows = windows_around((_touched(plan) * stride).tolist(), size, total)
        windows = tuple((before + start, before + stop) for start, stop in windows)
        for start, stop in windows:
            storage[start:stop] = POISON[case.poison]
        spare = spare[np.isin(spare, _touched(plan))]
        pool[torch.from_numpy(spare), :size] = pattern
    else:
        pool[:, :size] = pattern
        pool[:, size:] = POISON[case.poison]
    if case.poison != "canary":  # the canary page looks valid whatever the rest is
        spare = plan.physical[plan.used : plan.used + 1] if case.tail == "canary" else spare[:0]
    pages = pool[:, :size]
    step = max(1, CHUNK_ELEMENTS // (PAGE * DIM))
    for at in range(0, plan.used, step):
        part = slice(at, min(at + step, plan.used))
        drawn = _draw_pages(case, plan.owner[part], plan.page[part], device)
        partial = np.flatnonzero(plan.visible[part] < PAGE)
        if len(partial):
            some = torch.from_numpy(partial).to(device)
            where = at + partial
            drawn[some] = _hide(case, drawn[some], plan.visible[where], plan.physical[where], pattern, device)
        pages[torch.from_numpy(plan.physical[part]).to(device)] = drawn
    for at in range(0, len(spare), step):
        chosen = spare[at : at + step]
        pages[torch.from_numpy(chosen).to(device)] = _canary_pages(case, chosen, device)
    return pool, windows, storage


def pool_bytes(case: Stored, used: int, device: torch.device) -> int:
    """At most how many bytes of the pool `build_pool` writes, with `used` pages in use: of a lazy one the windows."""
    size = find(case.layout).page_bytes
    pages, stride = case.base + used + case.spare, size + case.gap
    if device.type != "cpu" or (pages * stride <= LAZY_BYTES and case.base * stride <= LAZY_BASE):
        return pages * stride
    touched = min(3 * (used + 1), pages)  # with their neighbours, whose windows meet where the gap is small
    return windows_bytes(min(touched * 3 * size, (used + 1) * (2 * stride + 3 * size)), pages * stride)


def windows_bytes(near: int, total: int) -> int:
    """At most how many bytes `windows_around` covers, of which `near` without the offsets that have lost bits."""
    return total if total > ADDRESSES else min(total, near * (3 if total > 1 << 31 else 1))


def _draw_pages(case: Stored, owner: np.ndarray, page: np.ndarray, device: torch.device) -> Tensor:
    layout = find(case.layout)
    if case.period:  # copies of a page are drawn once
        contents, copies = np.unique((owner << 32) | page, return_inverse=True)
        if len(contents) < len(owner):
            once = _draw_pages(case, contents >> 32, contents & 0xFFFFFFFF, device)
            return once[torch.from_numpy(copies.reshape(-1)).to(device)]
    owners, pages = torch.from_numpy(owner).to(device), torch.from_numpy(page).to(device)
    keys = values.draw_keys(case.data, case.layout, case.seed, owners, pages)
    if case.only_keys is not None:
        names = pages[:, None] * PAGE + torch.arange(PAGE, device=device)
        dropped = ~chosen_keys(names, case.only_keys)
        keys.payload.masked_fill_(dropped.unsqueeze(-1), 0)
        if keys.scales is not None:  # a neutral one, lest a dropped key keep a scale that is not finite
            keys.scales[dropped] = layout.neutral
    return layout.page_rows(keys)


def _canary_pages(case: Stored, physical: np.ndarray, device: torch.device) -> Tensor:
    pages = torch.from_numpy(physical).to(device)
    owners = torch.zeros_like(pages)
    return find(case.layout).page_rows(values.draw_keys(case.data, case.layout, case.seed, owners, pages, canary=True))


def _hide(
    case: Stored, drawn: Tensor, visible: np.ndarray, physical: np.ndarray, pattern: Tensor, device: torch.device
) -> Tensor:
    """Poison in place of the slots that no row may read, values and scales."""
    cover = _canary_pages(case, physical, device) if case.poison == "canary" else pattern
    slots = torch.from_numpy(visible).to(device)[:, None] > find(case.layout).slot_of_byte(device)
    return torch.where(slots, drawn, cover)


def _touched(plan: Placement) -> np.ndarray:
    """Pages in use, the canary page, and their neighbours, ascending."""
    near = plan.physical[: plan.used + 1, None] + np.array([-1, 0, 1])
    return np.unique(near[(near >= 0) & (near < plan.pool_pages)])


def windows_around(offsets: Iterable[int], size: int, total: int) -> Windows:
    """Byte ranges of a pool of `total` bytes, ascending and apart: around pages of `size` bytes at these offsets, and
    where the offsets would land after losing bits above 31 or 32. They start at multiples of 16."""
    ranges = [
        (max(0, start - size) & ~15, min(total, start + 2 * size))
        for offset in offsets
        for start in (offset, offset % (1 << 31), offset % (1 << 32))
    ]
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def lazy_buffer(size: int) -> mmap.mmap:
    """Anonymous zero pages that take memory only once written. TooLarge where there are not that many addresses."""
    named = {}
    if hasattr(mmap, "MAP_PRIVATE"):  # Windows commits the whole pool, and has no other kind
        named["flags"] = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        return mmap.mmap(-1, size, **named)
    except (OSError, OverflowError) as error:
        raise TooLarge(f"a pool of {size / 1e9:,.1f} GB cannot be mapped here") from error


def chosen_keys(keys: Tensor, chosen: tuple[int, ...]) -> Tensor:
    """Which of the keys (int64 names) are among the chosen ones, bool of the same shape."""
    return torch.isin(keys, torch.tensor(chosen, dtype=torch.int64, device=keys.device))

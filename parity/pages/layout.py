"""Layouts: how a page of the cache holds keys, as values; one file each in this folder.

`find(name)` gives a layout, `names()` all of them. A package outside this repository adds one through the entry-point
group `parity.layouts` (the entry point names a `Layout`), a test through `register`. What a new layout has to provide
stands in `Layout`; what reads and writes its pages besides (`impl/`, `reference/`) keeps definitions of its own, for a
shared helper would share its bugs.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

PAGE = 64
"""Slots per page."""
DIM = 128
"""Channels per key."""
POISON = {"nan": 0xFF, "huge": 0x7E, "canary": 0x44}
"""The byte that fills what no row may read: NaN in every format, large numbers, or plausible ones (0x44..: 3.0 in e4m3,
785 in bf16 and float32)."""
GROUP = "parity.layouts"


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """How a page holds keys: the values of its slots first, then their scales (planar).

    name, about     as case strings and contracts say it, and in a few words
    payload, scale  bytes per slot, of the values and of the scales (0: there are none)
    query_dtype     dtype of the queries that are multiplied with such keys
    cache_dtype     dtype of the `kv_cache` argument
    poison_scale    bytes that poison the scales, by the kind of poison, where they differ from `POISON`
    slots, dim      slots per page, channels per key
    """

    name: str
    about: str
    payload: int
    query_dtype: torch.dtype
    scale: int = 0
    cache_dtype: torch.dtype = torch.uint8
    poison_scale: Mapping[str, int] = field(default_factory=dict)
    slots: int = PAGE
    dim: int = DIM

    @property
    def slot_bytes(self) -> int:
        """Bytes per slot, scales included."""
        return self.payload + self.scale

    @property
    def page_bytes(self) -> int:
        """Bytes per page, without a gap after it."""
        return self.slots * self.slot_bytes

    def cache_view(self, pool: Tensor) -> Tensor:
        """The `kv_cache` argument over a pool uint8 [pages, page stride], with the pool's page stride: of the cache's
        dtype, [pages, slots, 1, elements per slot]."""
        pages, stride = pool.shape
        size = self.cache_dtype.itemsize
        width = self.slot_bytes // size
        return pool.view(self.cache_dtype).as_strided((pages, self.slots, 1, width), (stride // size, width, width, 1))

    def empty_cache(self, pages: int, device: torch.device | str = "cpu") -> Tensor:
        """A `kv_cache` argument of zeros, pages without gaps."""
        return self.cache_view(torch.zeros(pages, self.page_bytes, dtype=torch.uint8, device=device))

    def payload_at(self, slots: Tensor, stride: int) -> Tensor:
        """Byte addresses (int64) of the values of slots (int64), in a pool with `stride` bytes from page to page."""
        return slots // self.slots * stride + slots % self.slots * self.payload

    def scale_at(self, slots: Tensor, stride: int) -> Tensor:
        """Byte addresses (int64) of the scales of slots (int64)."""
        return slots // self.slots * stride + self.slots * self.payload + slots % self.slots * self.scale

    def addresses(self, slots: Tensor, stride: int) -> tuple[Tensor, Tensor]:
        """Addresses of every byte of n slots (int64 [n]): values int64 [n, payload], scales int64 [n, scale]."""
        of_payload, of_scale = (torch.arange(size, device=slots.device) for size in (self.payload, self.scale))
        return self.payload_at(slots, stride)[:, None] + of_payload, self.scale_at(slots, stride)[:, None] + of_scale

    def slot_of_byte(self, device: torch.device | str = "cpu") -> Tensor:
        """The slot of a page that each of its bytes belongs to, int64 [page_bytes]."""
        slots = torch.arange(self.slots, device=device)
        return torch.cat([slots.repeat_interleave(self.payload), slots.repeat_interleave(self.scale)])

    def place_of_byte(self, inside: int) -> tuple[int, str]:
        """The slot of a page that a byte belongs to, and which part of it: "payload" or "scale"."""
        slot = int(self.slot_of_byte()[inside])
        return slot, "payload" if inside < self.slots * self.payload else "scale"

    def poison_page(self, kind: str, device: torch.device | str = "cpu") -> Tensor:
        """A page that no row may read, uint8 [page_bytes]; `kind` is a key of `POISON`."""
        page = torch.full((self.page_bytes,), POISON[kind], dtype=torch.uint8, device=device)
        page[self.slots * self.payload :] = self.poison_scale.get(kind, POISON[kind])
        return page


_LAYOUTS: dict[str, Layout] = {}


def register(layout: Layout) -> Layout:
    """Make a layout known by its name, and return it. ValueError if another one has that name."""
    if _LAYOUTS.setdefault(layout.name, layout) is not layout:
        raise ValueError(f"layout {layout.name!r} is registered twice")
    return layout


def names() -> tuple[str, ...]:
    """Names of all layouts, ours first."""
    _load_entry_points()
    return tuple(_LAYOUTS)


def find(name: str) -> Layout:
    """The layout of that name. ValueError if there is none."""
    if name not in _LAYOUTS and name not in names():
        raise ValueError(f"layout must be one of {', '.join(names())}, got {name!r}")
    return _LAYOUTS[name]


@functools.cache
def _load_entry_points() -> None:
    """Registers the layouts of other packages, once per process. ValueError for one that cannot be loaded."""
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            layout = entry.load()
        except (ImportError, AttributeError) as error:
            raise ValueError(f"entry point {entry.name} of {GROUP}: {entry.value} cannot be loaded: {error}") from error
        if not isinstance(layout, Layout):
            raise ValueError(f"entry point {entry.name} of {GROUP}: {entry.value} is no Layout")
        register(layout)

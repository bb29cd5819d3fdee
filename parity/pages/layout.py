"""Layouts: how a page of the cache holds keys, as values; one file each in this folder.

`find(name)` gives a layout, `names()` all of them. A package outside this repository adds one through the entry-point
group `parity.layouts` (the entry point names a `Layout`), a test through `register`. What a new layout has to provide
stands in `Layout`; what reads and writes its pages besides (`impl/`, `reference/`) keeps definitions of its own, for a
shared helper would share its bugs.
"""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from parity.pages.elements import Element
from parity.pages.intervals import Allowed
from parity.pages.keys import Drawn, Keys

PAGE = 64
"""Slots per page."""
DIM = 128
"""Channels per key."""
POISON = {"nan": 0xFF, "huge": 0x7E, "canary": 0x44}
"""The byte that fills what no row may read: NaN in every format, large numbers, or plausible ones (0x44..: 3.0 in e4m3,
785 in bf16 and float32)."""
GROUP = "parity.layouts"


def _no_store(*_: object) -> Any:
    raise ValueError("this layout does not say how a store is judged: it needs `encode` and `allowed`")


@dataclass(frozen=True, eq=False, kw_only=True)
class Layout:
    """How a page holds keys: the values of its slots first, then their scales (planar).

    A layout has to provide, for logits functions:
    name, about     as case strings and contracts say it, and in a few words
    element, query  number formats of the keys' values, and of the queries that are multiplied with them
    payload, scale  bytes per slot, of the values and of the scales (0: there are none)
    finish          codes as drawn to keys as stored, scaled and spoiled as their class of data wants it
    read            (kv_cache, slots int64 [n]) -> (values [n, dim] as stored, scales float32 [n] or None): how the
                    oracle reads a cache, by a definition of its own and not through what `finish` knows
    and for stores:
    encode          (keys float32 or bf16 [n, dim], rule, fake) -> (payload uint8 [n, bytes], scales uint8 [n, bytes] or
                    None), the bytes that a published store writes
    allowed         (payload, scales, low, high, rule, fake) -> what is wrong with stored bytes of keys that lie between
                    low and high (float64 [n, dim])
    scale_rules     the rules of scales among which a contract chooses, the usual one first (empty: there is one)
    fake_fp4        whether a store may quantise to the fp4 grid and back first (`fake` above)

    The rest has defaults:
    cache_dtype     dtype of the `kv_cache` argument
    neutral         the scale of a key that is left out, whose values are zero
    poison_scale    bytes that poison the scales, by the kind of poison, where they differ from `POISON`
    core            the stored model of its dot on sm_90 (None: none was measured)
    core_by_default whether a contract on CUDA that names no arithmetic has that model
    slots, dim      slots per page, channels per key
    """

    name: str
    about: str
    element: Element
    query: Element
    payload: int
    finish: Callable[[Drawn], Keys]
    read: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
    scale: int = 0
    encode: Callable[[Tensor, str, bool], tuple[Tensor, Tensor | None]] = _no_store
    allowed: Callable[[Tensor, Tensor, Tensor, Tensor, str, bool], Allowed] = _no_store
    scale_rules: tuple[str, ...] = ()
    fake_fp4: bool = True
    cache_dtype: torch.dtype = torch.uint8
    neutral: float = 1.0
    poison_scale: Mapping[str, int] = field(default_factory=dict)
    core: str | None = None
    core_by_default: bool = False
    slots: int = PAGE
    dim: int = DIM

    @property
    def query_dtype(self) -> torch.dtype:
        """dtype of the queries."""
        return self.query.dtype

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

    def page_rows(self, keys: Keys) -> Tensor:
        """Pages as bytes, uint8 [n, page_bytes]."""
        payload = keys.payload.view(torch.uint8).flatten(1)
        if keys.scales is None:
            return payload
        return torch.cat([payload, keys.scales.contiguous().view(torch.uint8).flatten(1)], 1)

    def poison_page(self, kind: str, device: torch.device | str = "cpu") -> Tensor:
        """A page that no row may read, uint8 [page_bytes]; `kind` is a key of `POISON`."""
        page = torch.full((self.page_bytes,), POISON[kind], dtype=torch.uint8, device=device)
        page[self.slots * self.payload :] = self.poison_scale.get(kind, POISON[kind])
        return page


_LAYOUTS: dict[str, Layout] = {}


def register(layout: Layout) -> Layout:
    """Make a layout known by its name, and return it. ValueError if another has that name, or for pages of another
    size than placement and reference know so far."""
    if (layout.slots, layout.dim) != (PAGE, DIM):
        raise ValueError(
            f"layout {layout.name!r} must have {PAGE} slots of {DIM} channels, got {layout.slots} of {layout.dim}"
        )
    if _LAYOUTS.setdefault(layout.name, layout) is not layout:
        raise ValueError(f"layout {layout.name!r} is registered twice")
    return layout


def names() -> tuple[str, ...]:
    """Names of all layouts, ours first."""
    _load_entry_points()
    return tuple(_LAYOUTS)


def find(name: str, what: str = "layout") -> Layout:
    """The layout of that name. ValueError if there is none; `what` begins its message."""
    if not isinstance(name, str) or (name not in _LAYOUTS and name not in names()):
        raise ValueError(f"{what} must be one of {', '.join(names())}, got {name!r}")
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

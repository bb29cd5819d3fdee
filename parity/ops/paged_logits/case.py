"""The case of paged logits: everything that decides one test problem, as a frozen value that prints as one string.

A case holds structure and placement; the numbers themselves follow from (data, seed, logical coordinates), see
parity/pages/values.py. So a case can be mailed, hashed, shrunk, and run again anywhere with the same operands.
"""

from dataclasses import dataclass
from typing import ClassVar

from parity.domain.fields import choice, integer, number_list, subset
from parity.ops.shared.case import MAX_GAP, PagedCase
from parity.pages import layout as layouts
from parity.pages.keys import CLASSES

HEADS = (8, 16, 32, 64)
STRIDES = ("lens", "out", "q", "table", "weights")
OFFSETS = ("lens", "pool", "q", "table", "weights")
DATA = tuple(CLASSES)


@dataclass(frozen=True, kw_only=True)
class Case(PagedCase):
    """One call of a logits function; the fields that it shares are described in `PagedCase`."""

    op: ClassVar[str] = "paged_logits"
    first: ClassVar[tuple[str, ...]] = ("lengths", "layout", "heads", "data", "seed")

    layout: str = choice("bf16", layouts.names, "layout of the pages")
    heads: int = integer(64, 1, 128, "index heads", among=HEADS)
    data: str = choice("exact", DATA, "data class, see below")
    gap: int = integer(0, 0, MAX_GAP, "bytes between pages", multiple=16)
    strides: tuple[str, ...] = subset(STRIDES, "operands that are views with gaps between rows")
    offsets: tuple[str, ...] = subset(OFFSETS, "operands that begin some way into their storage")
    only_heads: tuple[int, ...] | None = number_list(
        None, 127, "the other heads have weight zero (used by the reducer)", rising=True
    )

    def validate(self) -> None:
        PagedCase.validate(self)
        if self.only_heads and self.only_heads[-1] >= self.heads:
            raise ValueError(f"only_heads must be an integer from 0 to {self.heads - 1}, got {self.only_heads[-1]}")

    @property
    def page_bytes(self) -> int:
        """Bytes of a page without its gap."""
        return layouts.find(self.layout).page_bytes

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self.page_bytes + self.gap

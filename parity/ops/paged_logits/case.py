"""The case of paged logits: everything that decides one test problem, as a frozen value that prints as one string.

A case holds structure and placement; the numbers themselves follow from (data, seed, logical coordinates), see
parity/pages/values.py. So a case can be mailed, hashed, shrunk, and run again anywhere with the same operands.
"""

from dataclasses import dataclass
from typing import ClassVar

from parity.domain.fields import choice, integer, number_list, subset
from parity.ops.shared.case import DIM, MAX_GAP, MAX_ID, MAX_LENGTH, PAGE, POISONS, TAILS, PagedCase

HEADS = (8, 16, 32, 64)
LAYOUTS = ("bf16", "fp8", "fp4")
SLOT_BYTES = {"bf16": 256, "fp8": 132, "fp4": 68}
STRIDES = ("lens", "q", "table", "weights")
DATA = (
    "exact",
    "exact_wide",
    "octaves",
    "near_ties",
    "negative",
    "zeros",
    "saturating",
    "needle",
    "nonfinite",
    "subnormal",
    "outliers",
    "fp4_grid",
)


@dataclass(frozen=True, kw_only=True)
class Case(PagedCase):
    """One call of a logits function; the fields that it shares are described in `PagedCase`."""

    op: ClassVar[str] = "paged_logits"
    first: ClassVar[tuple[str, ...]] = ("lengths", "layout", "heads", "data", "seed")

    layout: str = choice("bf16", LAYOUTS, "layout of the pages")
    heads: int = integer(64, 1, 128, "index heads", among=HEADS)
    data: str = choice("exact", DATA, "data class, see below")
    gap: int = integer(0, 0, MAX_GAP, "bytes between pages", multiple=16)
    strides: tuple[str, ...] = subset(STRIDES, "operands that are views with gaps between rows")
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
        return PAGE * SLOT_BYTES[self.layout]

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self.page_bytes + self.gap


__all__ = [
    "DATA",
    "DIM",
    "HEADS",
    "LAYOUTS",
    "MAX_GAP",
    "MAX_ID",
    "MAX_LENGTH",
    "PAGE",
    "POISONS",
    "SLOT_BYTES",
    "STRIDES",
    "TAILS",
    "Case",
]

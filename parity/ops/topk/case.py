"""The case of top-k: synthetic scores, a block table, and how many slots are chosen."""

from dataclasses import dataclass
from typing import ClassVar

from parity.domain.fields import choice, integer, subset
from parity.ops.shared.case import MAX_LENGTH, PagedCase

STRIDES = ("lens", "logits", "table")
DATA = ("random", "equal", "negative", "neginf", "narrow", "ulps", "large", "nan", "few", "zeros", "inf", "top", "tiny")


@dataclass(frozen=True, kw_only=True)
class TopkCase(PagedCase):
    """One call of a top-k function; the shared fields are described in `PagedCase`. No pool is built, only numbered."""

    op: ClassVar[str] = "topk"
    first: ClassVar[tuple[str, ...]] = ("lengths", "data", "seed", "k")
    retired: ClassVar[frozenset[str]] = frozenset({"layout", "heads", "gap"})

    data: str = choice("random", DATA, "data class, see below")
    k: int = integer(512, 1, MAX_LENGTH, "slots to choose per row")
    strides: tuple[str, ...] = subset(STRIDES, "operands that are views with gaps between rows")
    offsets: tuple[str, ...] = subset(STRIDES, "operands that begin some way into their storage")

"""What the cases of operations over a block table share: context lengths, identities, placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from parity.domain.fields import (
    CaseString,
    Field,
    check_range,
    choice,
    declare,
    flag,
    integer,
    named,
    number_list,
    parse_integer,
    random_seed,
)
from parity.domain.notation import format_lengths, parse_lengths
from parity.pages.layout import PAGE, POISON
from parity.pages.placement import MAX_ID, MAX_PAGE

TAILS = ("minus1", "huge", "canary")
POISONS = tuple(POISON)
MAX_LENGTH = 1 << 24
MAX_GAP = 1 << 30

Lengths = tuple[tuple[int, ...], ...]


def check_lengths(name: str, lengths: Any) -> None:
    """ValueError unless `lengths` is a tuple of tuples of one size, at least 1, of legal context lengths."""
    if not isinstance(lengths, tuple) or not all(isinstance(row, tuple) for row in lengths):
        raise ValueError("lengths must be a tuple of tuples, one inner tuple per request")
    sizes = {len(row) for row in lengths}
    if len(sizes) > 1:
        raise ValueError(f"lengths must have the same number of rows in every request, got {sorted(sizes)}")
    if 0 in sizes:
        raise ValueError("lengths must have at least one row in every request, got 0")
    for row in lengths:
        for length in row:
            check_range("lengths", length, 0, MAX_LENGTH)


LENGTHS = Field(
    "the context lengths of all rows, request by request: `300`, `300x4` (four times), `p100+7` (seven causal rows, "
    "the first at token position 100), joined by commas; `none` is an empty batch. `next_n=` is the number of rows per "
    "request (1)",
    f"0 to 2^{MAX_LENGTH.bit_length() - 1} each",
    named(parse_lengths),
    lambda rows: format_lengths([length for row in rows for length in row]),
    check_lengths,
    "lens",
)


REDECLARED = Field("declared anew by every operation", "", lambda name, text: text, str, lambda name, value: None)


@dataclass(frozen=True, kw_only=True)
class PagedCase(CaseString):
    """`lengths[b][n]` is the context length, in compressed keys, of row n of request b.

    Identity (decides the values, never the placement):
      request_ids [B], row_ids [B*next_n]: names of requests and rows; default 0..B-1 and 0..next_n-1 in each request.
      page_ids [>= pages]: content of the logical pages of every request; a repeated id is a page used twice.
      prefix: pages whose id is below it have the same content in every request (a shared prompt).
      period: pages so many apart have the same content, which makes long rows cheap to draw and to evaluate exactly.
      only_keys (page id * 64 + offset): the other keys are all zero.
    Placement (must not change the result): perm, alias, spare, base, width, max_len, tail, poison, strides, offsets,
    singletons.
    ValueError if a field is out of range.
    """

    beside: ClassVar[tuple[str, ...]] = ("next_n",)

    lengths: Lengths = declare(..., LENGTHS)
    data: str = declare("", REDECLARED)
    seed: int = random_seed("of the values")
    perm: int = random_seed("seed of the shuffle of physical pages; 0 keeps them in order")
    alias: str = choice(
        "shared", ("shared", "copied"), "pages of equal content are one physical page, or `copied`: one each"
    )
    prefix: int = integer(0, 0, MAX_LENGTH, "leading pages that all requests share, as a common prompt")
    period: int = integer(0, 0, MAX_LENGTH, "pages so many apart have the same content; 0: every page has its own")
    spare: int = integer(1, 0, MAX_LENGTH, "unused pages in the pool; the first is the canary")
    base: int = integer(0, 0, MAX_PAGE, "unused pages of the pool before the first in use, for large page numbers")
    width: int | None = integer(None, 0, MAX_LENGTH, "columns of the block table")
    max_len: int | None = integer(None, 0, MAX_LENGTH, "columns of the result")
    tail: str = choice(
        "minus1", TAILS, "what stands in the table past the last page: -1, a huge id, or the canary page's"
    )
    poison: str = choice("nan", POISONS, "what stands in every byte that may not be read")
    strides: tuple[str, ...] = declare((), REDECLARED)
    offsets: tuple[str, ...] = declare((), REDECLARED)
    singletons: bool = flag(False, "axes of size one have a stride that no other axis has")
    clean: bool = flag(True, "`clean_logits`; of top-k: past a row's length stands -inf, else leftovers")
    request_ids: tuple[int, ...] | None = number_list(None, MAX_ID - 1, "names of the requests, which decide values")
    row_ids: tuple[int, ...] | None = number_list(None, MAX_ID - 1, "names of the rows, which decide values")
    page_ids: tuple[int, ...] | None = number_list(None, MAX_LENGTH, "names of the logical pages, which decide values")
    only_keys: tuple[int, ...] | None = number_list(
        None, MAX_LENGTH * PAGE, "the other keys are zero (used by the reducer)", rising=True
    )

    def validate(self) -> None:
        if self.tail == "canary" and self.spare < 1:
            raise ValueError("tail=canary needs spare >= 1, a page for the canary to live in, got spare=0")
        if self.width is not None and self.width < self.pages:
            raise ValueError(f"width must hold the {self.pages} pages of the longest row, got {self.width}")
        if self.max_len is not None and self.max_len < self.longest:
            raise ValueError(f"max_len must hold the longest row of {self.longest} keys, got {self.max_len}")
        for name, wanted in (("request_ids", self.requests), ("row_ids", self.rows)):
            ids = getattr(self, name)
            if ids is not None and len(ids) != wanted:
                raise ValueError(f"{name} must have {wanted} entries, got {len(ids)}")
        contents = min(self.pages, self.period or self.pages)
        if self.page_ids is not None and len(self.page_ids) < contents:
            raise ValueError(f"page_ids must have {contents} entries or more, got {len(self.page_ids)}")

    def words(self, name: str) -> list[str]:
        found = CaseString.words(self, name)
        return [*found, f"next_n={self.next_n}"] if name == "lengths" and self.next_n != 1 else found

    @classmethod
    def values(cls, words: Mapping[str, str]) -> dict[str, Any]:
        rest = {word: text for word, text in words.items() if word != "next_n"}
        found = CaseString.values.__func__(cls, rest)  # type: ignore[attr-defined]
        flat, next_n = found["lengths"], parse_integer("next_n", words.get("next_n", "1"))
        if next_n < 1 or len(flat) % next_n:
            raise ValueError(f"next_n must be at least 1 and divide the {len(flat)} lengths, got {next_n}")
        found["lengths"] = tuple(flat[first : first + next_n] for first in range(0, len(flat), next_n))
        return found

    @property
    def size(self) -> tuple[int, ...]:
        """Rows, pages and keys, then the length of the string."""
        return (
            self.rows,
            sum(-(-n // PAGE) for row in self.lengths for n in row),
            sum(map(sum, self.lengths)),
            len(str(self)),
        )

    @property
    def requests(self) -> int:
        """B, rows of the block table."""
        return len(self.lengths)

    @property
    def next_n(self) -> int:
        """Rows per request; 1 in an empty batch."""
        return len(self.lengths[0]) if self.lengths else 1

    @property
    def rows(self) -> int:
        """T = B * next_n, rows of the result."""
        return self.requests * self.next_n

    @property
    def longest(self) -> int:
        """Largest context length; 0 in an empty batch."""
        return max((max(row) for row in self.lengths), default=0)

    @property
    def pages(self) -> int:
        """Logical pages of the longest row."""
        return -(-self.longest // PAGE)

    @property
    def table_width(self) -> int:
        """Columns of the block table; at least 1 unless `width` says 0."""
        return max(1, self.pages) if self.width is None else self.width

    @property
    def max_context_len(self) -> int:
        """Columns of the result; at least 1 unless `max_len` says 0."""
        return max(1, self.longest) if self.max_len is None else self.max_len

"""The store case: everything that decides one call of a store function, as a frozen value that prints as one string.

Like the case of paged logits it holds structure and placement only; values follow from (data, seed, token name).
"""

from dataclasses import dataclass
from typing import ClassVar

from parity.domain.fields import CaseString, choice, flag, integer, number_list, random_seed, subset
from parity.ops.shared.case import MAX_GAP
from parity.pages import layout as layouts
from parity.pages.layout import PAGE
from parity.pages.placement import MAX_PAGE

ABOUT: dict[str, str] = {
    "bell": "pooled keys about gaussian, with 24 significant bits",
    "octaves": "the same over sixteen octaves, one octave per token",
    "zeros": "half of the tokens all zero, a quarter zero but for one channel, the rest ordinary",
    "onehot": "one channel that is not zero",
    "pairs": "two channels that are not zero",
    "tiny": "magnitudes from 2^-90 to 2^-27",
    "large": "magnitudes from 2^38 to 2^53",
    "context": "tokens of one long prompt, which share subjects: for recall",
}
DATA = tuple(ABOUT)
PLACES = ("spread", "order", "last", "edges")
WEIGHTS = ("real", "one", "ties")
POSITIONS = ("near", "far")
DTYPES = ("bf16", "f32")
OFFSETS = ("out_loc", "pool", "pooled", "positions", "weight")
STRIDES = ("pooled",)
MAX_TOKENS = 1 << 19
MAX_NAME = 1 << 22
MAX_POSITION = (1 << 20) - 1  # the longest context, 1,048,576 tokens


@dataclass(frozen=True, kw_only=True)
class StoreCase(CaseString):
    """One call of a store function on `ids` tokens.

    Identity (decides what is stored for a token, never where): ids, data, seed, weights, positions, eps_exponent, and
    the dtypes pooled and weight. Placement: the other fields. ValueError if a field is out of range.
    """

    op: ClassVar[str] = "store"

    ids: tuple[int, ...] = number_list(
        ..., MAX_NAME, "the names of the tokens in batch order, which decide their values", most=MAX_TOKENS
    )
    layout: str = choice("bf16", layouts.names, "layout of the pages")
    data: str = choice("bell", DATA, "data class, see below")
    seed: int = random_seed("of the values")
    pooled: str = choice("f32", DTYPES, "type of the pooled keys")
    weight: str = choice("f32", DTYPES, "type of the norm's weight")
    weights: str = choice(
        "real", WEIGHTS, "norm weights: 24-bit factors, ones, or powers of two times midpoints of the fp4 grid"
    )
    positions: str = choice("near", POSITIONS, "four times the token's name, or anywhere up to 1,048,575")
    eps_exponent: int = integer(6, 1, 20, "eps is 10 to the minus this")
    pages: int = integer(2, 0, 1 << 20, "pages of the pool that slots may lie in")
    base: int = integer(0, 0, MAX_PAGE, "pages of the pool before those, for large slots")
    place: str = choice(
        "spread",
        PLACES,
        "where slots lie: over the pool, in order from slot 0, from the pool's last slot down, on the edges of pages",
    )
    perm: int = random_seed("seed of the shuffle of slots")
    skip: int = integer(0, 0, MAX_TOKENS, "about one token in so many has slot -1; 0 for none, 1 for all")
    gap: int = integer(0, 0, MAX_GAP, "bytes between pages", multiple=16)
    fill: int = random_seed("seed of what stands in the pool before")
    strides: tuple[str, ...] = subset(STRIDES, "operands that are views with gaps between rows")
    offsets: tuple[str, ...] = subset(OFFSETS, "operands that begin some way into their storage")
    singletons: bool = flag(False, "axes of size one have a stride that no other axis has")

    def validate(self) -> None:
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids must be distinct, since a token's name decides its values")
        if len(self.ids) > self.places:
            raise ValueError(f"pages must hold {len(self.ids)} tokens, got {self.pages} pages for place={self.place}")

    @property
    def size(self) -> tuple[int, ...]:
        """Pages that the tokens fill, tokens, then the length of the string."""
        return (-(-self.tokens // PAGE), self.tokens, len(str(self)))

    @property
    def tokens(self) -> int:
        """N, tokens of the call, those with slot -1 included."""
        return len(self.ids)

    @property
    def places(self) -> int:
        """Slots that tokens can be put in."""
        return self.pages * (2 if self.place == "edges" else PAGE)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool."""
        return self.base + self.pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page without its gap."""
        return layouts.find(self.layout).page_bytes

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self.page_bytes + self.gap

    @property
    def eps(self) -> float:
        """The norm's epsilon."""
        return 10.0**-self.eps_exponent

    @property
    def max_position(self) -> int:
        """Rows of the rotary table."""
        if self.positions == "far":
            return MAX_POSITION + 1
        return 4 * (max(self.ids, default=0) + 1)

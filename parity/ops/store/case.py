"""The store case: everything that decides one call of a store function, as a frozen value that prints as one string.

Like the case of paged logits it holds structure and placement alone; values follow from (data, seed, token name).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise

from parity.domain.notation import format_ids, parse_ids
from parity.ops.paged_logits.case import MAX_GAP, MAX_SEED, VERSION
from parity.pages import layout as layouts
from parity.pages.layout import PAGE

STORE_DATA = ("bell", "octaves", "zeros", "onehot", "pairs", "tiny", "large", "context")
"""`context`: pooled keys and rotary rows as of one long prompt, for recall; the rest: a token on its own."""
PLACES = ("spread", "order", "last", "edges")
WEIGHTS = ("real", "one", "ties")
POSITIONS = ("near", "far")
DTYPES = ("bf16", "f32")
MAX_TOKENS = 1 << 19
MAX_NAME = 1 << 22
MAX_POSITION = (1 << 20) - 1  # the longest context, 1,048,576 tokens


@dataclass(frozen=True, slots=True)
class StoreCase:
    """One call of a store function on `ids` tokens.

    Identity (decides what is stored for a token, never where): data, seed, weights (`real` 24-bit factors, `one`, or
    `ties`, powers of two times midpoints of the fp4 grid), positions (`near`: 4 * name, `far`: anywhere up to
    1,048,575), pooled and weight dtypes, eps = 10^-eps_exponent, ids: names of the tokens, in batch order.
    Placement: pages of the pool; place (`spread` over the pool, in `order` from slot 0, from the `last` slot of the
    last page down, on the `edges` of pages), shuffled by perm; skip: about one token in `skip` has slot -1 (0 none, 1
    all); gap: bytes between pages; fill: seed of what stands in the pool before.
    ValueError if a field is out of range.
    """

    ids: tuple[int, ...]
    layout: str = "bf16"
    data: str = "bell"
    seed: int = 0
    pooled: str = "f32"
    weight: str = "f32"
    weights: str = "real"
    positions: str = "near"
    eps_exponent: int = 6
    pages: int = 2
    place: str = "spread"
    perm: int = 0
    skip: int = 0
    gap: int = 0
    fill: int = 0

    def __post_init__(self) -> None:
        layouts.find(self.layout)
        choices = (
            ("data", STORE_DATA),
            ("pooled", DTYPES),
            ("weight", DTYPES),
            ("weights", WEIGHTS),
            ("positions", POSITIONS),
            ("place", PLACES),
        )
        for name, allowed in choices:
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        limits = (
            ("seed", 0, MAX_SEED),
            ("eps_exponent", 1, 20),
            ("pages", 0, 1 << 20),
            ("perm", 0, MAX_SEED),
            ("skip", 0, MAX_TOKENS),
            ("gap", 0, MAX_GAP),
            ("fill", 0, MAX_SEED),
        )
        for name, low, high in limits:
            _check_range(name, getattr(self, name), low, high)
        if self.gap % 16:
            raise ValueError(f"gap must be a multiple of 16 bytes, got {self.gap}")
        if not isinstance(self.ids, tuple):
            raise ValueError(f"ids must be a tuple of integers, got {type(self.ids).__name__}")
        if len(self.ids) > MAX_TOKENS:
            raise ValueError(f"ids must name at most {MAX_TOKENS} tokens, got {len(self.ids)}")
        for value in self.ids:
            _check_range("ids", value, 0, MAX_NAME)
        ordered = sorted(self.ids)
        if any(left == right for left, right in pairwise(ordered)):
            raise ValueError("ids must be distinct, since a token's name decides its values")
        if len(self.ids) > self.places:
            raise ValueError(f"pages must hold {len(self.ids)} tokens, got {self.pages} pages for place={self.place}")

    @property
    def stage(self) -> str:
        """Always "store"."""
        return "store"

    @property
    def tokens(self) -> int:
        """N, tokens of the call, those with slot -1 included."""
        return len(self.ids)

    @property
    def places(self) -> int:
        """Slots that tokens can be put in."""
        return self.pages * (2 if self.place == "edges" else PAGE)

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """The size of the case as the search for small cases counts it: one row of as many keys as tokens."""
        return ((self.tokens,),)

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

    def __str__(self) -> str:
        parts = [VERSION, "stage=store", f"ids={format_ids(self.ids)}"]
        parts += [f"{name}={getattr(self, name)}" for name, usual in _DEFAULTS.items() if getattr(self, name) != usual]
        return " ".join(parts)


_DEFAULTS = {field.name: field.default for field in fields(StoreCase) if field.name != "ids"}
_INTEGERS = tuple(name for name, usual in _DEFAULTS.items() if isinstance(usual, int))


def is_store_case(text: str) -> bool:
    """Whether a case string is one of a store case."""
    return "stage=store" in text.split()


def parse_store_case(text: str) -> StoreCase:
    """The case that prints as `text`. ValueError, in one sentence, for another version, name or value."""
    words = text.split()
    if not words or words[0] != VERSION:
        raise ValueError(f"a case string must begin with {VERSION}, got {words[0] if words else 'an empty string'!r}")
    found: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"a case string consists of name=value words, got {word!r}")
        if name not in _DEFAULTS and name not in ("ids", "stage"):
            raise ValueError(f"unknown name in the case string, expected a field of StoreCase, got {name!r}")
        if name in found:
            raise ValueError(f"{name} stands twice in the case string")
        found[name] = value
    if found.pop("stage", None) != "store":
        raise ValueError("a store case must say stage=store")
    if "ids" not in found:
        raise ValueError("a store case must name its tokens, ids=..., got none")
    values: dict[str, object] = {"ids": parse_ids(found.pop("ids"))}
    for name, value in found.items():
        if name in _INTEGERS and not (value.isascii() and value.isdigit()):
            raise ValueError(f"{name} must be a non-negative integer, got {value!r}")
        values[name] = int(value) if name in _INTEGERS else value
    return StoreCase(**values)  # type: ignore[arg-type]


# Values that explain themselves, tried in this order; the first that still fails is kept.
SIMPLE: tuple[tuple[str, tuple], ...] = (
    ("gap", (0, 16)),
    ("skip", (0,)),
    ("fill", (0,)),
    ("perm", (0,)),
    ("place", ("order", "spread")),
    ("pages", (1, 2, 3, 4)),
    ("positions", ("near",)),
    ("weights", ("one",)),
    ("weight", ("f32",)),
    ("pooled", ("f32",)),
    ("eps_exponent", (6,)),
    ("data", ("onehot", "bell")),
    ("seed", (0, 1)),
)


def reduce_store_case(case: StoreCase, still_fails: Callable[[StoreCase], bool], budget: int = 300) -> StoreCase:
    """The smallest case found for which `still_fails` is true, in at most `budget` calls: fewest tokens, then plain
    placement and values. A failure that does not repeat on `case` itself is not reduced."""
    if budget < 1:
        raise ValueError(f"budget must be at least 1 call, got {budget}")
    calls, best, tried = 1, case, {case}
    if not still_fails(case):
        return case

    def accept(**changes: object) -> bool:
        nonlocal calls, best
        try:
            candidate = replace(best, **changes)  # type: ignore[arg-type]
        except ValueError:
            return False  # such a case does not exist: fewer pages than the tokens need
        if candidate in tried or calls >= budget:
            return False
        tried.add(candidate)
        calls += 1
        if still_fails(candidate):
            best = candidate
            return True
        return False

    while calls < budget:
        before = best
        size = best.tokens // 2
        while size:
            stop = best.tokens
            while stop > 0:
                rest = best.ids[: max(0, stop - size)] + best.ids[stop:]
                if rest:
                    accept(ids=rest)
                stop -= size
            size //= 2
        for name, choices in SIMPLE:
            for value in choices:
                if getattr(best, name) == value or accept(**{name: value}):
                    break
        if best == before:
            break
    return best


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")

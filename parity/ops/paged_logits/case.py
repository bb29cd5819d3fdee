"""The case: everything that decides one test problem, as a frozen value that prints as one short string.

A case holds structure and placement; the numbers themselves follow from (data, seed, logical coordinates), see
values.py. So a case can be mailed, hashed, shrunk, and run again anywhere with the same operands.
"""

from dataclasses import dataclass, fields
from itertools import pairwise

from parity.domain.notation import format_ids, format_lengths, parse_ids, parse_lengths
from parity.pages import layout as layouts
from parity.pages.keys import CLASSES
from parity.pages.layout import PAGE, POISON
from parity.pages.placement import MAX_ID

VERSION = "v1"
HEADS = (8, 16, 32, 64)
STAGES = ("logits", "topk")
TAILS = ("minus1", "huge", "canary")
POISONS = tuple(POISON)
STRIDES = {"logits": ("q", "weights", "table", "lens"), "topk": ("logits", "table", "lens")}

LOGITS_DATA = tuple(CLASSES)
TOPK_DATA = (
    "random",
    "equal",
    "negative",
    "neginf",
    "narrow",
    "ulps",
    "large",
    "nan",
    "few",
    "zeros",
)
DATA = {"logits": LOGITS_DATA, "topk": TOPK_DATA}

MAX_LENGTH = 1 << 24
MAX_GAP = 1 << 30
MAX_SEED = 1 << 62


@dataclass(frozen=True, slots=True)
class Case:
    """One problem. `lengths[b][n]` is the context length, in compressed keys, of row n of request b.

    Identity (decides the values, never the placement):
      request_ids [B], row_ids [B*next_n]: names of requests and rows; default 0..B-1 and 0..next_n-1 in each request.
      page_ids [>= pages]: content of the logical pages of every request; a repeated id is a page used twice.
      prefix: pages whose id is below it have the same content in every request (a shared prompt).
      only_heads: the other heads have weight zero. only_keys (page id * 64 + offset): the other keys are all zero.
    Placement (must not change the result):
      perm: seed of the shuffle of physical pages, 0 in order. alias: pages of equal content are one physical page
      (`shared`) or one each (`copied`). spare: unused pages in the pool, the first being the canary page.
      gap: bytes between pages. width: columns of the block table. max_len: columns of the result. tail: what stands in
      the table past the last page. poison: what stands in every byte that may not be read. strides: operands that
      are views with gaps between rows. Values of None mean "as small as possible".
    k belongs to stage topk alone; layout and heads to stage logits alone. ValueError if a field is out of range.
    """

    lengths: tuple[tuple[int, ...], ...]
    stage: str = "logits"
    layout: str = "bf16"
    heads: int = 64
    data: str = "exact"
    seed: int = 0
    k: int = 512
    perm: int = 0
    alias: str = "shared"
    prefix: int = 0
    spare: int = 1
    gap: int = 0
    width: int | None = None
    max_len: int | None = None
    tail: str = "minus1"
    poison: str = "nan"
    strides: tuple[str, ...] = ()
    clean: bool = True
    request_ids: tuple[int, ...] | None = None
    row_ids: tuple[int, ...] | None = None
    page_ids: tuple[int, ...] | None = None
    only_heads: tuple[int, ...] | None = None
    only_keys: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        _check_choice("stage", self.stage, STAGES)
        layouts.find(self.layout)
        _check_choice("heads", self.heads, HEADS)
        _check_choice("data", self.data, DATA[self.stage])
        _check_choice("alias", self.alias, ("shared", "copied"))
        _check_choice("tail", self.tail, TAILS)
        _check_choice("poison", self.poison, POISONS)
        if not isinstance(self.clean, bool):
            raise ValueError(f"clean must be True or False, got {self.clean!r}")
        _check_range("seed", self.seed, 0, MAX_SEED)
        _check_range("perm", self.perm, 0, MAX_SEED)
        _check_range("k", self.k, 1, MAX_LENGTH)
        _check_range("prefix", self.prefix, 0, MAX_LENGTH)
        _check_range("spare", self.spare, 0, MAX_LENGTH)
        _check_range("gap", self.gap, 0, MAX_GAP)
        if self.gap % 16:
            raise ValueError(f"gap must be a multiple of 16 bytes, got {self.gap}")
        if self.tail == "canary" and self.spare < 1:
            raise ValueError("tail=canary needs spare >= 1, a page for the canary to live in, got spare=0")
        for name in self.strides:
            _check_choice("strides", name, STRIDES[self.stage])
        if tuple(sorted(set(self.strides))) != self.strides:
            raise ValueError(f"strides must be sorted and free of duplicates, got {self.strides!r}")
        self._check_lengths()
        self._check_identity()

    def _check_lengths(self) -> None:
        if not isinstance(self.lengths, tuple) or not all(isinstance(row, tuple) for row in self.lengths):
            raise ValueError("lengths must be a tuple of tuples, one inner tuple a request")
        sizes = {len(row) for row in self.lengths}
        if len(sizes) > 1:
            raise ValueError(f"lengths must have the same number of rows in every request, got {sorted(sizes)}")
        if 0 in sizes:
            raise ValueError("lengths must have at least one row in every request, got 0")
        for row in self.lengths:
            for length in row:
                _check_range("lengths", length, 0, MAX_LENGTH)
        if self.width is not None:
            _check_range("width", self.width, 0, MAX_LENGTH)
            if self.width < self.pages:
                raise ValueError(f"width must hold the {self.pages} pages of the longest row, got {self.width}")
        if self.max_len is not None:
            _check_range("max_len", self.max_len, 0, MAX_LENGTH)
            if self.max_len < self.longest:
                raise ValueError(f"max_len must hold the longest row of {self.longest} keys, got {self.max_len}")

    def _check_identity(self) -> None:
        _check_ids("request_ids", self.request_ids, MAX_ID - 1, self.requests, self.requests)
        _check_ids("row_ids", self.row_ids, MAX_ID - 1, self.rows, self.rows)
        _check_ids("page_ids", self.page_ids, MAX_LENGTH, self.pages, None)
        _check_ids("only_heads", self.only_heads, self.heads - 1, 0, None, rising=True)
        _check_ids("only_keys", self.only_keys, MAX_LENGTH * PAGE, 0, None, rising=True)
        if self.stage == "topk" and self.only_heads is not None:
            raise ValueError("only_heads belongs to stage=logits, got it with stage=topk")

    @property
    def requests(self) -> int:
        """B, rows of the block table."""
        return len(self.lengths)

    @property
    def next_n(self) -> int:
        """Rows a request; 1 in an empty batch."""
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

    @property
    def page_bytes(self) -> int:
        """Bytes of a page without its gap."""
        return layouts.find(self.layout).page_bytes

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self.page_bytes + self.gap

    def __str__(self) -> str:
        flat = [length for row in self.lengths for length in row]
        parts = [VERSION, f"lens={format_lengths(flat)}"]
        if self.next_n != 1:
            parts.append(f"next_n={self.next_n}")
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value != default:
                parts.append(f"{name}={_format_value(value)}")
        return " ".join(parts)


_DEFAULTS = {field.name: field.default for field in fields(Case) if field.name != "lengths"}
_LISTS = ("request_ids", "row_ids", "page_ids", "only_heads", "only_keys")
_INTEGERS = ("heads", "seed", "k", "perm", "prefix", "spare", "gap", "width", "max_len")


def parse_case(text: str) -> Case:
    """The case that prints as `text`. ValueError, in one sentence, for another version, key, value or shape.

    A string that says stage=store gives a parity.ops.store.case.StoreCase, which travels the same way."""
    from parity.ops.store.case import is_store_case, parse_store_case

    if is_store_case(text):
        return parse_store_case(text)  # type: ignore[return-value]
    if "stage=compressor" in text.split():
        from parity.ops.compressor.case import parse_compressor_case

        return parse_compressor_case(text)  # type: ignore[return-value]
    words = text.split()
    if not words or words[0] != VERSION:
        got = repr(words[0]) if words else "an empty string"
        raise ValueError(f"a case string must begin with {VERSION}, got {got}")
    found: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"a case string consists of name=value words, got {word!r}")
        if name not in _DEFAULTS and name not in ("lens", "next_n"):
            raise ValueError(f"unknown name in the case string, expected lens, next_n or a field of Case, got {name!r}")
        if name in found:
            raise ValueError(f"{name} stands twice in the case string")
        found[name] = value
    if "lens" not in found:
        raise ValueError("a case string must say the context lengths, lens=..., got none")
    flat = parse_lengths(found.pop("lens"))
    next_n = _parse_integer("next_n", found.pop("next_n", "1"))
    if next_n < 1 or len(flat) % next_n:
        raise ValueError(f"next_n must be at least 1 and divide the {len(flat)} lengths, got {next_n}")
    lengths = tuple(flat[first : first + next_n] for first in range(0, len(flat), next_n))
    return Case(lengths=lengths, **{name: _parse_value(name, value) for name, value in found.items()})


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return format_ids(value) if not value or isinstance(value[0], int) else "+".join(value)
    return str(value)


def _parse_value(name: str, text: str):
    if name in _LISTS:
        return parse_ids(text)
    if name in _INTEGERS:
        return _parse_integer(name, text)
    if name == "strides":
        return tuple(text.split("+"))
    if name == "clean":
        if text not in ("yes", "no"):
            raise ValueError(f"clean must be yes or no, got {text!r}")
        return text == "yes"
    return text


def _parse_integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} must be a non-negative integer, got {text!r}")
    return int(text)


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, got {value!r}")


def _check_range(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_ids(name: str, ids: object, high: int, least: int, exactly: int | None, rising: bool = False) -> None:
    if ids is None:
        return
    if not isinstance(ids, tuple):
        raise ValueError(f"{name} must be a tuple of integers or None, got {type(ids).__name__}")
    if (exactly is not None and len(ids) != exactly) or len(ids) < least:
        raise ValueError(f"{name} must have {least} entries{'' if exactly else ' or more'}, got {len(ids)}")
    for value in ids:
        _check_range(name, value, 0, high)
    if rising and any(left >= right for left, right in pairwise(ids)):
        raise ValueError(f"{name} must ascend without duplicates, got {format_ids(ids)}")

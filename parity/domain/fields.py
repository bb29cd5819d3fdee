"""The fields of a case, declared once: parsing, printing, checks and the tables of the docs follow.

A case is a frozen dataclass that derives from `CaseString`; each of its fields is made by `choice`, `integer`, `flag`,
`subset` or `number_list` and so carries a `Field` that says what it means and what is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Self, TypeVar

from parity.domain.notation import format_ids, parse_ids

VERSION = "v2"
OLD_VERSION = "v1"
MAX_SEED = 1 << 62

T = TypeVar("T")
Names = tuple[str, ...] | Callable[[], tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Field:
    """How one field is written, read, checked and explained.

    about   what it means, for the documentation
    legal   the legal values in words
    parse   (name, text) -> value; ValueError in one sentence
    format  value -> text
    check   (name, value) -> None; ValueError in one sentence
    word    its name in the string where that is not the field's own
    """

    about: str
    legal: str | Callable[[], str]
    parse: Callable[[str, str], Any]
    format: Callable[[Any], str]
    check: Callable[[str, Any], None]
    word: str = ""


class CaseString:
    """Base of the cases: prints as `v2 op=NAME field=value ...`, fields with their default left out."""

    op: ClassVar[str]
    """The operation that the case is a problem of."""
    first: ClassVar[tuple[str, ...]] = ()
    """Fields that are printed before the others, which follow in the order of their declaration."""
    beside: ClassVar[tuple[str, ...]] = ()
    """Words that a subclass reads itself, as part of another field."""
    retired: ClassVar[frozenset[str]] = frozenset()
    """Words that version 1 knew and that decide nothing: they are read over in an old string."""

    def __post_init__(self) -> None:
        for name, field in fields(type(self)).items():
            value = getattr(self, name)
            if value is not None or defaults(type(self)).get(name, ...) is not None:
                field.check(name, value)
        self.validate()

    def validate(self) -> None:
        """ValueError, in one sentence, for fields that do not fit together."""

    @property
    def size(self) -> tuple[int, ...]:
        """What the search for small cases minimises."""
        return (len(str(self)),)

    def __str__(self) -> str:
        text: str | None = self.__dict__.get("_text")  # asked for several times per example
        if text is None:
            text = self._written()
            object.__setattr__(self, "_text", text)
        return text

    def _written(self) -> str:
        usual = defaults(type(self))
        front = {name: place for place, name in enumerate(self.first)}
        order = sorted(fields(type(self)), key=lambda name: front.get(name, len(front)))
        words = [word for name in order if getattr(self, name) != usual.get(name, ...) for word in self.words(name)]
        return " ".join([VERSION, f"op={self.op}", *words])

    def words(self, name: str) -> list[str]:
        """The words of the string that stand for one field."""
        field = fields(type(self))[name]
        return [f"{field.word or name}={field.format(getattr(self, name))}"]

    @classmethod
    def parse(cls, words: Mapping[str, str]) -> Self:
        """The case of `{word: text}`, all but the version and the operation. ValueError for what is no such case."""
        return cls(**cls.values(words))

    @classmethod
    def values(cls, words: Mapping[str, str]) -> dict[str, Any]:
        """Constructor arguments of the words; ValueError names an unknown or a missing one."""
        known = {field.word or name: name for name, field in fields(cls).items()}
        for word in words:
            if word not in known:
                every = ", ".join((*known, *cls.beside))
                raise ValueError(f"unknown name in the case string, expected {every}, got {word!r}")
        usual = defaults(cls)
        for word, name in known.items():
            if name not in usual and word not in words:
                about = fields(cls)[name].about.partition(":")[0]
                raise ValueError(f"a case of {cls.op} must say {about}, {word}=..., got none")
        return {known[word]: fields(cls)[known[word]].parse(word, text) for word, text in words.items()}


_FIELDS: dict[type, dict[str, Field]] = {}
_DEFAULTS: dict[type, dict[str, Any]] = {}


def fields(kind: type) -> dict[str, Field]:
    """The fields of a case type by name, in the order of their declaration."""
    if kind not in _FIELDS:
        _FIELDS[kind] = {each.name: each.metadata["field"] for each in dataclasses.fields(kind)}
    return _FIELDS[kind]


def defaults(kind: type) -> dict[str, Any]:
    """The defaults of the fields that have one."""
    if kind not in _DEFAULTS:
        every = dataclasses.fields(kind)
        _DEFAULTS[kind] = {each.name: each.default for each in every if each.default is not dataclasses.MISSING}
    return _DEFAULTS[kind]


def split_words(text: str) -> tuple[str, dict[str, str]]:
    """(version, {name: value}) of a case string; ValueError for another version or a word that is not name=value."""
    words = text.split()
    if not words or words[0] not in (VERSION, OLD_VERSION):
        got = repr(words[0]) if words else "an empty string"
        raise ValueError(f"a case string must begin with {VERSION} or {OLD_VERSION}, got {got}")
    found: dict[str, str] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise ValueError(f"a case string consists of name=value words, got {word!r}")
        if name in found:
            raise ValueError(f"{name} stands twice in the case string")
        found[name] = value
    return words[0], found


# ------------------------------------------------------------------------------------------------------ kinds of field


def declare(default: Any, field: Field) -> Any:
    """A dataclass field that carries `field`; `...` as the default makes it required."""
    given = {} if default is ... else {"default": default}
    return dataclasses.field(**given, metadata={"field": field})  # type: ignore[call-overload]


def choice(default: str, names: Names, about: str) -> Any:
    """One of some names."""

    def allowed() -> tuple[str, ...]:
        return names() if callable(names) else names

    def check(name: str, value: Any) -> None:
        check_choice(name, value, allowed())

    return declare(default, Field(about, lambda: ", ".join(allowed()), lambda name, text: text, str, check))


def integer(default: Any, low: int, high: int, about: str, *, among: tuple[int, ...] = (), multiple: int = 1) -> Any:
    """An integer of a range, one of `among` where that is given, a multiple of `multiple`; None only as the default."""
    legal = ", ".join(map(str, among)) or f"{power(low)} to {power(high)}"
    legal += f", a multiple of {multiple}" if multiple > 1 else ""

    def check(name: str, value: Any) -> None:
        if among:
            check_choice(name, value, among)
        check_range(name, value, low, high)
        if value % multiple:
            raise ValueError(f"{name} must be a multiple of {multiple}, got {value}")

    return declare(default, Field(about, legal, parse_integer, str, check))


def flag(default: bool, about: str) -> Any:
    """`yes` or `no`."""

    def parse(name: str, text: str) -> bool:
        if text not in ("yes", "no"):
            raise ValueError(f"{name} must be yes or no, got {text!r}")
        return text == "yes"

    def check(name: str, value: Any) -> None:
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")

    return declare(default, Field(about, "yes, no", parse, lambda value: "yes" if value else "no", check))


def subset(names: tuple[str, ...], about: str) -> Any:
    """Some of the names, sorted and joined by `+`; none by default."""

    def check(name: str, value: Any) -> None:
        for each in value:
            check_choice(name, each, names)
        if tuple(sorted(set(value))) != value:
            raise ValueError(f"{name} must be sorted and free of duplicates, got {value!r}")

    legal = f"any of {', '.join(names)}, joined by +"
    return declare((), Field(about, legal, lambda name, text: tuple(text.split("+")), "+".join, check))


def number_list(
    default: Any, high: int, about: str, *, rising: bool = False, most: int | None = None, word: str = ""
) -> Any:
    """Non-negative integers such as `0..3,7x2`; `rising`: ascending without duplicates. At most `most` of them."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, tuple):
            raise ValueError(f"{name} must be a tuple of integers, got {type(value).__name__}")
        if most is not None and len(value) > most:
            raise ValueError(f"{name} must name at most {most}, got {len(value)}")
        for each in value:
            check_range(name, each, 0, high)
        if rising and any(left >= right for left, right in pairwise(value)):
            raise ValueError(f"{name} must ascend without duplicates, got {format_ids(value)}")

    legal = f"a list such as 0..3,7x2 of integers up to {power(high)}"
    return declare(default, Field(about, legal, named(parse_ids), format_ids, check, word))


def random_seed(about: str) -> Any:
    """A seed, 0 by default."""
    return integer(0, 0, MAX_SEED, about)


# --------------------------------------------------------------------------------------------------------------- parts


def parse_integer(name: str, text: str) -> int:
    """A non-negative integer in ASCII digits."""
    if not text.isascii() or not text.isdigit():
        raise ValueError(f"{name} must be a non-negative integer, got {text!r}")
    return int(text)


def named(parse: Callable[[str], T]) -> Callable[[str, str], T]:
    """A parser whose sentences begin with the name of the field."""

    def parse_named(name: str, text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error

    return parse_named


def check_choice(name: str, value: Any, names: Iterable[Any]) -> None:
    """ValueError unless `value` is one of the names."""
    if value not in names:
        raise ValueError(f"{name} must be one of {', '.join(map(str, names))}, got {value!r}")


def check_range(name: str, value: Any, low: int, high: int) -> None:
    """ValueError unless `value` is an integer from low to high."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def power(number: int) -> str:
    """A number in words: large powers of two as such."""
    for shown, tail in ((number, ""), (number + 1, " - 1")):
        if shown > 1 << 12 and shown & (shown - 1) == 0:
            return f"2^{shown.bit_length() - 1}{tail}"
    return f"{number:,}"


def table(kind: type[CaseString]) -> str:
    """The fields of a case type as a Markdown table, for the documentation."""
    usual = defaults(kind)
    lines = ["| name | default | legal | meaning |", "|---|---|---|---|"]
    for name, field in fields(kind).items():
        value = usual.get(name, ...)
        shown = "required" if value is ... else "as needed" if value is None else field.format(value) or "none"
        legal = field.legal() if callable(field.legal) else field.legal
        lines.append(f"| `{field.word or name}` | {shown} | {legal} | {field.about} |")
    return "\n".join(lines)

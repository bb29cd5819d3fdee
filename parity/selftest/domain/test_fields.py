"""Fields of cases: every operation's table, and each kind of field by itself."""

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from parity.domain.fields import (
    CaseString,
    choice,
    defaults,
    fields,
    flag,
    integer,
    number_list,
    random_seed,
    subset,
    table,
)
from parity.run.operation import BUILTIN, find, parse_case
from parity.selftest.helpers import refusals

PAGED = {
    "lens": ("70,71,3,4", "70,71,3,16777217"),
    "data": ("octaves", "gaussian"),
    "seed": ("9", "4611686018427387905"),
    "perm": ("5", "-1"),
    "alias": ("copied", "maybe"),
    "prefix": ("1", "one"),
    "spare": ("7", "16777217"),
    "width": ("4", "2.5"),
    "max_len": ("99", "70x1"),
    "tail": ("canary", "zero"),
    "poison": ("huge", "zero"),
    "strides": ("lens+table", "table+lens"),
    "clean": ("no", "false"),
    "request_ids": ("4,1", "1048576,0"),
    "row_ids": ("0,1,5,2", "a"),
    "page_ids": ("2,0", "2..1"),
    "only_keys": ("1..3,9", "2,2"),
    "period": ("2", "-2"),
    "base": ("3", "33554432"),
    "offsets": ("lens+table", "lens+lens"),
    "singletons": ("yes", "1"),
}
FIELDS: dict[str, dict[str, tuple[str, str]]] = {
    "paged_logits": PAGED
    | {"layout": ("fp4", "fp3"), "heads": ("8", "7"), "gap": ("32", "24"), "only_heads": ("0,3", "3,0")},
    "topk": PAGED | {"data": ("few", "octaves"), "k": ("3", "0")},
    "store": {
        "ids": ("3,7..9", "4194305"),
        "layout": ("fp8", "int8"),
        "data": ("onehot", "exact"),
        "seed": ("4", "x"),
        "pooled": ("bf16", "fp8"),
        "weight": ("bf16", "f16"),
        "weights": ("ties", "tie"),
        "positions": ("far", "there"),
        "eps_exponent": ("5", "21"),
        "pages": ("3", "1048577"),
        "place": ("order", "first"),
        "perm": ("2", "\uff12"),
        "skip": ("5", "-5"),
        "base": ("3", "33554432"),
        "strides": ("pooled", "pool"),
        "offsets": ("pool+pooled", "pooled+pool"),
        "singletons": ("yes", "1"),
        "gap": ("16", "8"),
        "fill": ("1", "0x1"),
    },
    "compressor": {
        "calls": ("0:5/0:3-1+1:7", "0:5/"),
        "data": ("random", "exactly"),
        "seed": ("4", "4.0"),
        "poison": ("stale", "huge"),
        "perm": ("2", "+2"),
    },
}
"""For every field, by its word in the string: a value that is not its default, and one that is refused."""
CASES = [(op, word) for op in FIELDS for word in FIELDS[op]]
each_field = pytest.mark.parametrize(("op", "word"), CASES, ids=[f"{op}-{word}" for op, word in CASES])


def words_of(kind: type[CaseString]) -> dict[str, str]:
    """The field of every word."""
    return {field.word or name: name for name, field in fields(kind).items()}


def string(op: str, **changes: str) -> str:
    """A case string in which every field has a value that is not its default."""
    words = {word: value for word, (value, _) in FIELDS[op].items()} | changes
    return " ".join(["v2", f"op={op}", *(["next_n=2"] if "lens" in words else []), *map("=".join, words.items())])


def test_every_field_of_every_operation_is_tried():
    assert set(FIELDS) == set(BUILTIN)
    for op, tried in FIELDS.items():
        assert sorted(tried) == sorted(words_of(find(op).case))


@pytest.mark.parametrize("op", FIELDS)
def test_a_case_with_every_field_comes_back(op):
    case = parse_case(string(op))
    assert type(case) is find(op).case and parse_case(str(case)) == case
    assert sorted(str(case).split()) == sorted(string(op).split())
    assert all(getattr(case, name) != default for name, default in defaults(type(case)).items())


@each_field
def test_a_field_parses_what_it_prints(op, word):
    kind = find(op).case
    name = words_of(kind)[word]
    field, value = fields(kind)[name], getattr(parse_case(string(op)), name)
    printed = field.format(value)
    assert printed == FIELDS[op][word][0]
    field.check(name, value)
    if word == "lens":  # flat until next_n is known
        value = tuple(length for request in value for length in request)
    assert field.parse(word, printed) == value


@each_field
def test_a_field_refuses_an_illegal_value_in_a_sentence_that_names_it(op, word):
    with pytest.raises(ValueError) as caught:
        parse_case(string(op, **{word: FIELDS[op][word][1]}))
    message = str(caught.value)
    assert re.match(rf"({word}|{words_of(find(op).case)[word]})\b", message), message
    assert "\n" not in message and len(message) < 200


@each_field
def test_a_field_has_a_line_in_the_table(op, word):
    lines = [line for line in table(find(op).case).splitlines() if line.startswith(f"| `{word}` |")]
    assert len(lines) == 1 and len(re.split(r" \| ", lines[0].strip("| "))) == 4


@dataclass(frozen=True, kw_only=True)
class Tiny(CaseString):
    """One field of every kind."""

    op: ClassVar[str] = "tiny"
    first: ClassVar[tuple[str, ...]] = ("size_of_it",)

    kind: str = choice("a", lambda: ("a", "b"), "which")
    size_of_it: int = integer(..., 0, 1 << 20, "how large: very", multiple=2)
    count: int = integer(8, 1, 64, "how many", among=(8, 64))
    most: int | None = integer(None, 0, (1 << 20) - 1, "how many at most")
    quick: bool = flag(False, "whether it hurries")
    parts: tuple[str, ...] = subset(("x", "y"), "which parts")
    ids: tuple[int, ...] | None = number_list(None, 99, "names", rising=True, most=3, word="names")
    seed: int = random_seed("of all")


def test_a_case_prints_required_fields_first_and_leaves_out_defaults():
    assert str(Tiny(size_of_it=2)) == "v2 op=tiny size_of_it=2"
    case = Tiny(size_of_it=2, kind="b", quick=True, parts=("x", "y"), ids=(1, 2, 3), most=0)
    assert str(case) == "v2 op=tiny size_of_it=2 kind=b most=0 quick=yes parts=x+y names=1..3"
    assert case.size == (len(str(case)),)


def test_the_table_says_default_legal_values_and_meaning():
    assert table(Tiny).splitlines() == [
        "| name | default | legal | meaning |",
        "|---|---|---|---|",
        "| `kind` | a | a, b | which |",
        "| `size_of_it` | required | 0 to 2^20, a multiple of 2 | how large: very |",
        "| `count` | 8 | 8, 64 | how many |",
        "| `most` | as needed | 0 to 2^20 - 1 | how many at most |",
        "| `quick` | no | yes, no | whether it hurries |",
        "| `parts` | none | any of x, y, joined by + | which parts |",
        "| `names` | as needed | a list such as 0..3,7x2 of integers up to 99 | names |",
        "| `seed` | 0 | 0 to 2^62 | of all |",
    ]


test_a_constructor_refuses = refusals(
    {
        "^kind must be one of a, b, got 'c'$": lambda: Tiny(size_of_it=0, kind="c"),
        "^size_of_it must be an integer from 0 to 1048576, got None$": lambda: Tiny(size_of_it=None),  # type: ignore
        "^size_of_it must be an integer from 0 to 1048576, got True$": lambda: Tiny(size_of_it=True),
        "^size_of_it must be a multiple of 2, got 3$": lambda: Tiny(size_of_it=3),
        "^count must be one of 8, 64, got 9$": lambda: Tiny(size_of_it=0, count=9),
        "^quick must be True or False, got 1$": lambda: Tiny(size_of_it=0, quick=1),  # type: ignore[arg-type]
        "^parts must be sorted and free of duplicates": lambda: Tiny(size_of_it=0, parts=("y", "x")),
        "^ids must be a tuple of integers, got list$": lambda: Tiny(size_of_it=0, ids=[1]),  # type: ignore[arg-type]
        "^ids must name at most 3, got 4$": lambda: Tiny(size_of_it=0, ids=(1, 2, 3, 4)),
        "^ids must ascend without duplicates, got 2,1$": lambda: Tiny(size_of_it=0, ids=(2, 1)),
        "^a case of tiny must say how large, size_of_it=..., got none$": lambda: Tiny.parse({}),
        "^quick must be yes or no, got 'on'$": lambda: Tiny.parse({"size_of_it": "0", "quick": "on"}),
        "expected kind, size_of_it, count, most, quick, parts, names, seed, got 'i'": lambda: Tiny.parse({"i": "1"}),
    }
)

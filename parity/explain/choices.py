"""The indexer as a list of choices: each with its published value and its alternatives, and named sets of them.

A configuration gives every choice a value. `published` is DeepSeek's inference code; the other presets say where a
public engine, or the two states of the memory incident that `parity story` tells, depart from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

PUBLISHED_WIDTH = "published"


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice: its values with what each means, the published one first. `number` also admits positive integers.

    `milder` names, for some values, another that costs as many bytes and may lose less.
    """

    name: str
    about: str
    values: dict[str, str]
    number: bool = False
    milder: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def published(self) -> str:
        """The value of DeepSeek's inference code."""
        return next(iter(self.values))

    def check(self, value: str) -> str:
        """The value itself; ValueError naming the choice if it has no such value."""
        if value in self.values or (self.number and value.isdigit() and int(value) > 0):
            return value
        known = ", ".join(self.values) + (" or a positive integer" if self.number else "")
        raise ValueError(f"{self.name}: expected one of {known}, got {value!r}")

    def phrase(self, value: str) -> str:
        """What a value means, in words that fit after "comes from"."""
        return self.values.get(value, f"a top-k width of {value}")


_FP4 = "the fp4 step on {0} (round to the e2m1 grid and back)"


def _fp4(side: str) -> dict[str, str]:
    step = _FP4.format(side)
    return {
        "on": step,
        "off": f"the missing fp4 step on {side}",
        "half-down": f"fp4 ties of {side} rounded toward zero",
    }


def _storage(what: str) -> dict[str, str]:
    return {
        "bf16": f"bf16 {what}",
        "fp8": f"fp8 {what} (scale amax/448)",
        "fp8-pow2": f"fp8 {what} with a power-of-two scale",
        "fp4": f"fp4 {what}",
        "float32": f"float32 {what}",
    }


def _point(what: str, published: str = "bf16") -> dict[str, str]:
    words = {"bf16": f"{what} rounded to bf16", "float32": f"{what} kept in float32"}
    return {published: words.pop(published), **words}


def _inner(side: str) -> dict[str, str]:
    return {
        "published": f"bf16 roundings between the steps of {side}",
        "fused": f"no bf16 rounding between the steps of {side}",
        "last": f"one bf16 rounding of {side}, after the last step",
    }


CHOICES: tuple[Choice, ...] = (
    Choice(
        "projection_q",
        "the query projection wq_b",
        {
            "fp8": "the fp8 query projection",
            "bf16": "the query projection without fp8 activations",
            "float32": "the query projection in float32",
        },
    ),
    Choice("projection_k", "results of wkv and wgate", _point("key projections", "float32")),
    Choice("pooling", "weights, products and sum of the pooling", _point("pooling", "float32")),
    Choice("inner_k", "roundings between pooling, norm, rotary and Hadamard", _inner("k")),
    Choice("inner_q", "roundings between rotary and Hadamard", _inner("q")),
    Choice(
        "rope_position",
        "position of a key's rotation",
        {
            "first": "keys rotated at their first token",
            "last": "keys rotated at their last token (4j + 3)",
            "index": "keys rotated at their own index (j)",
        },
    ),
    Choice("rope_table", "precision of cosines and sines", _point("the rotary table", "float32")),
    Choice(
        "hadamard",
        "which sides are transformed",
        {"both": "the Hadamard transform", "q": "the Hadamard transform on q only", "neither": "no Hadamard transform"},
    ),
    Choice("fp4_q", "fake quantisation of queries", _fp4("q")),
    Choice("fp4_k", "fake quantisation of keys", _fp4("k")),
    Choice("store", "format of stored keys", _storage("key store"), milder={"fp8": "fp8-pow2"}),
    Choice("query", "format of queries as the kernel reads them", _storage("queries"), milder={"fp8": "fp8-pow2"}),
    Choice("head_weights", "scaled head weights", _point("head weights")),
    Choice("dot", "dot of a head", _point("dots")),
    Choice("relu", "ReLU of a dot", {"on": "the ReLU", "off": "the missing ReLU"}),
    Choice("product", "weighted dot", _point("products")),
    Choice("sum", "sum over heads", _point("logits")),
    Choice(
        "tensor_parallel",
        "ranks that add bf16 partial logits",
        {"1": "one rank"} | {n: f"bf16 partial sums of {n} ranks" for n in ("2", "4", "8")},
    ),
    Choice("topk", "keys selected", {PUBLISHED_WIDTH: "the published top-k width"}, number=True),
)
NAMES = tuple(choice.name for choice in CHOICES)
BY_NAME = {choice.name: choice for choice in CHOICES}


class Configuration(Mapping[str, str]):
    """A value for every choice; hashable, immutable, built from the values that differ from the published ones."""

    def __init__(self, values: Mapping[str, str] | None = None) -> None:
        given = dict(values or {})
        for name in given:
            if name not in BY_NAME:
                raise ValueError(f"choice: expected one of {', '.join(NAMES)}, got {name!r}")
        self._values = {c.name: c.check(given.get(c.name, c.published)) for c in CHOICES}
        self._hash = hash(tuple(self._values.values()))

    def __getitem__(self, name: str) -> str:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Configuration) and self._values == other._values

    def __repr__(self) -> str:
        return f"Configuration({self.departures()})"

    def departures(self) -> dict[str, str]:
        """The values that differ from the published ones."""
        return {c.name: self[c.name] for c in CHOICES if self[c.name] != c.published}

    def having(self, **values: str) -> Configuration:
        """The same with some values replaced."""
        return Configuration({**self._values, **values})

    def width(self, published: int) -> int:
        """Number of keys selected, where the published code selects `published`."""
        width = self["topk"]
        return published if width == PUBLISHED_WIDTH else int(width)


_FLOAT_SCORES = {"head_weights": "float32", "dot": "float32", "product": "float32", "sum": "float32"}
_NO_FP4 = {"fp4_q": "off", "fp4_k": "off"}
_FUSED = {"inner_k": "fused", "inner_q": "fused"}

PRESETS: dict[str, tuple[str, Configuration]] = {
    "published": ("DeepSeek's inference code", Configuration()),
    "sglang-fp8": (
        "SGLang 0.5.23, fp8 indexer: no fp4 step, float32 up to the fp8 quantiser, scale amax/448, float32 scores",
        Configuration({**_NO_FP4, **_FUSED, **_FLOAT_SCORES, "store": "fp8", "query": "fp8"}),
    ),
    "sglang-fp4": (
        "SGLang 0.5.23, fp4 indexer: ties toward zero, no inner rounding of keys, float32 scores",
        Configuration(
            {"fp4_q": "half-down", "fp4_k": "half-down", "store": "fp4", "query": "fp4", "inner_k": "fused"}
            | _FLOAT_SCORES
        ),
    ),
    "vllm-fp8": (
        "vLLM, fp8 indexer: no Hadamard, no fp4 step, power-of-two scales, one bf16 rounding after the rotary step",
        Configuration(
            {**_NO_FP4, **_FLOAT_SCORES, "store": "fp8-pow2", "query": "fp8-pow2"}
            | {"hadamard": "neither", "inner_k": "last"}
        ),
    ),
    "transformers-bf16": (
        "transformers 5.23 loaded in bf16: no Hadamard, no fp4 step, bf16 rotary table, projections and pooling",
        Configuration(
            {**_NO_FP4, **_FLOAT_SCORES, "hadamard": "neither", "rope_table": "bf16", "projection_k": "bf16"}
            | {"pooling": "bf16"}
        ),
    ),
    "seed-before": (
        "the server of the incident, before: fp8 keys, 132 bytes per slot",
        Configuration({**_NO_FP4, **_FUSED, **_FLOAT_SCORES, "store": "fp8", "query": "fp8"}),
    ),
    "seed-after": (
        "the same server after the change: bf16 keys, 256 bytes per slot, and bf16 queries",
        Configuration({**_NO_FP4, **_FUSED, **_FLOAT_SCORES}),
    ),
    "unrounded": (
        "nothing rounded after the projections: what the indexer means before any format of its own is chosen",
        Configuration({**_NO_FP4, **_FUSED, **_FLOAT_SCORES, "store": "float32", "query": "float32"}),
    ),
}


DEFAULT_PRESETS = {"bf16": "seed-after", "fp8": "seed-before"}
"""What is explained with a logits function of a layout where no preset is named."""


def preset(name: str) -> Configuration:
    """The configuration of that name; ValueError if there is none."""
    if name not in PRESETS:
        raise ValueError(f"preset: expected one of {', '.join(PRESETS)}, got {name!r}")
    return PRESETS[name][1]


def settings(words: Iterable[str]) -> dict[str, str]:
    """Values from words "choice=value"; ValueError for a word of another form, a choice or a value that is unknown."""
    found = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"choice: expected choice=value, got {word!r}")
        if name not in BY_NAME:
            raise ValueError(f"choice: expected one of {', '.join(NAMES)}, got {name!r}")
        found[name] = BY_NAME[name].check(value)
    return found


def differing(start: Configuration, end: Configuration) -> list[str]:
    """Names of the choices in which two configurations differ, in the order of the pipeline."""
    return [name for name in NAMES if start[name] != end[name]]


def mixed(start: Configuration, end: Configuration, taken: Iterable[str]) -> Configuration:
    """`start` with the values of `end` for the choices named in `taken`."""
    return start.having(**{name: end[name] for name in taken})

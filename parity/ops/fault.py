"""What a fault model is: a small change to one step of a correct implementation, with a name and a public report.

A model is data: `parity.faults.building` makes the faulty function, with a memory of its own, from the staged
implementation of its operation (`parity/ops/<operation>/faults/staged.py`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

KINDS: dict[str, str] = {
    "selection": "selection loses or duplicates members",
    "formula": "a formula step is missing, doubled or on one side",
    "padding": "padding, sentinels and empty work",
    "rows": "which row uses which length, table, stride",
    "stale": "stale or uninitialised memory",
    "precision": "precision and scale rounding",
    "bytes": "writer and reader disagree on bytes",
    "launch": "launch and JIT limits",
    "memory": "memory growth",
    "chunks": "chunked differs from one-shot",
    "integers": "integer width",
    "race": "races",
    "dispatch": "dispatch took another path",
}

Function = Callable[..., Any]


@dataclass(frozen=True)
class Fault:
    """One fault model.

    id         short name, unique in the catalogue
    step       the step of the computation that it spoils, as reports of kernels call it
    kind       one of KINDS
    sentence   what goes wrong, as a bug report would say it
    report     the public report that it mirrors, or "" for a variant that no listed report has
    op         the operation whose calling convention it has
    layout     the layout that it is run on
    change     functions to replace: name -> function (of the operation's Stages)
    wrap       a change of the whole function instead: correct function -> faulty function
    extra      facts that the runner needs: `contract` of a store, `route` of a dispatcher, `compile` for a launch
    equivalent the proof that no input can tell the model from a correct implementation; "" for a real fault
    """

    id: str
    step: str
    kind: str
    sentence: str
    report: str = ""
    _: KW_ONLY
    op: str
    layout: str = "bf16"
    change: Mapping[str, Function] = field(default_factory=dict)
    wrap: Callable[[Function], Function] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    equivalent: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")
        if bool(self.change) == (self.wrap is not None) and not self.extra:
            raise ValueError(f"{self.id}: a model changes steps or wraps the function, got both or neither")

    @property
    def half(self) -> str:
        """A or B, by the name only: the suite may be tuned on A, and its score on B is the fair one."""
        return "AB"[hashlib.sha256(self.id.encode()).digest()[0] & 1]


TEXT = re.compile(
    r"(?P<id>[a-z0-9-]+) \((?P<step>[a-z0-9-]+), (?P<kind>[a-z]+)\): (?P<sentence>.*?[^.])"
    r"( \[(?P<report>[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*)\])?"
)
"""How a model is described: `id (step, kind): sentence [public report, another]`."""


@dataclass(frozen=True)
class Described:
    """A model that lacks what it computes; `by` completes it."""

    models: list[Fault]
    fields: Mapping[str, Any]

    def by(
        self,
        *,
        wrap: Callable[[Function], Function] | None = None,
        extra: Mapping[str, Any] | None = None,
        equivalent: str = "",
        **change: Function,
    ) -> None:
        """Add the model to its list: the functions of its operation's Stages to replace, or another field of Fault."""
        more = {**self.fields["extra"], **(extra or {})}
        self.models.append(Fault(**{**self.fields, "extra": more}, change=change, wrap=wrap, equivalent=equivalent))


def collector(op: str) -> tuple[list[Fault], Callable[..., Described]]:
    """An empty list of an operation's models, and the function that describes the next: `fault(text).by(step=...)`.

    Its keywords are the model's layout, and `contract`, what a correct implementation of it would promise besides.
    """
    models: list[Fault] = []

    def fault(text: str, *, layout: str = "bf16", contract: Mapping[str, Any] | None = None) -> Described:
        found = TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"a model is described as `id (step, kind): sentence [owner/repository#1]`, got {text!r}")
        parts = {name: found[name] or "" for name in ("id", "step", "kind", "sentence", "report")}
        extra = {"contract": dict(contract)} if contract else {}
        return Described(models, {**parts, "op": op, "layout": layout, "extra": extra})

    return models, fault

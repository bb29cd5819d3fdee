"""What an operation is, and which there are: the value that everything outside of `parity/ops/` works with.

Operations are found by name. Those of this package are listed below; any other package adds its own by an entry point
of the group `parity.operations` (name = "module:attribute").
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any

from parity.domain.fields import OLD_VERSION, CaseString, split_words

if TYPE_CHECKING:
    import torch

    from parity.domain.contract import Contract
    from parity.domain.dimensions import Domain
    from parity.run.implementation import Implementation
    from parity.run.runner import Outcome

GROUP = "parity.operations"
DEFAULT = "paged_logits"
BUILTIN: Mapping[str, str] = {
    name: f"parity.ops.{name}:OPERATION" for name in ("paged_logits", "topk", "compressor", "store")
}
OLD_NAMES = {"logits": DEFAULT}


def later(place: str) -> Callable[..., Any]:
    """The function or value at `module:name`, imported when it is first needed: a value is returned by the call."""

    def call(*given: Any, **named: Any) -> Any:
        module, _, name = place.partition(":")
        found = getattr(importlib.import_module(module), name)
        return found(*given, **named) if callable(found) else found

    return call


def _nothing(*_: Any) -> Any:
    return ()


EVERYTHING: Callable[[], Any] = later("parity.domain.dimensions:Domain")
"""The domain of an operation that declares no dimensions."""


@dataclass(frozen=True)
class Operation:
    """What a kernel computes, and all that the framework has to know of it.

    name        as `--op`, contracts and case strings say it
    about       one sentence
    case        type of its cases, a CaseString
    build       (case, device) -> operands: `.case`, `.kwargs()`, `.snapshot()`, `.changed(before)`, `.device`
    arguments   (implementation, operands) -> keyword arguments of the convention
    inspect     (output, operands) -> the sentence that says how a result breaks the convention, or None
    invoke      (function, arguments, operands) -> what is kept of the call
    collect     (what invoke gave, operands) -> the output to judge
    kept        (what invoke gave, operands) -> the tensors of it that must stay as they are, whatever is called later
    equal       (output, output) -> whether a repetition gave the same
    restore     (operands) -> None: puts back what a call may write, before it is repeated
    replay      (implementation, function, wide, narrow, device) -> Outcome of a CUDA graph, or None: never captured
    light       case -> whether a CPU evaluates it about as fast as a GPU launches the steps of it
    layouts     whether its functions read or write pages of a layout, which a contract then must name
    verb        what its functions do with pages, for messages
    arithmetic  contract -> how its functions round, in a phrase, or None where that is no question
    companion   the operation of a second function that shows what the first one hides (the dots of logits)
    reduce      (case, still_fails, budget) -> the smallest case found, or None: fields are set to their defaults
    data        data classes by name, with what each is for

    The rest is imported when it is first needed (`later`): a worker that runs a function judges nothing.

    checks           () -> the checks, in the order of the report
    implementations  (device) -> built-in implementations by name, in the order of the report
    faults           () -> fault models
    staged           (layout, extra, change) -> the correct staged implementation, with steps replaced
    domain           () -> the dimensions of its cases, how far checks go in them, and how a contract narrows them
    """

    name: str
    about: str
    case: type[CaseString]
    build: Callable[[Any, torch.device], Any]
    inspect: Callable[[Any, Any], str | None]
    arguments: Callable[[Implementation, Any], dict[str, Any]] = lambda impl, operands: dict(operands.kwargs())
    invoke: Callable[[Callable[..., Any], dict[str, Any], Any], Any] = lambda function, named, operands: function(
        **named
    )
    collect: Callable[[Any, Any], Any] = lambda given, operands: given
    kept: Callable[[Any, Any], Any] = lambda given, operands: given
    equal: Callable[[Any, Any], bool] | None = None
    restore: Callable[[Any], None] = lambda operands: None
    replay: Callable[..., Outcome] | None = None
    light: Callable[[Any], bool] = lambda case: False
    layouts: bool = False
    verb: str = "reads"
    arithmetic: Callable[[Contract], str | None] = lambda contract: None
    companion: Operation | None = None
    reduce: Callable[..., Any] | None = None
    data: Mapping[str, str] = field(default_factory=dict)
    checks: Callable[[], Sequence[Any]] = _nothing
    implementations: Callable[[torch.device], Mapping[str, Implementation]] = lambda device: {}
    faults: Callable[[], Sequence[Any]] = _nothing
    staged: Callable[..., Callable[..., Any]] | None = None
    domain: Callable[[], Domain] = EVERYTHING
    hooks: Mapping[str, Callable[[], Any]] = field(default_factory=dict)

    def hook(self, name: str) -> Any:
        """What it provides for one room (`golden`, `diagnosis`, ...), imported now; None where it has none."""
        return self.hooks[name]() if name in self.hooks else None


@functools.cache
def _places() -> dict[str, str]:
    found = dict(BUILTIN)
    for point in metadata.entry_points(group=GROUP):
        if found.setdefault(point.name, point.value) != point.value:
            raise ValueError(f"two operations are called {point.name!r}: {found[point.name]} and {point.value}")
    return found


def names() -> tuple[str, ...]:
    """The names of all operations; imports none of them."""
    return tuple(_places())


@functools.cache
def find(name: str) -> Operation:
    """The operation of a name, `NAME.COMPANION` its companion; ValueError lists the names."""
    first, dot, _ = name.partition(".")
    if first not in _places():
        raise ValueError(f"op: expected one of {', '.join(names())}, got {name!r}")
    module, _, attribute = _places()[first].partition(":")
    found: Operation = getattr(importlib.import_module(module), attribute)
    if not dot:
        return found
    assert found.companion is not None and found.companion.name == name
    return found.companion


def all_operations() -> list[Operation]:
    """All operations, imported."""
    return [find(name) for name in names()]


def parse_case(text: str) -> Any:
    """The case that prints as `text`, of whatever operation; ValueError, in one sentence, for what is none.

    Version 1 said `stage=` for `op=`, left it out for logits, and knew fields that some operations have lost."""
    version, words = split_words(text)
    if version == OLD_VERSION:
        name = words.pop("stage", DEFAULT)
        kind = find(OLD_NAMES.get(name, name)).case
        return kind.parse({word: text for word, text in words.items() if word not in kind.retired})
    if "op" not in words:
        raise ValueError(f"a case string must say op=, one of {', '.join(names())}, got none")
    return find(words.pop("op")).case.parse(words)

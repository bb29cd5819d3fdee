"""What is judged: one function under its contract, and what is known of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from parity.domain.contract import Contract
from parity.run import interpreter, memory, operation


@dataclass(frozen=True)
class Implementation:
    """One function under judgement.

    name        what reports call it; for a user's function its spec
    op          name of the operation that it computes; `NAME.COMPANION` for a companion
    layout      name of the page layout, empty where the operation has none
    contract    what it promises
    function    callable by keyword, or None: a worker loads `spec` in its own process
    parameters  names that its signature accepts beyond the convention's (validate, out, schedule_meta)
    spec        "module:function" or "file.py:function" of a user's function, None for a built-in
    kernel      "torch", "triton", "cuda" or "unknown": what is known about how it works, for budgets and sizes of cases
    workspace   bytes that it may allocate besides inputs and result
    route       callable -> (route, failure reason), called after every call, or None
    companion   callable of the operation's companion (the dots of every head), or None; contracts name a user's
    absent      why it cannot run here at all, or None
    arguments   the words that repeat the choice on a command line
    """

    name: str
    op: str
    layout: str
    contract: Contract
    function: Callable[..., Any] | None = None
    parameters: frozenset[str] = frozenset()
    spec: str | None = None
    kernel: str = "unknown"
    workspace: int = memory.WORKSPACE
    route: Callable[[], tuple[str | None, str | None]] | None = None
    companion: Callable[..., Any] | None = None
    absent: str | None = None
    arguments: tuple[str, ...] = ()

    @property
    def operation(self) -> operation.Operation:
        """What it computes."""
        return operation.find(self.op)

    @property
    def short(self) -> str:
        """The name without the folders of a file, for test ids."""
        return self.name.rpartition("/")[2]

    @property
    def arithmetic(self) -> str | None:
        """How it rounds, in a phrase; None where that is no question for its operation."""
        return self.operation.arithmetic(self.contract)

    @property
    def interpreted(self) -> bool:
        """Whether a call costs interpreter time (known for our own kernels only)."""
        return self.kernel == "triton" and interpreter.interpreting()

    def accompanied(self, **changes: Any) -> Implementation:
        """Its companion as an implementation of its own. ValueError where the operation has none."""
        found = self.operation.companion
        if found is None:
            raise ValueError(f"functions of {self.op} have no companion")
        return replace(self, op=found.name, route=None, parameters=frozenset(), **changes)

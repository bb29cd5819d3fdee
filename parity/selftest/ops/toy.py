"""An operation as a package outside of this repository adds it: y = a * x + b on n float32 numbers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from parity.domain.contract import Contract
from parity.domain.fields import CaseString, choice, integer, random_seed
from parity.domain.reducer import descend, reduce_case, try_values
from parity.ops.check import Check, failed_call, labels
from parity.run.implementation import Implementation
from parity.run.operation import Operation
from parity.run.runner import Runner, inspect_tensors
from parity.vocabulary import Status

DATA = {"whole": "small integers, on which every order of rounding is exact", "normal": "normally distributed numbers"}


@dataclass(frozen=True, kw_only=True)
class ToyCase(CaseString):
    op: ClassVar[str] = "toy"
    n: int = integer(..., 0, 1 << 16, "how many numbers")
    data: str = choice("whole", tuple(DATA), "data class")
    seed: int = random_seed("of the numbers")


@dataclass(frozen=True, eq=False)
class ToyOperands:
    case: ToyCase
    x: torch.Tensor
    a: float = 3.0
    b: float = 0.5
    device = property(lambda self: self.x.device)

    def kwargs(self) -> dict[str, Any]:
        return {"x": self.x, "a": self.a, "b": self.b}

    def snapshot(self) -> torch.Tensor:
        return self.x.clone()

    def changed(self, before: torch.Tensor) -> tuple[str, ...]:
        return () if torch.equal(self.x, before) else ("x",)


def build(case: ToyCase, device: torch.device) -> ToyOperands:
    drawn = torch.randn(case.n, generator=torch.Generator().manual_seed(case.seed))
    return ToyOperands(case, (drawn if case.data == "normal" else (8 * drawn).round()).to(device))


def judge(runner: Runner, case: ToyCase, check: str) -> Any:
    """Exact on whole numbers, else within the two roundings of a product and a sum."""
    outcome = runner.run(case)
    if bad := failed_call(runner, check, case, outcome):
        return bad
    given, got, made = outcome.operands, outcome.output.double(), labels(runner, check, case)
    wanted = given.a * given.x.double() + given.b
    bound = 2.0**-23 * ((given.a * given.x).abs() + abs(given.b)).double() * (case.data == "normal")
    wrong = (~((got - wanted).abs() <= bound)).nonzero()
    if not len(wrong):
        return made.verdict(Status.PASSED, cells=case.n)
    i = int(wrong[0])
    numbers = {"got": float(got[i]), "wanted": float(wanted[i]), "bound": float(bound[i])}
    return made.failed(note=f"number {i} of {case.n}", cells=case.n, **numbers)


def check(level: str, data: str) -> Check:
    drawn = st.builds(ToyCase, n=st.integers(0, 200), data=st.just(data), seed=st.integers(0, 1 << 16))
    judged = partial(judge, check=f"{level}/{data}")
    return Check(level, data, lambda impl, profile, device: drawn, judged, accepts=lambda case: case.data == data)


def reduce(case: ToyCase, fails: Callable[[ToyCase], bool], budget: int) -> ToyCase:
    def passes(search: Any) -> None:
        descend(search.case.n, lambda n: search.accept(replace(search.case, n=n), "n"))
        try_values(search, [("seed", (0,))])

    return reduce_case(case, fails, budget, passes=[passes])


CHECKS = [check("layout", "whole"), check("rounding", "normal")]
OPERATION = Operation(
    name="toy",
    about="a number times another plus a third",
    case=ToyCase,
    build=build,
    inspect=lambda y, given: inspect_tensors([("y", y, torch.float32, (given.case.n,))], given.device),
    reduce=reduce,
    data=DATA,
    checks=lambda: CHECKS,
    implementations=lambda device: {
        "toy-torch": Implementation("toy-torch", "toy", "", Contract(op="toy"), lambda x, a, b: a * x + b)
    },
)

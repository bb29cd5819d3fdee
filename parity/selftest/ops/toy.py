"""An operation as a package outside of this repository adds it: y = a * x + b on n float32 numbers."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st

from parity.domain.contract import Contract
from parity.domain.fields import CaseString, integer, random_seed
from parity.domain.reducer import descend, reduce_case
from parity.ops.check import Check, failed_call, labels
from parity.run.implementation import Implementation
from parity.run.operation import Operation
from parity.run.runner import inspect_tensors
from parity.vocabulary import Status


@dataclass(frozen=True, kw_only=True)
class ToyCase(CaseString):
    op: ClassVar[str] = "toy"
    n: int = integer(..., 0, 1 << 16, "how many numbers")
    seed: int = random_seed("of the numbers")


@dataclass(frozen=True, eq=False)
class ToyOperands:
    case: ToyCase
    x: torch.Tensor
    device = property(lambda self: self.x.device)

    def kwargs(self) -> dict[str, Any]:
        return {"x": self.x, "a": 3.0, "b": 0.5}

    def snapshot(self) -> torch.Tensor:
        return self.x.clone()

    def changed(self, before: torch.Tensor) -> tuple[str, ...]:
        return () if torch.equal(self.x, before) else ("x",)


def build(case: ToyCase, device: torch.device) -> ToyOperands:
    """Whole numbers, on which both roundings are exact."""
    drawn = 8 * torch.randn(case.n, generator=torch.Generator().manual_seed(case.seed))
    return ToyOperands(case, drawn.round().to(device))


def judge(runner: Any, case: ToyCase) -> Any:
    outcome, made = runner.run(case), labels(runner, "layout/whole", case)
    if bad := failed_call(runner, "layout/whole", case, outcome):
        return bad
    got, wanted = outcome.output, 3.0 * outcome.operands.x + 0.5
    for i in (got != wanted).nonzero().flatten().tolist():
        return made.failed(got=float(got[i]), wanted=float(wanted[i]), note=f"number {i} of {case.n}", cells=case.n)
    return made.verdict(Status.PASSED, cells=case.n)


def shorter(search: Any) -> None:
    descend(search.case.n, lambda n: search.accept(replace(search.case, n=n), "n"))


DRAWN = st.builds(ToyCase, n=st.integers(0, 200), seed=st.integers(0, 1 << 16))
OPERATION = Operation(
    name="toy",
    about="a number times another plus a third",
    case=ToyCase,
    build=build,
    inspect=lambda y, given: inspect_tensors([("y", y, torch.float32, (given.case.n,))], given.device),
    reduce=lambda case, fails, budget: reduce_case(case, fails, budget, passes=[shorter]),
    checks=lambda: [Check("layout", "whole", lambda impl, profile, device: DRAWN, judge)],
    implementations=lambda device: {
        "toy-torch": Implementation("toy-torch", "toy", "", Contract(op="toy"), lambda x, a, b: a * x + b)
    },
)

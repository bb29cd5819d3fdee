"""Level invariance of paged logits."""

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import named
from parity.ops.paged_logits import shapes
from parity.ops.paged_logits.case import STRIDES, Case
from parity.ops.paged_logits.checks.layout import EXACT, judge_output
from parity.ops.paged_logits.judge import compare_bits
from parity.ops.shared import metamorphic
from parity.ops.shared.invariance import Paged
from parity.results import Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

DATA = ("octaves", "exact", "near_ties", "outliers", "nonfinite")


def same_cells(
    runner: Runner, check: str, case: Case, first: Outcome, other: Outcome, rows: tuple[int, ...], what: str
) -> Verdict:
    """The visible cells of rows of two results, bit for bit."""
    return compare_bits(
        other.output,
        first.output,
        other.operands,
        rows=torch.arange(len(rows)),
        other_rows=torch.tensor(rows, dtype=torch.int64),
        **named(runner, check),
    )


def _drawn(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    data = tuple(name for name in DATA if not (name == "nonfinite" and impl.contract.nonfinite == "unspecified"))
    return shapes.drawn(impl, profile, device, data)


def _company(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """At least two rows: something to leave out."""
    return shapes.drawn(impl, profile, device, DATA[:-1], min_rows=2)


CHECKS = Paged(
    strides=STRIDES,
    exact=lambda case: case.data in EXACT,
    judge=judge_output,
    agree=same_cells,
    complete=lambda case: case.clean,  # else cells past a length are unspecified
    moves_pages=(
        metamorphic.permute_pages,
        metamorphic.copy_pages,
        metamorphic.more_pages,
        metamorphic.other_gap,
        metamorphic.permute_pages,
        metamorphic.alias_pages,
    ),
    drawn=_drawn,
    company=_company,
).checks()

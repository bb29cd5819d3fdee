"""Level invariance of paged logits."""

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import named
from parity.ops.paged_logits import shapes
from parity.ops.paged_logits.case import STRIDES, Case
from parity.ops.paged_logits.checks.layout import EXACT, judge_output
from parity.ops.paged_logits.judge import compare_bits
from parity.ops.shared import metamorphic
from parity.ops.shared.history import History, brief, paged_relatives
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


def _bases(impl: Implementation) -> list[Case]:
    """Rows of one page and a bit where a call is interpreted, elsewhere of up to three."""
    heads = shapes.heads_of(impl)
    common: dict[str, Any] = {"layout": impl.layout}
    if impl.interpreted:
        return [Case(lengths=((65,), (3,)), heads=heads[0], data="exact_wide", seed=4, strides=("out",), **common)]
    views = ("out", "q", "table", "weights")
    return [
        Case(
            lengths=((130, 70), (5, 64)), heads=heads[0], data="exact_wide", seed=4, perm=5, strides=("out",), **common
        ),
        Case(lengths=((65,),), heads=heads[-1], data="octaves", seed=7, **common),
        Case(lengths=((200,), (1,), (64,)), heads=heads[-1], seed=8, perm=2, strides=views, clean=False, **common),
    ]


def _relatives(impl: Implementation, case: Case) -> list[Case]:
    largest, smallest, *others = paged_relatives(replace(case, only_heads=None))
    counts = (heads for heads in sorted(set(shapes.heads_of(impl)), reverse=True) if heads != case.heads)
    return [largest, smallest, *(replace(case, heads=heads, only_heads=None) for heads in counts), *others]


PAIRS = Paged(
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
CHECKS = [*PAIRS, *History(bases=_bases, relatives=_relatives, judge=judge_output, accepts=brief).checks()]

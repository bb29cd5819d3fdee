"""Level resources of paged logits: what every operation over a block table is held to, pages beyond 2^32 bytes, and
compiled variants."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, named, verdict
from parity.ops.paged_logits import shapes
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.checks.layout import EXACT, judge_exact, judge_output
from parity.ops.paged_logits.judge import compare_bits
from parity.ops.shared.resources import Paged, always
from parity.ops.shared.strategies import SEEDS
from parity.pages.layout import PAGE, find
from parity.results import Status, Verdict
from parity.run import interpreter, memory
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

WIDTHS = 50
MOST_VARIANTS = 8
"""Kernels that may be compiled for widths only: two arguments, each divisible by 16 or not and equal to 1 or not."""


def _gather(case: Case) -> str:
    gather = memory.gather_bytes(case.rows, case.table_width, case.page_bytes)
    return f" (a gather of every row's pages would take {gather})"


def judge_widths(runner: Runner, case: Case) -> Verdict:
    """One case at 50 widths of table and result: a bounded number of compiled kernels, and the same bits."""
    check = "resources/widths"
    seen: set[str] = set()
    first: Outcome | None = None
    for step in range(WIDTHS):
        wider = replace(case, width=case.pages + 1 + step, max_len=case.longest + 1 + 7 * step)
        outcome = runner.run(wider)
        bad = failed_call(runner, check, wider, outcome)
        if bad is not None:
            return bad
        seen |= set(outcome.variants)
        if first is None:
            first = outcome
        elif runner.impl.contract.batch_invariant or case.data in EXACT:
            found = compare_bits(outcome.output, first.output, outcome.operands, **named(runner, check))
            if found.status is not Status.PASSED:
                return found
        if len(seen) > MOST_VARIANTS:
            text = (
                f"{len(seen)} kernels compiled for {step + 1} widths of one shape, at most {MOST_VARIANTS} are allowed"
            )
            return verdict(runner, check, case, Status.FAILED, text, got=len(seen), wanted=MOST_VARIANTS)
    return verdict(runner, check, case, Status.PASSED, cells=WIDTHS)


# ------------------------------------------------------------------------------------------------------ what is drawn


def _memory(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Shapes at which a gather of every row's pages, or the scores of all heads, are far beyond the budget: small ones
    where nothing is allowed."""
    heads = shapes.heads_of(impl)[0]
    if impl.workspace == 0:
        return st.builds(
            lambda rows, length, next_n, seed: _rows(impl, rows, length, next_n, heads, seed),
            st.integers(2, 64),
            st.integers(1, 4096),
            st.sampled_from((1, 2, 4)),
            st.integers(0, SEEDS),
        )
    sizes = [(256, 12_288)] + ([(256, 32_768), (4096, 344 * PAGE)] if device.type == "cuda" else [])
    found = [_rows(impl, rows, length, 1, heads, 1) for rows, length in sizes]
    # With all heads, so that scores [rows, heads, keys] in float32 take 302 MB, more than the default workspace.
    found.append(_rows(impl, 96, 12_288, 1, shapes.heads_of(impl)[-1], 1))
    # Few keys in a pool that alone passes the budget.
    pages = (impl.workspace + (64 << 20)) // find(impl.layout).page_bytes
    found.append(replace(_rows(impl, 2, 130, 1, heads, 1), base=pages))
    return st.sampled_from(found)


def _rows(impl: Implementation, rows: int, length: int, next_n: int, heads: int, seed: int) -> Case:
    pages = -(-length // PAGE)
    return Case(
        lengths=((length,) * next_n,) * rows, layout=impl.layout, heads=heads, prefix=pages, data="exact", seed=seed
    )


def _fields(draw: st.DrawFn, impl: Implementation) -> Mapping[str, Any]:
    heads = draw(st.sampled_from(shapes.heads_of(impl)))
    return {"layout": impl.layout, "data": "exact", "heads": heads}


def _far(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Pools with pages past 2^32 bytes."""
    return shapes.small(impl, profile, EXACT, big=True, min_length=1, max_rows=2, max_pages=2, wide=False)


def _fixed(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    heads = shapes.heads_of(impl)[-1]
    return st.just(Case(lengths=((130, 70), (5, 64)), layout=impl.layout, heads=heads, data="exact", seed=3, perm=5))


def _replayed(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    return shapes.small(
        impl, profile, ("exact", "octaves"), min_length=1, sharing=False, wide=False, max_rows=6, strides=()
    )


def _no_variants(impl: Implementation, device: torch.device) -> str | None:
    if device.type != "cuda" or interpreter.interpreting():
        return "kernels are compiled on a CUDA device only"
    return None


PAGED = Paged(
    case=Case,
    judge=judge_output,
    result=lambda case: memory.result_bytes(case.rows, case.max_context_len),
    explain=_gather,
    memory=_memory,
    fields=_fields,
    many=lambda impl: {"layout": impl.layout, "data": "exact", "heads": shapes.heads_of(impl)[0]},
    replayed=_replayed,
    dry=True,
)
*FIRST, GRAPH = PAGED.checks()
CHECKS = [
    *FIRST,
    Check(
        "resources",
        "far_pages",
        _far,
        lambda runner, case: judge_exact(runner, case, "resources/far_pages"),
        1.0,
        lambda case: case.data in EXACT,
    ),
    Check("resources", "widths", _fixed, judge_widths, needs=_no_variants, shrinks=False, listed=always),
    GRAPH,
]

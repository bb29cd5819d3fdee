"""Level resources: memory against a formula of the shape, empty and enormous batches, far pages, compiled variants,
CUDA graphs."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, complaint, named, verdict
from parity.ops.paged_logits.case import POISONS, TAILS, Case
from parity.ops.paged_logits.checks.layout import EXACT, judge_exact, judge_output
from parity.ops.paged_logits.checks.selection import judge_chosen
from parity.ops.paged_logits.judge import compare_bits
from parity.ops.paged_logits.strategies import SEEDS, topk_cases
from parity.ops.shared import shapes
from parity.pages.layout import PAGE, find
from parity.results import Status, Verdict
from parity.run import interpreter, memory
from parity.run.registry import Implementation
from parity.run.runner import Outcome, Runner

SLACK = {"cpu": 64 << 10, "cuda": 4 << 20}
"""Beside the formula: small tables of a call; on CUDA also the allocator's rounding of each tensor to 2 MiB."""

WIDTHS = 50
MOST_VARIANTS = 8
"""Kernels that widths alone may compile: two arguments, each divisible by 16 or not and equal to 1 or not."""

MANY = (65_535, 65_536)


def budget(impl: Implementation, case: Case, device: torch.device) -> int:
    """Bytes that a call may allocate beyond its inputs: the result, the declared workspace, and the slack."""
    if case.stage == "topk":
        return impl.workspace + SLACK[device.type] + 2 * 4 * case.rows * case.k
    return impl.workspace + SLACK[device.type] + memory.result_bytes(case.rows, case.max_context_len)


def judge_memory(runner: Runner, case: Case) -> Verdict:
    """Peak bytes of the call against `budget`; interpreted kernels are launched without running their programs."""
    check = "resources/memory"
    outcome = runner.run(case, measure=True, dry=True)
    bad = complaint(runner, check, case, outcome) or _launch(runner, check, case, outcome)
    if bad is not None:
        return bad
    allowed, peak = budget(runner.impl, case, runner.device), outcome.peak_bytes or 0
    if peak <= allowed:
        return verdict(runner, check, case, Status.PASSED, cells=1)
    text = f"peak of {peak} bytes beyond the inputs, allowed {allowed}"
    if case.stage == "logits":
        gather = memory.gather_bytes(case.rows, case.table_width, find(case.layout).page_bytes)
        text += f" (a gather of every row's pages would take {gather})"
    if outcome.peak_note:
        text += f"; the largest tensor: {outcome.peak_note}"
    return verdict(runner, check, case, Status.FAILED, text, got=peak, wanted=allowed)


def _launch(runner: Runner, check: str, case: Case, outcome: Outcome) -> Verdict | None:
    if outcome.excess is None:
        return None
    return verdict(runner, check, case, Status.FAILED, f"launch: {outcome.excess}")


def judge_plain(runner: Runner, case: Case, check: str) -> Verdict:
    """Right values at an unusual size, and a launch that devices accept."""
    if case.stage == "topk":
        return _judge_topk(runner, case, check)
    # 65,536 programs are beyond an interpreter: there the launch alone is judged, elsewhere its result.
    dry = case.rows > 4096 and interpreter.interpreting()
    outcome = runner.run(case, dry=dry)
    bad = complaint(runner, check, case, outcome) or _launch(runner, check, case, outcome)
    if bad is not None:
        return bad
    if dry and outcome.launches:
        return verdict(runner, check, case, Status.PASSED, cells=1)
    found = judge_output(runner, case, check, outcome)
    # An empty result is an answer too: the call came back with the right shape.
    return found if found.cells or found.status is not Status.PASSED else replace(found, cells=1)


def _judge_topk(runner: Runner, case: Case, check: str) -> Verdict:
    outcome = runner.run(case)
    bad = complaint(runner, check, case, outcome)
    if bad is not None:
        return bad
    found = judge_chosen(runner, case, check, outcome)
    return found if found.cells or found.status is not Status.PASSED else replace(found, cells=1)


def judge_widths(runner: Runner, case: Case) -> Verdict:
    """One case at 50 widths of table and result: a bounded number of compiled kernels, and the same bits."""
    check = "resources/widths"
    seen: set[str] = set()
    first: Outcome | None = None
    for step in range(WIDTHS):
        wider = replace(case, width=case.pages + 1 + step, max_len=case.longest + 1 + 7 * step)
        outcome = runner.run(wider)
        bad = complaint(runner, check, wider, outcome)
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


def judge_graph(runner: Runner, case: Case) -> Verdict:
    """A graph captured on the case's full lengths and replayed on short ones gives what an eager call gives."""
    check = "resources/graph"
    short = tuple(tuple(length // (2 + b) for length in row) for b, row in enumerate(case.lengths))
    # The same sizes of every operand: width, result and pool are those of the long case.
    wide = replace(case, width=case.table_width, max_len=case.max_context_len)
    spare = case.spare + sum(-(-max(row) // PAGE) for row in case.lengths)
    narrow = replace(wide, lengths=short, alias="copied")
    narrow = replace(narrow, spare=spare - sum(-(-max(row) // PAGE) for row in short))
    outcome = runner.replay(replace(wide, alias="copied"), narrow)
    bad = complaint(runner, check, case, outcome)
    if bad is not None:
        return bad
    if case.stage == "logits":
        return judge_output(runner, narrow, check, outcome)
    return judge_chosen(runner, narrow, check, outcome)


# ------------------------------------------------------------------------------------------------------ what is drawn

Strategy = Callable[[Implementation, Profile, torch.device], st.SearchStrategy[Case]]


def _memory(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Shapes at which a gather of every row's pages, or the scores of all heads, are far beyond the budget: small ones
    where nothing is allowed."""
    if impl.stage == "topk":
        return st.builds(
            lambda rows, length, seed: _scores(rows, length, seed), st.just(64), st.just(1 << 14), st.integers(0, 1)
        )
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
    return st.sampled_from([*found, _rows(impl, 96, 12_288, 1, shapes.heads_of(impl)[-1], 1)])


def _rows(impl: Implementation, rows: int, length: int, next_n: int, heads: int, seed: int) -> Case:
    pages = -(-length // PAGE)
    return Case(
        lengths=((length,) * next_n,) * rows, layout=impl.layout, heads=heads, prefix=pages, data="exact", seed=seed
    )


def _scores(rows: int, length: int, seed: int) -> Case:
    return Case(lengths=((length,),) * rows, stage="topk", k=512, data="random", seed=seed, prefix=-(-length // PAGE))


def _empty(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """No rows at all, rows without keys, and at most one row with some."""

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        requests = draw(st.sampled_from((0, 1, 2, 5) if impl.interpreted else (0, 1, 2, 7, 32)))
        next_n = draw(st.integers(1, 3)) if requests else 1
        lengths = [[0] * next_n for _ in range(requests)]
        if requests and draw(st.booleans()):
            lengths[draw(st.integers(0, requests - 1))][-1] = draw(st.sampled_from((1, 64, 65)))
        longest = max((n for row in lengths for n in row), default=0)
        options: dict[str, Any] = {"k": draw(st.sampled_from((1, 64, 512)))} if impl.stage == "topk" else {}
        if impl.stage == "logits":
            options |= {"heads": draw(st.sampled_from(shapes.heads_of(impl)))}
        return Case(
            lengths=tuple(map(tuple, lengths)),
            stage=impl.stage,
            layout=impl.layout,
            data="exact" if impl.stage == "logits" else "random",
            seed=draw(st.integers(0, SEEDS)),
            width=max(1, -(-longest // PAGE)) + draw(st.integers(0, 3)),
            max_len=max(1, longest) + draw(st.integers(0, 100)),
            tail=draw(st.sampled_from(TAILS)),
            poison=draw(st.sampled_from(POISONS)),
            **options,
        )

    return cases()


def _many(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """65,535 and 65,536 rows, as requests of one row each and as one request, of at most two keys."""
    options: dict[str, Any] = {"k": 2} if impl.stage == "topk" else {"heads": shapes.heads_of(impl)[0]}
    data = "exact" if impl.stage == "logits" else "random"
    found = []
    for rows in MANY:
        common: dict[str, Any] = {
            "stage": impl.stage,
            "layout": impl.layout,
            "data": data,
            "prefix": 1,
            "max_len": 2,
            "seed": rows,
        }
        expanded = tuple((row % 3,) for row in range(rows))
        names = (0,) * rows
        found.append(Case(lengths=expanded, request_ids=names, row_ids=tuple(range(rows)), **common, **options))
        found.append(Case(lengths=((0,) + (1,) * (rows - 2) + (2,),), **common, **options))
    return st.sampled_from(found if device.type == "cuda" else found[-1:])


def _far(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Pools with pages past 2^32 bytes."""
    return shapes.small(impl, profile, EXACT, big=True, min_length=1, max_rows=2, max_pages=2, wide=False)


def _fixed(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    heads = shapes.heads_of(impl)[-1]
    return st.just(Case(lengths=((130, 70), (5, 64)), layout=impl.layout, heads=heads, data="exact", seed=3, perm=5))


def _replayed(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    if impl.stage == "topk":
        return topk_cases(ks=(64, 512), max_length=2000).filter(lambda case: case.longest > 0)
    return shapes.small(
        impl, profile, ("exact", "octaves"), min_length=1, sharing=False, wide=False, max_rows=6, strides=()
    )


def _no_variants(impl: Implementation, device: torch.device) -> str | None:
    if device.type != "cuda" or interpreter.interpreting():
        return "kernels are compiled on a CUDA device alone"
    return None


def _no_graph(impl: Implementation, device: torch.device) -> str | None:
    return None if device.type == "cuda" else "CUDA graphs need a CUDA device"


def _plain(name: str) -> Callable[[Runner, Case], Verdict]:
    return lambda runner, case: judge_plain(runner, case, f"resources/{name}")


BOTH = ("logits", "topk")


def always(impl: Implementation) -> bool:
    """Listed whatever the implementation."""
    return True


CHECKS = [
    Check(
        "resources", "memory", BOTH, _memory, judge_memory, 3.0, shrinks=False, listed=lambda impl: bool(impl.workspace)
    ),
    Check("resources", "empty", BOTH, _empty, _plain("empty"), 3.0, lambda case: case.longest <= 65),
    Check(
        "resources",
        "many_rows",
        BOTH,
        _many,
        _plain("many_rows"),
        accepts=lambda case: case.rows >= 4096,
        shrinks=False,
        listed=always,
    ),
    Check(
        "resources",
        "far_pages",
        ("logits",),
        _far,
        lambda runner, case: judge_exact(runner, case, "resources/far_pages"),
        1.0,
        lambda case: case.data in EXACT,
    ),
    Check("resources", "widths", ("logits",), _fixed, judge_widths, needs=_no_variants, shrinks=False, listed=always),
    Check("resources", "graph", BOTH, _replayed, judge_graph, 0.5, needs=_no_graph),
]

"""Level invariance: the same result when it must not change, judged on pairs of cases with the same logical values.

Run again, move or copy pages, change what may not be read: the same bits on all data. Other rows in the batch, another
width of table or result: the same bits on exact data, and on all data where the contract says `batch_invariant`;
otherwise both results stay within the bound.
"""

from collections.abc import Callable

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.ops.check import Check, complaint, named, verdict
from parity.ops.paged_logits.case import STRIDES, Case
from parity.ops.paged_logits.checks.layout import EXACT, judge_output
from parity.ops.paged_logits.checks.selection import judge_chosen
from parity.ops.paged_logits.judge import compare_bits
from parity.ops.paged_logits.strategies import topk_cases
from parity.ops.shared import metamorphic, shapes
from parity.ops.shared.metamorphic import Pair
from parity.results import Status, Verdict
from parity.run.registry import Implementation
from parity.run.runner import Outcome, Runner

DATA = ("octaves", "exact", "near_ties", "outliers", "nonfinite")
REPEATS = {"cpu": 2, "cuda": 20}

Transform = Callable[[Case], Pair]


def _seeded(transforms: tuple[Transform, ...]) -> Transform:
    """One of the transforms, by the case's seed, so that the case string names the pair."""
    return lambda case: transforms[case.seed % len(transforms)](case)


def _keep_half(case: Case) -> Pair:
    if case.requests < 2:
        return metamorphic.keep_columns(case, range(case.next_n - 1, -1, -1))
    return metamorphic.keep_requests(case, range(case.requests - 1, -1, -2))


def _keep_last(case: Case) -> Pair:
    return metamorphic.keep_rows(case, [case.rows - 1])


PAIRS: dict[str, tuple[Transform, bool]] = {
    "pages": (
        _seeded(
            (metamorphic.permute_pages, metamorphic.copy_pages, metamorphic.more_pages, metamorphic.other_gap)
            + (metamorphic.permute_pages, metamorphic.alias_pages)
        ),
        True,
    ),
    "poison": (_seeded((metamorphic.other_poison, metamorphic.other_tail)), True),
    "rows": (_seeded((metamorphic.permute_requests, _keep_half, _keep_last, metamorphic.expand_rows)), False),
    "width": (_seeded((metamorphic.widen_table, metamorphic.other_max_len)), False),
}
"""Name: (transform, whether the bits must agree on all data)."""


def _strided(case: Case) -> Pair:
    names = tuple(n for n in STRIDES[case.stage] if n not in case.strides)
    return metamorphic.other_strides(case, names or ())


PAIRS["strides"] = (_strided, True)


def bits_must_agree(runner: Runner, case: Case, always: bool) -> bool:
    """Whether a pair's results must be the same bits for this implementation on this data."""
    return always or case.data in EXACT or runner.impl.contract.batch_invariant


def judge_repeat(runner: Runner, case: Case) -> Verdict:
    """The same operands again and again: the same bits every time."""
    check = "invariance/repeat"
    outcome = runner.run(case, repeats=REPEATS[runner.device.type])
    bad = complaint(runner, check, case, outcome)
    if bad is not None:
        return bad
    if outcome.differing is None:
        cells = sum(length for request in case.lengths for length in request)
        return verdict(runner, check, case, Status.PASSED, cells=cells)
    run, again = outcome.differing
    if runner.impl.stage == "topk":
        return _same_sets(runner, check, case, outcome, again, tuple(range(case.rows)), f"run {run + 1}")
    if tuple(again.shape) != tuple(outcome.output.shape):
        return verdict(runner, check, case, Status.FAILED, f"run {run + 1} returned shape {list(again.shape)}")
    found = compare_bits(again, outcome.output, outcome.operands, **named(runner, check))
    if found.status is Status.FAILED or not case.clean:
        return found  # cells past a length are nobody's without clean_logits
    return verdict(runner, check, case, Status.FAILED, f"run {run + 1} differs from the first past a context length")


def judge_pair(runner: Runner, case: Case, check: str, transform: Transform, always: bool) -> Verdict:
    """The case and its transform: bitwise where that is promised, else the transform's result within the bound."""
    pair = transform(case)
    second = runner.run(pair.case)
    bad = complaint(runner, check, pair.case, second)
    if bad is not None:
        return _of_pair(bad, case, pair)
    if not bits_must_agree(runner, case, always):
        judge = judge_chosen if runner.impl.stage == "topk" else judge_output
        return _of_pair(judge(runner, pair.case, check, second), case, pair)
    first = runner.run(case)
    bad = complaint(runner, check, case, first)
    if bad is not None:
        return bad
    if runner.impl.stage == "topk":
        return _same_sets(runner, check, case, first, second.output, pair.rows, str(pair.case))
    found = compare_bits(
        second.output,
        first.output,
        second.operands,
        rows=torch.arange(len(pair.rows)),
        other_rows=torch.tensor(pair.rows, dtype=torch.int64),
        **named(runner, check),
    )
    return _of_pair(found, case, pair)


def _of_pair(found: Verdict, case: Case, pair: Pair) -> Verdict:
    """The same finding, named after the case that both were derived from."""
    from dataclasses import replace

    if found.status is Status.PASSED:
        return found
    text = found.message.replace(str(pair.case), str(case))
    return replace(
        found,
        case=str(case),
        repro=found.repro.replace(str(pair.case), str(case)),
        message=f"{text}; against the same values as {pair.case}",
    )


def _same_sets(
    runner: Runner, check: str, case: Case, first: Outcome, other: object, rows: tuple[int, ...], what: str
) -> Verdict:
    """Top-k: the same positions in each row; their order is free."""
    assert isinstance(other, tuple | list)
    mine = first.output[1][list(rows)].sort(dim=1).values
    theirs = other[1].to(mine.device).sort(dim=1).values
    differing = (mine != theirs).any(dim=1)
    if not bool(differing.any()):
        return verdict(runner, check, case, Status.PASSED, cells=int((mine >= 0).sum()))
    row = int(differing.to(torch.uint8).argmax())
    lost = sorted(set(mine[row].tolist()) - set(theirs[row].tolist()))[:4]
    return verdict(
        runner, check, case, Status.FAILED, f"row {rows[row]}: positions {lost} are chosen once and not by {what}"
    )


def _drawn(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    if impl.stage == "topk":
        return topk_cases(max_length=1500, ks=(1, 64, 512))
    data = tuple(name for name in DATA if not (name == "nonfinite" and impl.contract.nonfinite == "unspecified"))
    return shapes.drawn(impl, profile, device, data)


def _companions(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """At least two rows: something to leave out."""
    if impl.stage == "topk":
        return _drawn(impl, profile, device).filter(lambda case: case.rows > 1)
    return shapes.drawn(impl, profile, device, DATA[:-1], min_rows=2)


def _pair_check(name: str, transform: Transform, always: bool) -> Check:
    return Check(
        "invariance",
        name,
        ("logits", "topk"),
        _companions if name == "rows" else _drawn,
        lambda runner, case: judge_pair(runner, case, f"invariance/{name}", transform, always),
        2.0 if name in ("pages", "rows") else 1.0,
        (lambda case: case.rows > 0) if name == "rows" else (lambda case: True),
    )


CHECKS = [
    Check("invariance", "repeat", ("logits", "topk"), _drawn, judge_repeat, 1.0),
    *(_pair_check(name, transform, always) for name, (transform, always) in PAIRS.items()),
]

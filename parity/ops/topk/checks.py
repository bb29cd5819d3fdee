"""The checks of top-k functions.

selection   the chosen slots are a correct top-k of the given scores, and their block table's image; ties are free
invariance  the same positions when pages, poison, company, width or strides change, or the call is repeated
resources   memory, empty and enormous batches, CUDA graphs
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.dimensions import mostly
from parity.domain.profiles import Profile
from parity.numerics.selection import judge_selection
from parity.ops.check import Check, failed_call, named, verdict
from parity.ops.paged_logits.shapes import FAR_EVERY, REAL_EVERY
from parity.ops.shared import history, invariance, metamorphic, resources
from parity.ops.shared.domain import LONGEST, stretched
from parity.ops.topk.case import STRIDES, TopkCase
from parity.ops.topk.domain import AXES, borders, reach
from parity.ops.topk.strategies import topk_cases
from parity.pages.layout import PAGE
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner


def judge_chosen(runner: Runner, case: TopkCase, check: str, outcome: Outcome) -> Verdict:
    """The result of a top-k function against the logits that it was given, bound zero."""
    operands, (slots, positions) = outcome.operands, outcome.output
    scores = operands.logits.to(torch.float64)
    return judge_selection(
        *(slots, positions, scores, scores, operands.context_lens, operands.block_table, case.k),
        case=case,
        **named(runner, check),
    )


def judge_synthetic(runner: Runner, case: TopkCase, check: str = "selection/synthetic") -> Verdict:
    """A top-k function on synthetic logits: a correct top-k of just those numbers, and their block table's image."""
    outcome = runner.run(case)
    return failed_call(runner, check, case, outcome) or judge_chosen(runner, case, check, outcome)


def same_sets(
    runner: Runner, check: str, case: TopkCase, first: Outcome, other: Outcome, rows: tuple[int, ...], what: str
) -> Verdict:
    """The same positions in each row; their order is free."""
    mine = first.output[1][list(rows)].sort(dim=1).values
    theirs = other.output[1].to(mine.device).sort(dim=1).values
    if runner.impl.contract.ties == "any":  # then the same scores, wherever they stand
        logits = first.operands.logits[list(rows)].to(mine.device)
        mine, theirs = (_scores(logits, positions) for positions in (mine, theirs))
    differing = (mine != theirs).any(dim=1)
    if not bool(differing.any()):
        return verdict(runner, check, case, Status.PASSED, cells=int((mine >= 0).sum()))
    row = int(differing.to(torch.uint8).argmax())
    lost = sorted(set(mine[row].tolist()) - set(theirs[row].tolist()))[:4]
    kind = "scores" if runner.impl.contract.ties == "any" else "positions"
    text = f"row {rows[row]}: {kind} {lost} are chosen once and not by {what}"
    return verdict(runner, check, case, Status.FAILED, text)


def _scores(logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The chosen scores float32 [R, k], ascending, NaN as the largest and -inf in places that name no key."""
    wide = logits if logits.shape[1] else logits.new_zeros(len(logits), 1)
    found = wide.gather(1, positions.clamp(min=0, max=wide.shape[1] - 1).to(torch.int64))
    found = torch.where(found.isnan(), torch.inf, found)
    return torch.where(positions < 0, -torch.inf, found).sort(dim=1).values


# ------------------------------------------------------------------------------------------------------ what is drawn


def _synthetic(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[TopkCase]:
    both = mostly(topk_cases(), stretched(topk_cases(), AXES, reach(impl, profile, device)), FAR_EVERY)
    if device.type == "cuda" and profile.large:
        return mostly(both, topk_cases(max_length=LONGEST, max_requests=2), REAL_EVERY)
    return both


def _borders(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[TopkCase]:
    return st.sampled_from(borders(reach(impl, profile, device)))


def _drawn(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[TopkCase]:
    plain = topk_cases(max_length=1500, ks=(1, 64, 512))
    return mostly(plain, stretched(plain, AXES, reach(impl, profile, device)), FAR_EVERY)


def _company(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[TopkCase]:
    """At least two rows: something to leave out."""
    return _drawn(impl, profile, device).filter(lambda case: case.rows > 1)


def _memory(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[TopkCase]:
    def case(rows: int, length: int, seed: int) -> TopkCase:
        return TopkCase(lengths=((length,),) * rows, k=512, data="random", seed=seed, prefix=-(-length // PAGE))

    return st.builds(case, st.just(64), st.just(1 << 14), st.integers(0, 1))


def _fields(draw: st.DrawFn, impl: Implementation) -> Mapping[str, Any]:
    return {"data": "random", "k": draw(st.sampled_from((1, 64, 512)))}


def _replayed(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[TopkCase]:
    return topk_cases(ks=(64, 512), max_length=2000).filter(lambda case: case.longest > 0)


def _bases(impl: Implementation) -> list[TopkCase]:
    views = ("logits", "table")
    return [
        TopkCase(lengths=((130, 70), (5, 64)), k=64, seed=4, perm=5),
        TopkCase(lengths=((511,), (30,), (140,)), data="narrow", seed=7, perm=2, strides=views, clean=False),
    ]


def _relatives(impl: Implementation, case: TopkCase) -> list[TopkCase]:
    largest, smallest, *others = history.paged_relatives(case)
    counts = [replace(largest, k=k) for k in (512, 64) if k != case.k]
    return [largest, smallest, *counts, *others]


CHECKS = [
    Check("selection", "synthetic", _synthetic, judge_synthetic),
    Check(
        "selection",
        "borders",
        _borders,
        lambda runner, case: judge_synthetic(runner, case, "selection/borders"),
        0.0,
        listed=resources.always,
    ),
    *invariance.Paged(
        strides=STRIDES,
        exact=lambda case: False,
        judge=judge_chosen,
        agree=same_sets,
        complete=lambda case: False,
        # There is no pool, so no gap between its pages that could change.
        moves_pages=(
            metamorphic.permute_pages,
            metamorphic.copy_pages,
            metamorphic.more_pages,
            metamorphic.repeat,
            metamorphic.permute_pages,
            metamorphic.alias_pages,
        ),
        drawn=_drawn,
        company=_company,
    ).checks(),
    *history.History(bases=_bases, relatives=_relatives, judge=judge_chosen, accepts=history.brief).checks(),
    *resources.Paged(
        case=TopkCase,
        judge=judge_chosen,
        result=lambda case: 2 * 4 * case.rows * case.k,
        memory=_memory,
        fields=_fields,
        many=lambda impl: {"data": "random", "k": 2},
        replayed=_replayed,
    ).checks(),
]

"""Level selection: chosen slots are a correct top-k of scores known within bounds; ties are free."""

import torch
from hypothesis import strategies as st

from parity.domain.profiles import Profile
from parity.numerics.selection import judge_selection
from parity.ops.check import Check, failed_call, named
from parity.ops.paged_logits import shapes
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.checks.rounding import coarse
from parity.ops.paged_logits.oracle import oracle
from parity.results import Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Runner

LOGITS_DATA = ("octaves", "near_ties", "negative", "needle", "fp4_grid", "exact")


def places(case: Case) -> int:
    """k of an end-to-end selection: a half, a tenth, or all but one of the longest row, by the case's seed."""
    longest = max(1, case.longest)
    return max(1, (longest // 2, longest // 10, longest - 1)[case.seed % 3])


def judge_end_to_end(runner: Runner, case: Case) -> Verdict:
    """The implementation's logits through a plain top-k: what it selects is a top-k of the exact logits within B."""
    check = "selection/end_to_end"
    outcome = runner.run(case)
    bad = failed_call(runner, check, case, outcome)
    if bad is not None:
        return bad
    operands = outcome.operands
    k = places(case)
    wanted, _ = oracle(outcome, runner, case)
    lens = operands.context_lens.reshape(-1)[wanted.rows]
    chosen = outcome.output[wanted.rows]
    positions = plain_topk(chosen, lens, k)
    slots = image(positions, operands.block_table[wanted.rows // case.next_n])
    low, high = wanted.interval()
    return judge_selection(
        slots,
        positions,
        low,
        high,
        operands.context_lens,
        operands.block_table,
        k,
        rows=wanted.rows,
        case=case,
        **named(runner, check),
    )


def plain_topk(logits: torch.Tensor, lens: torch.Tensor, k: int) -> torch.Tensor:
    """Positions int32 [R, k] of the k largest of the first `lens` logits of each row, by sorting; -1 after them."""
    width = logits.shape[1]
    inside = torch.arange(width, device=logits.device) < lens[:, None]
    # Two stable sorts: by score, then visible before invisible. NaN sorts as the largest.
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices
    visible = torch.gather(inside, 1, order)
    order = torch.gather(order, 1, torch.sort(visible.to(torch.int8), dim=1, descending=True, stable=True).indices)
    positions = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    kept = min(k, width)
    valid = torch.arange(kept, device=logits.device) < lens[:, None]
    positions[:, :kept] = torch.where(valid, order[:, :kept].to(torch.int32), -1)
    return positions


def image(positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Slots int32 [R, k] of positions under each row's own table row [R, max_pages]; -1 stays -1."""
    safe = positions.clamp(min=0).to(torch.int64)
    pages = torch.gather(table, 1, safe // 64) if table.shape[1] else torch.zeros_like(positions)
    return torch.where(positions >= 0, pages * 64 + (safe % 64).to(torch.int32), -1)


def _end_to_end(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    data = LOGITS_DATA if not coarse(impl.contract) else ("needle", "exact", "exact_wide", "octaves")
    return shapes.drawn(impl, profile, device, data)


CHECKS = [
    Check("selection", "end_to_end", _end_to_end, judge_end_to_end, 1.0, lambda case: _finite(case)),
]


def _finite(case: Case) -> bool:
    """Cases of non-finite keys have their own check; their selection is a matter of NaN order."""
    return case.data != "nonfinite"

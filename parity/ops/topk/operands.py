"""From a case of top-k to the tensors a kernel is called with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.ops.shared.operands import Stored, build_lens_and_table, lodged, names_of
from parity.ops.topk import scores
from parity.ops.topk.case import TopkCase
from parity.pages import placement, pools
from parity.pages.layout import PAGE
from parity.pages.placement import Placement
from parity.pages.pools import chosen_keys
from parity.run import memory

MOST = 3.0e38
"""The huge finite value that may stand past a row's length."""


@dataclass(frozen=True, eq=False)
class TopkOperands(Stored):
    """Operands of a top-k function: logits float32 [T, W], context_lens int32 [B, next_n], block_table, k."""

    logits: Tensor
    context_lens: Tensor
    block_table: Tensor
    k: int

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a top-k function."""
        return {name: getattr(self, name) for name in ("logits", "context_lens", "block_table", "k")}


def operand_bytes(case: TopkCase, device: str | torch.device = "cpu") -> int:
    """About how many bytes the operands and the result of a case take on a device; what judging takes comes on top."""
    columns, rows = case.max_context_len, case.rows
    return placement.placement_bytes(case) + 4 * rows * columns + 40 * columns + 8 * rows * case.k


def build_topk(case: TopkCase, device: str | torch.device = "cpu") -> TopkOperands:
    """The operands of a case on a device, the same bits on every device; new storages at every call."""
    device = torch.device(device)
    memory.require(operand_bytes(case, device), device)
    plan = placement.place(case)
    storages: dict[str, Tensor] = {}
    logits = _build_logits(case, plan, device, storages)
    lens, table = build_lens_and_table(case, plan, device, storages)
    return TopkOperands(case, plan, storages, logits, lens, table, case.k)


def _build_logits(case: TopkCase, plan: Placement, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    """Scores at readable places; past each length -inf (clean), NaN, 3e38 or larger-looking leftovers, by poison."""
    requests, rows = names_of(case, device)
    width = case.max_context_len
    pages = torch.from_numpy(placement.contents_of(case, -(-width // PAGE))).to(device)
    columns = torch.arange(width, dtype=torch.int64, device=device)
    keys = pages[columns // PAGE] * PAGE + columns % PAGE
    gap, start = (7, 3) if "logits" in case.strides else (0, 0)
    fill = {"nan": torch.nan, "huge": MOST, "canary": MOST}[case.poison]
    base = torch.full((case.rows, width + gap), fill, device=device)
    view = base[:, start : start + width]
    lens = torch.from_numpy(plan.lengths).to(device).view(-1, 1)
    step = max(1, pools.CHUNK_ELEMENTS // max(1, width))
    for at in range(0, case.rows, step):
        part = slice(at, at + step)
        drawn = scores.draw_scores(case.data, case.seed, requests[part], rows[part], keys.to(torch.int32))
        if case.only_keys is not None:
            drawn.masked_fill_(~chosen_keys(keys, case.only_keys), 0.0)
        if case.clean:
            stale = torch.full_like(drawn, -torch.inf)
        elif case.poison == "canary":
            stale = scores.draw_stale(case.data, case.seed, requests[part], rows[part], columns.to(torch.int32))
        else:
            stale = torch.full_like(drawn, fill)
        view[part] = torch.where(columns < lens[part], drawn, stale)
    storages["logits"] = base
    return lodged("logits", view, case, storages)

"""Goldens of top-k selections: logits and table, and the k largest visible logits of each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from parity.golden.goldens import Golden
from parity.numerics.selection import judge_selection
from parity.results import Verdict
from parity.run.implementation import Implementation

CASES = {
    "topk-random": "v1 lens=0,63,64,65,200 stage=topk k=64 data=random seed=31 perm=3",
    "topk-equal": "v1 lens=150,40 stage=topk k=64 data=equal seed=32 perm=5 tail=huge",
    "topk-neginf": "v1 lens=p500+3 next_n=3 stage=topk k=100 data=neginf seed=33 perm=6",
}
OPERANDS = ("block_table", "context_lens", "logits")


def best(operands: Any) -> torch.Tensor:
    """The k largest visible logits of each row, descending, float64 [T, k]; -inf where a row has fewer."""
    lens = operands.context_lens.flatten().tolist()
    result = torch.full((len(lens), operands.k), float("-inf"), dtype=torch.float64)
    for row, length in enumerate(lens):
        values = operands.logits[row, :length].double().sort(descending=True).values[: operands.k]
        result[row, : len(values)] = values
    return result


def tensors(case: Any, operands: Any) -> dict[str, torch.Tensor]:
    """Operands and the largest logits."""
    return {name: getattr(operands, name) for name in OPERANDS} | {"exact": best(operands)}


def compare(stored: Mapping[str, torch.Tensor], output: Any, operands: Any, target: Implementation) -> Verdict:
    """A correct selection from the stored logits, which the operands were found equal to."""
    slots, positions = output
    lens, table = operands.context_lens, operands.block_table
    more = {"case": operands.case, "impl": target.name, "level": "golden"}
    return judge_selection(slots, positions, operands.logits, operands.logits, lens, table, operands.k, **more)


GOLDEN = Golden(CASES, frozenset({*OPERANDS, "exact"}), tensors, compare)

"""Goldens of paged logits: operands, exact float64 logits and the bound of an IEEE float32 contract."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.golden.goldens import Golden
from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.ops.paged_logits.judge import compare_bounded, compare_exact, compare_tail
from parity.pages.layout import PAGE, find
from parity.results import Verdict
from parity.run.implementation import Implementation
from reference import exact

CASES = {
    "bf16-exact": "v1 lens=0,1,63,64,65,130 data=exact seed=11 perm=3",
    "bf16-octaves": (
        "v1 lens=7,128,129,70 next_n=2 data=octaves seed=12 perm=5 tail=huge poison=huge width=5 max_len=200"
    ),
    "bf16-wide": "v1 lens=64,66 data=exact_wide seed=18 perm=4",
    "bf16-grid": "v1 lens=p170+3 next_n=3 data=fp4_grid seed=17 perm=1",
    "bf16-negative": "v1 lens=100,90 data=negative seed=13 perm=2 tail=canary poison=canary",
    "bf16-ties": "v1 lens=p250+4 next_n=4 heads=32 data=near_ties seed=14 perm=4",
    "bf16-shared": "v1 lens=140,150 heads=16 data=outliers seed=15 prefix=2 gap=64 perm=9 strides=q+table",
    "bf16-nonfinite": "v1 lens=66,40 heads=8 data=nonfinite seed=16 perm=7",
    "fp8-exact": "v1 lens=0,1,63,64,65,130 layout=fp8 data=exact seed=21 perm=3",
    "fp8-octaves": (
        "v1 lens=7,128,129,70 next_n=2 layout=fp8 data=octaves seed=22 perm=5 tail=huge poison=huge width=5 max_len=200"
    ),
    "fp8-wide": "v1 lens=64,66 layout=fp8 data=exact_wide seed=28 perm=4",
    "fp8-grid": "v1 lens=p170+3 next_n=3 layout=fp8 data=fp4_grid seed=27 perm=1",
    "fp8-saturating": "v1 lens=100,90 layout=fp8 data=saturating seed=23 perm=2 tail=canary poison=canary",
    "fp8-ties": "v1 lens=p250+4 next_n=4 layout=fp8 heads=32 data=near_ties seed=24 perm=4",
    "fp8-shared": "v1 lens=140,150 layout=fp8 heads=16 data=outliers seed=25 prefix=2 gap=64 perm=9 strides=q+table",
    "fp8-nonfinite": "v1 lens=66,40 layout=fp8 heads=8 data=nonfinite seed=26 perm=7",
}
OPERANDS = ("block_table", "context_lens", "kv_cache", "q", "weights")
U64 = 2.0**-53


def evaluate(operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact logits of all rows and what float64 may have lost of them, both float64 [T, longest length].

    Row by row and page by page, as the formula reads: keys through the block table, dot, ReLU, weights, scale. The loss
    is (D + H + 8) 2^-53 of the sum of absolute terms. Past a row's length: -inf and 0.
    """
    lens = operands.context_lens.flatten().tolist()
    next_n = operands.context_lens.shape[1]
    shape = (len(lens), max(lens, default=0))
    result = torch.full(shape, float("-inf"), dtype=torch.float64)
    loss = torch.zeros(shape, dtype=torch.float64)
    for row, length in enumerate(lens):
        if not length:
            continue
        q = operands.q.flatten(0, 1)[row][None]
        weights = operands.weights[row][None]
        positions = torch.arange(length)
        slots = operands.block_table[row // next_n].long()[positions // PAGE] * PAGE + positions % PAGE
        keys, scales = find(operands.case.layout).read(operands.kv_cache, slots)
        dot, absolute = exact.dots(q, keys)
        result[row, :length] = exact.logits_from_dots(dot, weights, scales)[0]
        terms = exact.logits_from_dots(absolute, weights.abs(), scales)[0]
        loss[row, :length] = (q.shape[-1] + q.shape[-2] + 8) * U64 * terms
    return result, loss


def tensors(case: Any, operands: Any) -> dict[str, torch.Tensor]:
    """Operands, exact logits and the bound of an IEEE float32 contract."""
    bound = expected(operands, Contract.default(case.layout, "cpu")).bound
    found = {name: getattr(operands, name) for name in OPERANDS}
    return found | {"exact": evaluate(operands)[0], "bound": bound}


def slack(operands: Any, fresh: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Exact results may differ by what two float64 evaluations in different orders lose; bounds are sums of positive
    terms, which float64 keeps within a few hundred roundings."""
    return {"exact": 2 * evaluate(operands)[1], "bound": 1024 * U64 * fresh["bound"].abs()}


def compare(stored: Mapping[str, torch.Tensor], output: Any, operands: Any, target: Implementation) -> Verdict:
    """The exact values are the golden's; only the bound follows the contract."""
    impl, level, contract = target.name, "golden", target.contract
    tail = compare_tail(output, operands, contract, impl=impl, level=level)
    if not tail.passed:
        return tail
    if is_exact_data(operands, contract):
        return compare_exact(output, exact_expected(operands, contract), operands, impl=impl, level=level)
    wanted = expected(operands, contract)
    wanted = replace(wanted, logits=stored["exact"].to(wanted.logits.device))
    return compare_bounded(output, wanted, operands, contract=contract, impl=impl, level=level)


GOLDEN = Golden(CASES, frozenset({*OPERANDS, "exact", "bound"}), tensors, compare, slack)

"""The proved bound against simulated kernels: every order, folding and rounding point stays inside; faults do not."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch

from parity.domain.contract import Contract
from parity.numerics.arithmetic import Grouped
from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.numerics.exactness import quantum, round_to
from parity.ops.paged_logits.judge import compare_bounded, compare_exact, compare_nonfinite
from parity.ops.paged_logits.operands import build_logits as build
from parity.run.operation import parse_case
from parity.selftest.helpers import refuses, seeded
from parity.selftest.operands import make_operands, slots_of
from parity.vocabulary import Status
from reference.pages import read_keys, write_keys

ORDERS = ("sequential", "reversed", "pairwise", "lanes", "fused")
FOLDS = ("end", "key", "query", "dot", "weight")
BF16, FP8 = Contract("bf16"), Contract("fp8")
SM_90 = Contract.default("fp8", torch.device("cuda"), capability=(9, 0))


def total(terms: torch.Tensor, order: str) -> torch.Tensor:
    """Sum over the last dimension, every addition rounded to float32, in one of several orders."""
    if order == "reversed":
        return total(terms.flip(-1), "sequential")
    if order == "lanes":
        lanes = 4 if terms.shape[-1] % 4 == 0 else 1
        return total(total(terms.unflatten(-1, (-1, lanes)).transpose(-1, -2), "sequential"), "pairwise")
    if order == "pairwise":
        while terms.shape[-1] > 1:
            odd = terms[..., -1:] if terms.shape[-1] % 2 else terms[..., :0]
            half = terms.shape[-1] // 2
            terms = torch.cat([terms[..., :half] + terms[..., half : 2 * half], odd], -1)
        return terms[..., 0]
    result = torch.zeros_like(terms[..., 0])
    for i in range(terms.shape[-1]):
        result = result + terms[..., i]
    return result


def product_sum(a: torch.Tensor, b: torch.Tensor, order: str) -> torch.Tensor:
    """Sum of a * b over the last dimension in float32; "fused" rounds product and addition at once."""
    if order != "fused":
        return total(a * b, order)
    result = torch.zeros(torch.broadcast_shapes(a.shape, b.shape)[:-1])
    for i in range(a.shape[-1]):
        result = (a[..., i].double() * b[..., i].double() + result.double()).float()
    return result


def keys_of(operands: Any, layout: str, request: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = read_keys(operands.kv_cache, layout, slots_of(operands.block_table, request, count))
    return values.float(), torch.ones(count) if scales is None else scales


def scales_of(operands: Any) -> torch.Tensor:
    """The scales of all slots of fp8 pages, float32 [pages, 64], a view."""
    return operands.kv_cache.flatten(1)[:, 64 * 128 :].view(torch.float32)


def simulate(
    operands: Any, layout: str, order: str = "sequential", fold: str = "end", contract: Any = None, model: Any = None
) -> torch.Tensor:
    """A float32 kernel, float32 [T, max_context_len], with the rounding points of a contract, or a model's dots."""
    contract = contract or Contract(layout)

    def rounded(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
        return round_to(x.double(), dtype, contract.conversion).float()

    next_n, heads = operands.q.shape[1:3]
    out = torch.full((operands.weights.shape[0], operands.max_context_len), -math.inf)
    for row, count in enumerate(operands.context_lens.flatten().tolist()):
        if not count:
            continue
        k, s = keys_of(operands, layout, row // next_n, count)
        q, w = operands.q[row // next_n, row % next_n].float()[:, None], operands.weights[row][:, None]
        if contract.operand_dtype is not None:
            k, s = rounded(k * s[:, None], contract.operand_dtype), torch.ones(count)
        if fold == "key":
            k = k * s[:, None]
        if model is not None:
            dot = model.exact_dot(q[:, 0].to(torch.float8_e4m3fn), k.to(torch.float8_e4m3fn))
        else:
            dot = rounded(product_sum(q * s[:, None] if fold == "query" else q, k, order), contract.dot_dtype)
        relu = torch.relu(dot * s if fold == "dot" else dot)
        products = rounded(relu * (w * s if fold == "weight" else w), contract.product_dtype)
        if contract.sum_unit != torch.float32:
            logit = torch.zeros(count)
            for head in range(heads):
                logit = rounded(logit + products[head], contract.sum_unit)
        elif order == "fused" and contract.product_dtype is None:
            logit = product_sum(relu.T, (w * s if fold == "weight" else w.expand_as(relu)).T, "fused")
        else:
            logit = total(products.T, order)
        logit = logit * s if fold == "end" else logit
        out[row, :count] = rounded(logit, contract.out_dtype)
    return out


def adversarial(layout: str, seed: int) -> Any:
    """Dots and head sums whose every addition loses half a unit in the last place, in sequence."""
    operands, g = make_operands(layout, ((80,),), 64, seed), seeded(seed)
    # The first product leads; each other one is half a unit in its last place and a little, so it rounds up to a unit.
    bf16 = layout == "bf16"
    leader, small_q, small_k = (1.0, 2.0**-9, 2.0**-11 * 1.0078125) if bf16 else (128.0, 2.0**-7, 0.017578125)
    operands.q = torch.full((1, 1, 64, 128), small_q).to(operands.q.dtype)
    operands.q[..., 0] = 16.0
    keys = torch.full((80, 128), small_k).index_fill_(1, torch.tensor([0]), leader)
    keys *= torch.exp2(torch.randint(0, 3, (80, 1), generator=g).float())
    operands.weights[:] = 2.0**-24 * 1.001
    operands.weights[:, 0] = 1.0
    scales = None if bf16 else torch.rand(80, generator=g) + 0.5
    write_keys(operands.kv_cache, layout, slots_of(operands.block_table, 0, 80), keys.to(operands.q.dtype), scales)
    return operands


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_no_order_and_no_folding_passes_the_bound(layout):
    worst = 0.0
    for seed, kind in itertools.product(range(4), ("gauss", "octaves", "cancel", "adversarial")):
        if kind == "adversarial":
            operands = adversarial(layout, seed)
        else:
            operands = make_operands(layout, ((70, 130), (3, 66)), 16, seed, kind=kind)
        wanted = expected(operands, Contract(layout))
        for order, fold in itertools.product(ORDERS, FOLDS):
            verdict = compare_bounded(simulate(operands, layout, order, fold), wanted, operands)
            assert verdict.status is Status.PASSED, (kind, order, fold, verdict.message)
            worst = max(worst, (verdict.ratio or 0) if kind == "adversarial" else 0.0)
    assert worst > 0.85  # the bound is nearly attained, so it could not be narrowed much


ROUNDINGS = [
    *("dot_dtype=bf16", "product_dtype=bf16", "out_dtype=bf16", "sum_unit=bf16", "operand_dtype=bf16"),
    *("dot_dtype=fp16", "out_dtype=fp16", "operand_dtype=fp16 dot_dtype=fp16 product_dtype=fp16 out_dtype=fp16"),
    "dot_dtype=bf16 product_dtype=bf16 out_dtype=bf16",
    "dot_dtype=bf16 product_dtype=bf16 out_dtype=bf16 conversion=truncate",
]


def ieee(layout: str, roundings: str) -> Contract:
    """A contract with an IEEE dot and the rounding points given as "key=value ..."."""
    keys = dict(word.split("=") for word in roundings.split())
    return Contract.from_dict({"layout": layout, "arithmetic": "ieee", **keys})


@pytest.mark.parametrize("roundings", ROUNDINGS)
def test_rounding_points_stay_inside_their_bound_and_outside_the_next_tighter(roundings):
    contract = ieee("fp8", roundings)
    for seed, kind in itertools.product(range(3), ("gauss", "octaves", "cancel")):
        operands = make_operands("fp8", ((70, 130),), 16, seed, kind=kind)
        wanted = expected(operands, contract)
        for order in ("sequential", "pairwise"):
            out = simulate(operands, "fp8", order, "end", contract)
            verdict = compare_bounded(out, wanted, operands, contract=contract)
            assert verdict.status is Status.PASSED, verdict.message
        if kind == "gauss":
            out = simulate(operands, "fp8", "sequential", "end", contract)
            assert compare_bounded(out, expected(operands, FP8), operands).status is Status.FAILED


def test_fp16_underflow_of_operands_and_dots_is_inside():
    """Scales so small that dequantised keys and dots fall below fp16's normal range."""
    contract = ieee("fp8", "operand_dtype=fp16 out_dtype=fp16")
    operands = make_operands("fp8", ((100,),), 8, 5)
    scales_of(operands).mul_(2.0**-20)
    wanted = expected(operands, contract)
    verdict = compare_bounded(simulate(operands, "fp8", contract=contract), wanted, operands)
    assert verdict.status is Status.PASSED and (verdict.ratio or 0) > 0.01, verdict.message


FAULTS = {
    "dot in bf16": lambda o: simulate(o, "bf16", contract=ieee("bf16", "dot_dtype=bf16")),
    "logits in bf16": lambda o: simulate(o, "bf16", contract=ieee("bf16", "out_dtype=bf16")),
    "all times 1.001": lambda o: simulate(o, "bf16") * 1.001,
    "weights in bf16": lambda o: simulate(changed(o, weights=o.weights.bfloat16().float()), "bf16"),
    "head 63 dropped": lambda o: simulate(changed(o, weights=o.weights * (torch.arange(64) < 63)), "bf16"),
}


def changed(operands: Any, **values: Any) -> Any:
    return type(operands)(**{**vars(operands), **values})


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_controls_are_rejected(fault):
    operands = make_operands("bf16", ((70, 130),), 64, 1)
    wanted = expected(operands, BF16)
    assert compare_bounded(simulate(operands, "bf16"), wanted, operands).status is Status.PASSED
    verdict = compare_bounded(FAULTS[fault](operands), wanted, operands)
    assert verdict.status is Status.FAILED and (verdict.ratio or 0) > 1
    # The same faults, with no tolerance, on exact data with dots beyond 256 and nine-bit weights.
    operands = make_operands("bf16", ((70, 130),), 64, 1, kind="wide")
    assert is_exact_data(operands, BF16)
    exact = exact_expected(operands, BF16)
    assert compare_exact(simulate(operands, "bf16"), exact, operands).status is Status.PASSED
    assert compare_exact(FAULTS[fault](operands), exact, operands).status is Status.FAILED


def test_an_ieee_contract_rejects_a_truncating_core():
    operands = make_operands("fp8", ((130,),), 64, 2, kind="octaves")
    operands.weights.abs_()  # truncation is one-sided: with positive weights it adds up
    operands.q = operands.q.float().abs().to(torch.float8_e4m3fn)
    out = simulate(operands, "fp8", model=Grouped(32, 13, 13))
    assert compare_bounded(out, expected(operands, FP8), operands).status is Status.FAILED


def test_grouped_contracts():
    """The model's own dots stay inside its bound, and at zero dot error once it is verified."""
    model = SM_90.arithmetic
    assert isinstance(model, Grouped)
    operands = make_operands("fp8", ((70, 130), (64, 1)), 64, 2)
    out = simulate(operands, "fp8", model=model)
    bound, finer = ((contract, expected(operands, contract)) for contract in (SM_90, SM_90.verified()))
    coarse, fine = (compare_bounded(out, wanted, operands, contract=c) for c, wanted in (bound, finer))
    assert coarse.status is Status.PASSED and fine.status is Status.PASSED
    assert "bound only" in coarse.note and "verified" in fine.note
    assert (coarse.resolution or 0) > 1000 * (fine.resolution or math.inf)
    # Three faults that only the verified model sees: a scale, a weight, and another accumulation.
    scale, weight = out.clone(), out.clone()
    scale[:, :1] *= 1.0001
    k, s = keys_of(operands, "fp8", 0, 70)
    dot = model.exact_dot(operands.q[0, 0], k.to(torch.float8_e4m3fn))
    weight[0, :70] += torch.relu(dot[5]) * operands.weights[0, 5] * 0.001 * s
    for other in (scale, weight, simulate(operands, "fp8", model=Grouped(32, 13, 13, running=False))):
        assert compare_bounded(other, bound[1], operands).status is Status.PASSED
        assert compare_bounded(other, finer[1], operands).status is Status.FAILED


@pytest.mark.parametrize("layout", ["bf16", "fp8", "fp4"])
def test_exact_data_is_exact_in_every_order(layout):
    contract = Contract(layout)
    for kind in ("integers", "wide") if layout != "fp4" else ("integers",):
        operands = make_operands(layout, ((70, 130), (0, 1)), 64, 3, kind=kind)
        assert is_exact_data(operands, contract)
        wanted = exact_expected(operands, contract)
        for order, fold in itertools.product(ORDERS, FOLDS):
            verdict = compare_exact(simulate(operands, layout, order, fold), wanted, operands)
            assert verdict.status is Status.PASSED, (kind, order, fold, verdict.message)
        if layout != "fp4":  # gaussian keys are not on the fp4 grid
            assert not is_exact_data(make_operands(layout, ((70,),), 8, 3), contract)


def test_exact_data_conditions_follow_the_arithmetic():
    operands = make_operands("fp8", ((70,),), 64, 3, kind="integers")
    assert is_exact_data(operands, FP8) and is_exact_data(operands, SM_90)
    w = operands.weights
    for weights in (w + 2.0**-20, w * 2.0**110, w * 2.0**-126, torch.full_like(w, math.nan)):
        assert not is_exact_data(changed(operands, weights=weights), FP8)
    operands.q = (operands.q.float() * 32).to(torch.float8_e4m3fn)
    operands.q[..., 0] = 1.0  # the quantum stays 1 while dots pass 2**14
    assert is_exact_data(operands, FP8) and not is_exact_data(operands, SM_90)
    scales_of(operands).mul_(1.5)
    assert not is_exact_data(operands, FP8)


@pytest.mark.parametrize("roundings", ROUNDINGS)
def test_exact_data_under_rounding_points(roundings):
    contract = ieee("bf16", roundings)
    operands = make_operands("bf16", ((70, 130),), 8, 3, kind="wide")
    operands.weights.div_(64).round_()
    if not is_exact_data(operands, contract):
        assert contract.sum_unit == torch.bfloat16 or torch.float16 in (contract.dot_dtype, contract.out_dtype)
        return
    wanted = exact_expected(operands, contract)
    for order in ("sequential", "pairwise"):
        out = simulate(operands, "bf16", order, "end", contract)
        assert compare_exact(out, wanted, operands).status is Status.PASSED
    if torch.bfloat16 in (contract.dot_dtype, contract.out_dtype):
        assert compare_exact(simulate(operands, "bf16"), wanted, operands).status is Status.FAILED


def test_nonfinite_classes():
    operands = make_operands("fp8", ((70, 70),), 8, 4)
    page = int(operands.block_table[0, 0])
    operands.kv_cache.flatten(1)[page, 3] = 0x7F  # NaN
    scales_of(operands)[page, 1:3] = torch.tensor([math.nan, math.inf])
    operands.weights[1, 0] = math.inf
    wanted = expected(operands, FP8)
    assert wanted.logits[0, :2].isnan().all() and bool(wanted.logits[0, 2].isinf()) and bool(wanted.nan_ok[0, 2])
    assert wanted.logits[0, 3:].isfinite().all() and not wanted.logits[1, 3:].isfinite().any()
    out = simulate(operands, "fp8")
    for fold in FOLDS:
        assert compare_nonfinite(simulate(operands, "fp8", fold=fold), wanted, operands).status is Status.PASSED
    assert compare_bounded(out, wanted, operands).status is Status.PASSED
    for key, value in ((0, 0.5), (40, math.nan)):  # a ReLU by maximum turns NaN into a number
        wrong = out.clone()
        wrong[0, key] = value
        for compare in (compare_nonfinite, compare_bounded):
            verdict = compare(wrong, wanted, operands)
            assert verdict.status is Status.FAILED and verdict.where["key"] == key


def test_bf16_infinity_before_the_relu_is_zero():
    """A key that is infinite where every query is negative gives -inf dots, which the ReLU makes 0: a finite logit."""
    operands = make_operands("bf16", ((4,),), 8, 4)
    operands.q[..., 0] = -1.0
    operands.kv_cache[int(operands.block_table[0, 0]), 0, 0, 0] = math.inf
    wanted = expected(operands, BF16)
    assert float(wanted.logits[0, 0]) == 0.0
    assert compare_bounded(simulate(operands, "bf16"), wanted, operands).status is Status.PASSED


def test_overflowable_cells_are_free():
    operands = make_operands("bf16", ((4,),), 8, 4)
    operands.weights.fill_(1e38)
    wanted = expected(operands, BF16)
    assert wanted.free[0].all() and wanted.bound[0].isinf().all()
    assert [set(end.flatten().tolist()) for end in wanted.interval()] == [{-math.inf}, {math.inf}]
    operands = make_operands("bf16", ((4,),), 8, 4)
    operands.q.mul_(1000)
    wanted = expected(operands, Contract.from_dict({"layout": "bf16", "dot_dtype": "fp16"}))
    assert bool(wanted.free.all()) and bool(torch.isfinite(wanted.bound).all())
    assert not bool(expected(operands, BF16).free.any())


def test_negative_scale_is_refused():
    operands = make_operands("fp8", ((70,),), 8, 4)
    page = operands.block_table[0, 1].item()
    scales_of(operands)[page, 2] = -0.5
    sentence = f"the scale of slot {page * 64 + 2} is -0.5; a negative scale cannot pass the ReLU"
    refuses(ValueError, sentence, expected, operands, FP8)


def test_rows_and_chunks_do_not_change_the_result():
    operands = make_operands("fp8", ((70, 130, 0), (3, 66, 1), (0, 0, 0)), 8, 6)
    whole = expected(operands, FP8)
    for chunk in (1 << 12, 1 << 16, 1 << 20):
        part = expected(operands, FP8, chunk_bytes=chunk)
        assert torch.allclose(part.logits, whole.logits, rtol=1e-13, atol=0)
        assert torch.allclose(part.bound, whole.bound, rtol=1e-12, atol=0)
    rows = torch.tensor([4, 0, 7])
    some = expected(operands, FP8, rows)
    assert some.logits.shape == (3, 70) and some.lens.tolist() == [66, 70, 0]
    assert torch.allclose(some.logits, whole.logits[rows, :70], rtol=1e-13, atol=0)
    assert bool((some.logits[2] == -math.inf).all()) and not bool(some.bound[2].any())
    assert expected(operands, FP8, torch.tensor([8])).logits.shape == (1, 0)
    refuses(ValueError, "rows: expected int64", expected, operands, FP8, torch.tensor([0.5]))


def test_interval_is_outward_and_exact_infinities_are_points():
    operands = make_operands("bf16", ((70,),), 8, 6)
    wanted = expected(operands, BF16)
    low, high = wanted.interval()
    assert bool((low < wanted.logits - wanted.bound).all()) and bool((high > wanted.logits + wanted.bound).all())
    exact = exact_expected(operands, BF16)
    assert torch.equal(exact.interval()[0], exact.logits) and torch.equal(exact.interval()[1], exact.logits)


def test_flush_to_zero_widens_by_underflow_only():
    operands = make_operands("bf16", ((70,),), 8, 6)
    flush = Contract("bf16", flush_to_zero=True)
    assert torch.allclose(expected(operands, BF16).bound, expected(operands, flush).bound, rtol=1e-9)
    operands.weights.mul_(2.0**-120)
    flushing = expected(operands, flush)
    assert bool((flushing.bound > 100 * expected(operands, BF16).bound).all())
    out = simulate(operands, "bf16")
    out[out.abs() < 2.0**-126] = 0
    assert compare_bounded(out, flushing, operands).passed


def test_quantum_and_rounding():
    x = torch.tensor([[6.0, 4.0], [0.0, 0.0], [0.375, 3.0]], dtype=torch.float64)
    assert quantum(x).tolist() == [1, 1 << 14, -3]
    x = torch.tensor([257.0, -259.0, 1.0 + 2.0**-8, 0.0], dtype=torch.float64)
    assert round_to(x, torch.bfloat16).tolist() == [256.0, -260.0, 1.0, 0.0]
    assert round_to(x, torch.bfloat16, "truncate").tolist() == [256.0, -258.0, 1.0, 0.0]
    assert round_to(torch.tensor([2049.0], dtype=torch.float64), torch.float16, "truncate").tolist() == [2048.0]


def test_an_infinite_scale_takes_either_sign_where_the_head_sum_is_undecided():
    """A head sum of 22 amid products of 1e5 may come out negative, or zero, in float32; that of two heads may not."""
    case = parse_case(
        "v1 lens=59 layout=fp8 data=nonfinite seed=9801 row_ids=365 page_ids=2 only_heads=2..5,7,11,12,15,17..19,21,23,"
        "26,31,34..38,40,42,45,46,48,52,55,56,58..60,62 only_keys=186"
    )
    cpu = Contract.default("fp8", "cpu")
    for contract, only_heads in ((cpu, case.only_heads), (SM_90.verified(), case.only_heads), (cpu, (2, 3))):
        found = expected(build(dataclasses.replace(case, only_heads=only_heads)), contract)
        assert found.logits[0, 58].isinf() and bool(found.free[0, 58]) == (only_heads != (2, 3))


def test_the_sign_under_an_infinite_scale_is_that_of_the_verified_dots():
    """A sum of 28 heads is -3 by exact dots and 10 by the model's of 13 bits: an H200 gives +inf."""
    case = parse_case(
        "v1 lens=40 layout=fp8 data=nonfinite request_ids=3 row_ids=1 page_ids=1876 only_heads=1,2,5,8,16,18,19,23,"
        "27..32,35,38,39,41,46,50,52..54,56,57,59,60 only_keys=120103"
    )
    coarse, fine = expected(build(case), SM_90), expected(build(case), SM_90.verified())
    assert coarse.logits[0, 39] == -math.inf and coarse.free[0, 39]
    assert fine.logits[0, 39] == math.inf and not fine.free[0, 39]

"""The proved bound against simulated kernels: every order, every folding, every rounding point stays inside; faults do
not."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from parity.domain.contract import Contract
from parity.numerics.arithmetic import Grouped
from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.numerics.exactness import quantum, round_to
from parity.ops.paged_logits.judge import Status, compare_bounded, compare_exact, compare_nonfinite
from parity.ops.paged_logits.operands import build_logits as build
from parity.run.operation import parse_case
from parity.selftest.judge_operands import make_operands
from reference.pages import PAGE, read_keys, write_keys

ORDERS = ("sequential", "reversed", "pairwise", "lanes", "fused")
FOLDS = ("end", "key", "query", "dot", "weight")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def number(value: float | None) -> float:
    assert value is not None
    return value


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
    position = torch.arange(count)
    slots = operands.block_table[request, position // PAGE].long() * PAGE + position % PAGE
    values, scales = read_keys(operands.kv_cache, layout, slots)
    return values.float(), torch.ones(count) if scales is None else scales


def simulate(
    operands: Any, layout: str, order: str = "sequential", fold: str = "end", contract: Contract | None = None
) -> torch.Tensor:
    """A float32 kernel, float32 [T, max_context_len], with the rounding points of a contract."""
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
        dot = product_sum(q * s[:, None] if fold == "query" else q, k, order)
        dot = rounded(dot, contract.dot_dtype)
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
    operands = make_operands(layout, ((80,),), 64, seed)
    g = torch.Generator().manual_seed(seed)
    # The first product leads; each other one is half a unit in its last place and a little, so it rounds up to a unit.
    leader, small_q, small_k = (
        (1.0, 2.0**-9, 2.0**-11 * 1.0078125) if layout == "bf16" else (128.0, 2.0**-7, 0.017578125)
    )
    q = torch.full((1, 1, 64, 128), small_q)
    q[..., 0] = 16.0
    keys = torch.full((80, 128), small_k)
    keys[:, 0] = leader
    keys *= torch.exp2(torch.randint(0, 3, (80, 1), generator=g).float())
    operands.q = q.to(operands.q.dtype)
    operands.weights[:] = 2.0**-24 * 1.001
    operands.weights[:, 0] = 1.0
    position = torch.arange(80)
    slots = operands.block_table[0, position // PAGE].long() * PAGE + position % PAGE
    scales = torch.rand(80, generator=g) + 0.5
    dtype = torch.bfloat16 if layout == "bf16" else torch.float8_e4m3fn
    write_keys(operands.kv_cache, layout, slots, keys.to(dtype), None if layout == "bf16" else scales)
    return operands


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_no_order_and_no_folding_passes_the_bound(layout):
    contract = Contract(layout)
    worst: dict[str, float] = {}
    for seed in range(4):
        for kind in ("gauss", "octaves", "cancel", "adversarial"):
            if kind == "adversarial":
                operands = adversarial(layout, seed)
            else:
                operands = make_operands(layout, ((70, 130), (3, 66)), 16, seed, kind=kind)
            wanted = expected(operands, contract)
            for order in ORDERS:
                for fold in FOLDS:
                    out = simulate(operands, layout, order, fold)
                    verdict = compare_bounded(out, wanted, operands, contract=contract)
                    assert verdict.status is Status.PASSED, (kind, order, fold, verdict.message)
                    worst[kind] = max(worst.get(kind, 0.0), number(verdict.ratio))
    print(f"{layout}: worst ratios { ({kind: round(ratio, 4) for kind, ratio in worst.items()}) }")
    assert worst["adversarial"] > 0.85  # the bound is nearly attained, so it could not be narrowed much


ROUNDINGS = [
    {"dot_dtype": "bf16"},
    {"product_dtype": "bf16"},
    {"out_dtype": "bf16"},
    {"sum_unit": "bf16"},
    {"operand_dtype": "bf16"},
    {"dot_dtype": "fp16"},
    {"out_dtype": "fp16"},
    {"operand_dtype": "fp16", "dot_dtype": "fp16", "product_dtype": "fp16", "out_dtype": "fp16"},
    {"dot_dtype": "bf16", "product_dtype": "bf16", "out_dtype": "bf16"},
    {"dot_dtype": "bf16", "product_dtype": "bf16", "out_dtype": "bf16", "conversion": "truncate"},
]


@pytest.mark.parametrize("given", ROUNDINGS, ids=lambda given: "-".join(f"{k}={v}" for k, v in given.items()))
def test_rounding_points_stay_inside_their_bound_and_outside_the_next_tighter(given):
    contract = Contract.from_dict({"layout": "fp8", "arithmetic": "ieee", **given})
    ieee = Contract("fp8")
    worst = 0.0
    for seed in range(3):
        for kind in ("gauss", "octaves", "cancel"):
            operands = make_operands("fp8", ((70, 130),), 16, seed, kind=kind)
            wanted = expected(operands, contract)
            for order in ("sequential", "pairwise"):
                out = simulate(operands, "fp8", order, "end", contract)
                verdict = compare_bounded(out, wanted, operands, contract=contract)
                assert verdict.status is Status.PASSED, verdict.message
                worst = max(worst, number(verdict.ratio))
        operands = make_operands("fp8", ((70, 130),), 16, seed)
        out = simulate(operands, "fp8", "sequential", "end", contract)
        assert compare_bounded(out, expected(operands, ieee), operands).status is Status.FAILED
    print(f"{given}: worst ratio {worst:.3f}")


def test_fp16_underflow_of_operands_and_dots_is_inside():
    """Scales so small that dequantised keys and dots fall below fp16's normal range."""
    contract = Contract.from_dict({"layout": "fp8", "arithmetic": "ieee", "operand_dtype": "fp16", "out_dtype": "fp16"})
    operands = make_operands("fp8", ((100,),), 8, 5)
    scales = operands.kv_cache.flatten(1)[:, 64 * 128 :].view(torch.float32)
    scales *= 2.0**-20
    wanted = expected(operands, contract)
    verdict = compare_bounded(simulate(operands, "fp8", contract=contract), wanted, operands)
    assert verdict.status is Status.PASSED, verdict.message
    assert number(verdict.ratio) > 0.01


FAULTS = {
    "dot in bf16": lambda o: simulate(o, "bf16", contract=Contract("bf16", dot_dtype=torch.bfloat16)),
    "logits in bf16": lambda o: simulate(o, "bf16", contract=Contract("bf16", out_dtype=torch.bfloat16)),
    "all times 1.001": lambda o: simulate(o, "bf16") * 1.001,
    "weights in bf16": lambda o: simulate(changed(o, weights=o.weights.bfloat16().float()), "bf16"),
    "head 63 dropped": lambda o: simulate(changed(o, weights=zeroed(o.weights, -1)), "bf16"),
}


def changed(operands: Any, **values: Any) -> Any:
    return type(operands)(**{**vars(operands), **values})


def zeroed(weights: torch.Tensor, head: int) -> torch.Tensor:
    weights = weights.clone()
    weights[:, head] = 0
    return weights


@pytest.mark.parametrize("fault", FAULTS)
def test_negative_controls_are_rejected(fault):
    operands = make_operands("bf16", ((70, 130),), 64, 1)
    wanted = expected(operands, Contract("bf16"))
    assert compare_bounded(simulate(operands, "bf16"), wanted, operands).status is Status.PASSED
    verdict = compare_bounded(FAULTS[fault](operands), wanted, operands)
    assert verdict.status is Status.FAILED and number(verdict.ratio) > 1
    # The same faults, with no tolerance, on exact data with dots beyond 256 and nine-bit weights.
    operands = make_operands("bf16", ((70, 130),), 64, 1, kind="wide")
    assert is_exact_data(operands, Contract("bf16"))
    exact = exact_expected(operands, Contract("bf16"))
    assert compare_exact(simulate(operands, "bf16"), exact, operands).status is Status.PASSED
    assert compare_exact(FAULTS[fault](operands), exact, operands).status is Status.FAILED


def on_tensor_cores(operands: Any, model: Grouped) -> torch.Tensor:
    """An fp8 kernel whose dots are the model's."""
    out = torch.full((operands.weights.shape[0], operands.max_context_len), -math.inf)
    next_n = operands.q.shape[1]
    for row, count in enumerate(operands.context_lens.flatten().tolist()):
        k, s = keys_of(operands, "fp8", row // next_n, count)
        dot = model.exact_dot(operands.q[row // next_n, row % next_n], k.to(torch.float8_e4m3fn))
        out[row, :count] = (torch.relu(dot) * operands.weights[row][:, None]).sum(0) * s
    return out


def test_an_ieee_contract_rejects_a_truncating_core():
    operands = make_operands("fp8", ((130,),), 64, 2, kind="octaves")
    operands.weights.abs_()  # truncation is one-sided: with positive weights it adds up
    operands.q = operands.q.float().abs().to(torch.float8_e4m3fn)
    out = on_tensor_cores(operands, Grouped(32, 13, 13))
    assert compare_bounded(out, expected(operands, Contract("fp8")), operands).status is Status.FAILED


def test_grouped_contracts():
    """The model's own dots stay inside its bound, and at zero dot error once it is verified."""
    bound = Contract.default("fp8", "cuda", capability=(9, 0))
    model = bound.arithmetic
    assert isinstance(model, Grouped)
    operands = make_operands("fp8", ((70, 130), (64, 1)), 64, 2)
    out = on_tensor_cores(operands, model)
    coarse = compare_bounded(out, expected(operands, bound), operands, contract=bound)
    fine = compare_bounded(out, expected(operands, bound.verified()), operands, contract=bound.verified())
    assert coarse.status is Status.PASSED and fine.status is Status.PASSED
    assert "bound only" in coarse.note and "verified" in fine.note
    assert number(coarse.resolution) > 1000 * number(fine.resolution)
    # Three faults that only the verified model sees: a scale, a weight, and another accumulation.
    finer = bound.verified()
    for fault in ("scale", "weight", "imprecise"):
        other = out.clone()
        if fault == "scale":
            other[:, :1] *= 1.0001
        elif fault == "weight":
            k, s = keys_of(operands, "fp8", 0, 70)
            dot = model.exact_dot(operands.q[0, 0], k.to(torch.float8_e4m3fn))
            other[0, :70] += torch.relu(dot[5]) * operands.weights[0, 5] * 0.001 * s
        else:
            other = on_tensor_cores(operands, Grouped(32, 13, 13, running=False))
        assert compare_bounded(other, expected(operands, bound), operands).status is Status.PASSED, fault
        assert compare_bounded(other, expected(operands, finer), operands).status is Status.FAILED, fault


@pytest.mark.parametrize("layout", ["bf16", "fp8", "fp4"])
def test_exact_data_is_exact_in_every_order(layout):
    contract = Contract(layout)
    for kind in ("integers", "wide") if layout != "fp4" else ("integers",):
        operands = make_operands(layout, ((70, 130), (0, 1)), 64, 3, kind=kind)
        assert is_exact_data(operands, contract)
        wanted = exact_expected(operands, contract)
        for order in ORDERS:
            for fold in FOLDS:
                verdict = compare_exact(simulate(operands, layout, order, fold), wanted, operands)
                assert verdict.status is Status.PASSED, (kind, order, fold, verdict.message)
        if layout != "fp4":  # gaussian keys are not on the fp4 grid
            assert not is_exact_data(make_operands(layout, ((70,),), 8, 3), contract)


def test_exact_data_conditions_follow_the_arithmetic():
    operands = make_operands("fp8", ((70,),), 64, 3, kind="integers")
    assert is_exact_data(operands, Contract("fp8"))
    assert is_exact_data(operands, Contract.default("fp8", "cuda", capability=(9, 0)))
    operands.q = (operands.q.float() * 32).to(torch.float8_e4m3fn)
    operands.q[..., 0] = 1.0  # the quantum stays 1 while dots pass 2**14
    assert is_exact_data(operands, Contract("fp8"))
    assert not is_exact_data(operands, Contract.default("fp8", "cuda", capability=(9, 0)))
    for name, change in {
        "scale": lambda o: o.kv_cache.flatten(1)[:, 64 * 128 :].view(torch.float32).mul_(1.5),
        "weight": lambda o: o.weights.add_(2.0**-20),
        "nan": lambda o: o.weights[:1].fill_(math.nan),
        "huge": lambda o: o.weights.mul_(2.0**110),
        "tiny": lambda o: o.weights.mul_(2.0**-126),
    }.items():
        operands = make_operands("fp8", ((70,),), 64, 3, kind="integers")
        change(operands)
        assert not is_exact_data(operands, Contract("fp8")), name


@pytest.mark.parametrize("given", ROUNDINGS, ids=lambda given: "-".join(f"{k}={v}" for k, v in given.items()))
def test_exact_data_under_rounding_points(given):
    contract = Contract.from_dict({"layout": "bf16", **given})
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
    slot = operands.block_table[0, 0].long() * PAGE + torch.arange(8)
    values, scales = read_keys(operands.kv_cache, "fp8", slot)
    assert scales is not None
    payload = values.view(torch.uint8).clone()
    payload[0, 3] = 0x7F  # NaN
    scales = scales.clone()
    scales[1], scales[2] = math.nan, math.inf
    write_keys(operands.kv_cache, "fp8", slot, payload, scales)
    operands.weights[1, 0] = math.inf
    wanted = expected(operands, Contract("fp8"))
    assert wanted.logits[0, :2].isnan().all() and bool(wanted.logits[0, 2].isinf()) and bool(wanted.nan_ok[0, 2])
    assert not bool(torch.isfinite(wanted.logits[1, 3:]).any())
    assert bool(torch.isfinite(wanted.logits[0, 3:]).all())
    out = simulate(operands, "fp8")
    for fold in FOLDS:
        assert compare_nonfinite(simulate(operands, "fp8", fold=fold), wanted, operands).status is Status.PASSED
    assert compare_bounded(out, wanted, operands).status is Status.PASSED
    hidden = out.clone()
    hidden[0, 0] = 0.5  # a ReLU by maximum turns NaN into a number
    for compare in (compare_nonfinite, compare_bounded):
        verdict = compare(hidden, wanted, operands)
        assert verdict.status is Status.FAILED and verdict.where["key"] == 0
    wrong = out.clone()
    wrong[0, 40] = math.nan
    assert compare_nonfinite(wrong, wanted, operands).status is Status.FAILED
    assert compare_bounded(wrong, wanted, operands).status is Status.FAILED


def test_bf16_infinity_before_the_relu_is_zero():
    """A key that is infinite where every query is negative gives -inf dots, which the ReLU makes 0: a finite logit."""
    operands = make_operands("bf16", ((4,),), 8, 4)
    operands.q[..., 0] = -1.0
    slot = operands.block_table[0, :1].long() * PAGE
    values, _ = read_keys(operands.kv_cache, "bf16", slot)
    values[0, 0] = math.inf
    write_keys(operands.kv_cache, "bf16", slot, values)
    wanted = expected(operands, Contract("bf16"))
    assert float(wanted.logits[0, 0]) == 0.0
    assert compare_bounded(simulate(operands, "bf16"), wanted, operands).status is Status.PASSED


def test_overflowable_cells_are_free():
    operands = make_operands("bf16", ((4,),), 8, 4)
    operands.weights.fill_(1e38)
    wanted = expected(operands, Contract("bf16"))
    assert bool(wanted.free[0].all()) and bool(wanted.bound[0].isinf().all())
    low, high = wanted.interval()
    assert bool((low == -math.inf).all()) and bool((high == math.inf).all())
    fp16 = Contract.from_dict({"layout": "bf16", "dot_dtype": "fp16"})
    operands = make_operands("bf16", ((4,),), 8, 4)
    operands.q.mul_(1000)
    wanted = expected(operands, fp16)
    assert bool(wanted.free.all()) and bool(torch.isfinite(wanted.bound).all())
    assert not bool(expected(operands, Contract("bf16")).free.any())


def test_negative_scale_is_refused():
    operands = make_operands("fp8", ((70,),), 8, 4)
    slot = int(operands.block_table[0, 1]) * PAGE + 2
    operands.kv_cache.flatten(1)[slot // PAGE, 64 * 128 :].view(torch.float32)[2] = -0.5
    with pytest.raises(ValueError, match=f"the scale of slot {slot} is -0.5; a negative scale cannot pass the ReLU"):
        expected(operands, Contract("fp8"))


def test_rows_and_chunks_do_not_change_the_result():
    operands = make_operands("fp8", ((70, 130, 0), (3, 66, 1), (0, 0, 0)), 8, 6)
    contract = Contract("fp8")
    whole = expected(operands, contract)
    for chunk in (1 << 12, 1 << 16, 1 << 20):
        part = expected(operands, contract, chunk_bytes=chunk)
        assert torch.allclose(part.logits, whole.logits, rtol=1e-13, atol=0)
        assert torch.allclose(part.bound, whole.bound, rtol=1e-12, atol=0)
    rows = torch.tensor([4, 0, 7])
    some = expected(operands, contract, rows)
    assert some.logits.shape == (3, 70) and some.lens.tolist() == [66, 70, 0]
    assert torch.allclose(some.logits, whole.logits[rows, :70], rtol=1e-13, atol=0)
    assert bool((some.logits[2] == -math.inf).all()) and not bool(some.bound[2].any())
    assert expected(operands, contract, torch.tensor([8])).logits.shape == (1, 0)
    with pytest.raises(ValueError, match="rows: expected int64"):
        expected(operands, contract, torch.tensor([0.5]))


def test_interval_is_outward_and_exact_infinities_are_points():
    operands = make_operands("bf16", ((70,),), 8, 6)
    wanted = expected(operands, Contract("bf16"))
    low, high = wanted.interval()
    assert bool((low < wanted.logits - wanted.bound).all()) and bool((high > wanted.logits + wanted.bound).all())
    exact = exact_expected(operands, Contract("bf16"))
    assert torch.equal(exact.interval()[0], exact.logits) and torch.equal(exact.interval()[1], exact.logits)


def test_flush_to_zero_widens_by_underflow_alone():
    operands = make_operands("bf16", ((70,),), 8, 6)
    plain = expected(operands, Contract("bf16")).bound
    flushing = expected(operands, Contract("bf16", flush_to_zero=True)).bound
    assert bool((flushing > plain).sum() >= 0) and torch.allclose(plain, flushing, rtol=1e-9)
    operands.weights.mul_(2.0**-120)
    plain = expected(operands, Contract("bf16")).bound
    flushing = expected(operands, Contract("bf16", flush_to_zero=True)).bound
    assert bool((flushing > 100 * plain).all())
    out = simulate(operands, "bf16")
    out[out.abs() < 2.0**-126] = 0
    assert compare_bounded(out, expected(operands, Contract("bf16", flush_to_zero=True)), operands).passed


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
    for contract in (
        Contract.default("fp8", torch.device("cpu")),
        Contract.default("fp8", torch.device("cuda"), capability=(9, 0)).verified(),
    ):
        found = expected(build(case), contract)
        assert found.logits[0, 58].isinf() and found.free[0, 58]
    decided = build(dataclasses.replace(case, only_heads=(2, 3)))
    found = expected(decided, Contract.default("fp8", torch.device("cpu")))
    assert found.logits[0, 58].isinf() and not found.free[0, 58]


def test_the_sign_under_an_infinite_scale_is_that_of_the_verified_dots():
    """A sum of 28 heads is -3 by exact dots and 10 by the model's of 13 bits: an H200 gives +inf."""
    case = parse_case(
        "v1 lens=40 layout=fp8 data=nonfinite request_ids=3 row_ids=1 page_ids=1876 only_heads=1,2,5,8,16,18,19,23,"
        "27..32,35,38,39,41,46,50,52..54,56,57,59,60 only_keys=120103"
    )
    contract = Contract.default("fp8", torch.device("cuda"), capability=(9, 0))
    coarse, fine = expected(build(case), contract), expected(build(case), contract.verified())
    assert coarse.logits[0, 39] == -math.inf and coarse.free[0, 39]
    assert fine.logits[0, 39] == math.inf and not fine.free[0, 39]

"""The statistical alarm: silent for correct orders of summation, loud for lost precision inside the proved bound."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parity.numerics.alarm import CASES, FACTOR, Alarm, emulate
from parity.numerics.arithmetic import Grouped
from parity.numerics.bounds import expected
from parity.ops.paged_logits.judge import Status, compare_bounded
from parity.selftest.numerics.test_bounds import BF16, FAULTS, SM_90, changed, ieee, simulate
from parity.selftest.operands import make_operands

LENGTHS = ((40, 70),)


def cases(kind: str = "octaves", count: int = CASES, layout: str = "bf16") -> list[Any]:
    return [make_operands(layout, LENGTHS, 16, seed, kind=kind) for seed in range(count)]


@pytest.mark.parametrize("kind", ["gauss", "octaves"])
@pytest.mark.parametrize("order", ["reversed", "pairwise", "lanes", "fused"])
def test_correct_orders_are_silent(kind, order):
    alarm = Alarm()
    for operands in cases(kind, 6):
        alarm.add(simulate(operands, "bf16", order), operands, BF16)
    assert max(alarm.ratios) < 2.5 and not alarm.possible
    assert alarm.verdict().status is Status.PASSED


def dots_in_18_bits(operands: Any) -> torch.Tensor:
    out = torch.full((operands.weights.shape[0], operands.max_context_len), -torch.inf)
    for head in range(operands.weights.shape[1]):
        one = changed(operands, weights=torch.zeros_like(operands.weights))
        one.weights[:, head] = 1.0
        dot = simulate(one, "bf16")  # with weight 1 the logit is the head's rectified dot
        dot = (dot.view(torch.int32) & ~0x3F).view(torch.float32)
        share = dot * operands.weights[:, head, None]
        out = share if head == 0 else out + share
    visible = torch.arange(out.shape[1]) < operands.context_lens.reshape(-1, 1)
    return torch.where(visible, out, -torch.inf)


LOST = {
    "weights in bf16": FAULTS["weights in bf16"],
    "dot in fp16": lambda o: simulate(o, "bf16", contract=ieee("bf16", "dot_dtype=fp16")),
    "dot in 18 bits": dots_in_18_bits,
}


@pytest.mark.parametrize("fault", LOST)
def test_lost_precision_is_loud(fault):
    alarm, inside = Alarm(), 0
    for operands in cases():
        out = LOST[fault](operands)
        alarm.add(out, operands, BF16)
        inside += compare_bounded(out, expected(operands, BF16), operands).passed
        assert alarm.possible
    assert inside == (CASES if fault == "dot in 18 bits" else 0)  # inside the proved bound, so only the alarm sees it
    assert alarm.fired and min(alarm.ratios) > FACTOR
    verdict = alarm.verdict(impl="mine", case="v1 x")
    assert verdict.status is Status.FAILED and "independent cases" in verdict.message
    assert verdict.message.endswith("parity run --case 'v1 x' --impl mine")


def test_one_correct_case_in_twenty_silences_it():
    alarm = Alarm(pairs=[(5.0, 1.0)] * 19)
    assert not alarm.fired and alarm.possible and alarm.verdict().status is Status.NOT_RUN
    assert Alarm(pairs=[*alarm.pairs, (5.0, 1.0)]).fired
    assert Alarm(pairs=[*alarm.pairs, (4.0, 1.0)]).verdict().status is Status.PASSED
    assert not Alarm(pairs=[*alarm.pairs, (4.0, 1.0), (5.0, 1.0)]).fired


def test_small_and_error_free_cases_do_not_count():
    alarm = Alarm()
    for some in (make_operands("bf16", ((9, 9),), 16), make_operands("bf16", LENGTHS, 16, kind="integers")):
        assert alarm.add(simulate(some, "bf16"), some, BF16) is None
    assert not alarm.pairs


@pytest.mark.parametrize("roundings", ["", "dot_dtype=bf16", "operand_dtype=bf16 out_dtype=bf16"])
def test_emulator_keeps_its_contract(roundings):
    contract = ieee("fp8", roundings)
    operands = make_operands("fp8", ((70, 130), (0, 9)), 16, 1)
    emulated = emulate(operands, contract).logits
    out = torch.full((4, operands.max_context_len), -torch.inf)
    out[:, : emulated.shape[1]] = emulated.float()
    assert compare_bounded(out, expected(operands, contract), operands).passed
    assert torch.equal(out, simulate(operands, "fp8", contract=contract))


def test_grouped_contract_is_emulated_by_its_model():
    alarm, coarser = Alarm(), Alarm()
    for operands in cases("gauss", CASES, "fp8"):
        pair = alarm.add(simulate(operands, "fp8", model=Grouped(32, 13, 13)), operands, SM_90)
        assert pair is not None and pair[0] < 1.1 * pair[1]
        coarser.add(simulate(operands, "fp8", model=Grouped(32, 9, 9)), operands, SM_90)
    assert coarser.fired

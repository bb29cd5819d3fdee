"""Each comparator against its nearest wrong answer, the wording of its message, and how examples add up."""

from __future__ import annotations

import dataclasses
import json
import math
import types
from typing import Any

import pytest
import torch

from parity.domain.contract import Contract
from parity.numerics.blocks import Expected
from parity.ops.paged_logits.judge import (
    Status,
    Verdict,
    compare_bits,
    compare_bounded,
    compare_exact,
    compare_nonfinite,
    compare_tail,
    merge,
)
from parity.results import Labels, Row

BOUND = 2.0**-20


def little(clean_logits: bool = True) -> tuple[types.SimpleNamespace, Expected, torch.Tensor]:
    """Two requests of two rows, lengths 70, 3 and 0, 66; logits 1 + key / 4, bound 2**-20. A correct output."""
    operands = types.SimpleNamespace(
        case="v1 little",
        context_lens=torch.tensor([[70, 3], [0, 66]], dtype=torch.int32),
        block_table=torch.tensor([[5, 2, -1], [9, 4, -1]], dtype=torch.int32),
        max_context_len=192,
        clean_logits=clean_logits,
    )
    lens = operands.context_lens.reshape(-1).long()
    visible = torch.arange(70) < lens[:, None]
    logits = torch.where(visible, 1 + torch.arange(70, dtype=torch.float64) / 4, -math.inf)
    expected = Expected(
        logits=logits,
        bound=torch.where(visible, BOUND, 0.0).double(),
        free=torch.zeros_like(visible),
        nan_ok=torch.zeros_like(visible),
        rows=torch.arange(4),
        lens=lens,
    )
    out = torch.full((4, 192), -math.inf)
    out[:, :70] = logits.float()
    return operands, expected, out


def test_at_the_bound_passes_and_one_ulp_beyond_fails():
    operands, expected, out = little()
    out[0, 0] = 1 + BOUND
    verdict = compare_bounded(out, expected, operands)
    assert verdict.passed and verdict.ratio == 1.0 and verdict.cells == 139
    out[0, 0] = torch.nextafter(out[0, 0], torch.tensor(2.0))
    verdict = compare_bounded(out, expected, operands)
    assert verdict.status is Status.FAILED and verdict.ratio is not None and 1 < verdict.ratio < 1.2
    assert verdict.where == {
        "request": 0,
        "row": 0,
        "draft": 0,
        "key": 0,
        "logical_page": 0,
        "physical_page": 5,
        "slot": 320,
    }
    out[0, 0] = 1 - 2 * BOUND
    assert compare_bounded(out, expected, operands).status is Status.FAILED


def test_message_names_place_got_wanted_bound_ratio_and_repro_in_this_order():
    operands, expected, out = little()
    out[3, 65] += 0.5
    out[3, 64] += 0.25
    verdict = compare_bounded(out, expected, operands, impl="mine")
    assert verdict.where["slot"] == 4 * 64 + 1 and verdict.where["draft"] == 1
    assert verdict.message == (
        "request 1, row 3, key 65, page 1 at 4, slot 257; got 17.75; wanted 17.25; bound 9.54e-07; ratio 5.24e+05; "
        "2 of 139 cells wrong, in 1 of 4 rows; parity run --case 'v1 little' --impl mine"
    )
    assert verdict.repro.endswith("--impl mine")
    assert json.loads(json.dumps(Row.of(verdict, "mine").to_json()))["status"] == "failed"


def test_exact_comparison_has_no_tolerance_but_for_the_sign_of_zero():
    operands, expected, out = little()
    assert compare_exact(out, expected, operands).passed
    out[3, 65] = torch.nextafter(out[3, 65], torch.tensor(math.inf))
    verdict = compare_exact(out, expected, operands)
    assert verdict.status is Status.FAILED and (verdict.where["row"], verdict.where["key"]) == (3, 65)
    operands, expected, out = little()
    expected.logits[0, 0], out[0, 0] = 0.0, -0.0
    assert compare_exact(out, expected, operands).passed
    out[0, 0] = math.nan
    assert compare_exact(out, expected, operands).status is Status.FAILED


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_nonfinite_value_where_a_finite_one_is_expected_fails(value):
    operands, expected, out = little()
    out[1, 2] = value
    for verdict in (compare_bounded(out, expected, operands), compare_nonfinite(out, expected, operands)):
        assert verdict.status is Status.FAILED
        assert (verdict.where["request"], verdict.where["row"], verdict.where["key"]) == (0, 1, 2)
    assert compare_bounded(out, expected, operands).ratio == math.inf
    expected.free[1, 2] = True
    assert compare_bounded(out, expected, operands).passed and compare_nonfinite(out, expected, operands).passed


def test_free_cells_still_bound_finite_values():
    operands, expected, out = little()
    expected.free[1, 2] = True
    out[1, 2] += 1
    assert compare_bounded(out, expected, operands).status is Status.FAILED


@pytest.mark.parametrize(
    "wanted, wrong", [(math.nan, 1.0), (math.inf, math.nan), (math.inf, -math.inf), (-math.inf, 0)]
)
def test_classes_of_nonfinite_logits(wanted, wrong):
    operands, expected, out = little()
    expected.logits[0, 7] = out[0, 7] = wanted
    expected.bound[0, 7] = 0.0
    for compare in (compare_bounded, compare_nonfinite):
        assert compare(out, expected, operands).passed
    bad = out.clone()
    bad[0, 7] = wrong
    for compare in (compare_bounded, compare_nonfinite):
        verdict = compare(bad, expected, operands)
        assert verdict.status is Status.FAILED and verdict.where["key"] == 7
    loose = Contract("bf16", nonfinite="unspecified")
    assert compare_bounded(bad, expected, operands, contract=loose).passed
    assert compare_nonfinite(bad, expected, operands, contract=loose).status is Status.UNSUPPORTED
    expected.nan_ok[0, 7] = True
    out[0, 7] = math.nan
    assert compare_bounded(out, expected, operands).passed


def test_tail():
    operands, _, out = little()
    verdict = compare_tail(out, operands)
    assert verdict.passed and verdict.cells == 4 * 192 - 139
    for value in (0.0, math.nan, math.inf, 3.5):
        bad = out.clone()
        bad[1, 3] = value
        verdict = compare_tail(bad, operands)
        assert verdict.status is Status.FAILED and "past the context length 3" in verdict.message
        assert (verdict.where["row"], verdict.where["key"]) == (1, 3)
        last = out.clone()
        last[2, 191] = value
        assert compare_tail(last, operands).where["key"] == 191
        assert compare_tail(bad, operands, Contract("bf16", tail="unspecified")).cells == 0
        assert compare_tail(bad, little(clean_logits=False)[0]).passed


def test_bits_see_what_equality_does_not():
    operands, _, out = little()
    other = out.clone()
    other[:, 150:] = 7.0  # the tail is not read
    assert compare_bits(out, other, operands).passed
    other[0, 3] = math.nan
    mine = out.clone()
    mine[0, 3] = math.nan
    assert compare_bits(mine, other, operands).passed
    mine[1, 1], other[1, 1] = 0.0, -0.0
    verdict = compare_bits(mine, other, operands)
    assert verdict.status is Status.FAILED and verdict.where["row"] == 1
    order = torch.tensor([3, 2, 1, 0])
    assert compare_bits(out, out[order], operands, rows=torch.arange(4), other_rows=order).passed


def test_wrong_shape_and_type_fail_with_a_sentence():
    operands, expected, out = little()
    answers: list[tuple[Any, str]] = [
        (out[:3], "got torch.float32 [3, 192]; wanted torch.float32 [4, 192]"),
        (out.bfloat16(), "got torch.bfloat16 [4, 192]; wanted torch.float32 [4, 192]"),
        (None, "got NoneType; wanted a float32 tensor [4, 192]"),
    ]
    for bad, said in answers:
        for verdict in (
            compare_bounded(bad, expected, operands),
            compare_exact(bad, expected, operands),
            compare_nonfinite(bad, expected, operands),
            compare_tail(bad, operands),
        ):
            assert verdict.status is Status.FAILED and verdict.message.startswith(said)


def test_resolution_and_merging():
    fine = Verdict(Status.PASSED, "rounding", "x", ratio=0.5, resolution=1e-4, cells=10)
    coarse = dataclasses.replace(fine, resolution=0.06, ratio=0.1)
    exact = dataclasses.replace(fine, resolution=None, ratio=None)
    empty = dataclasses.replace(fine, cells=0, resolution=None, ratio=0.0)
    assert merge([fine, coarse, fine]).status is Status.PASSED
    assert merge([fine, coarse, fine]).ratio == 0.5 and merge([fine, coarse, fine]).resolution == 1e-4
    for examples in ([coarse], [coarse, exact], [empty], [dataclasses.replace(fine, undecided=0.3)]):
        merged = merge(examples)
        assert merged.status is Status.VACUOUS and merged.message, examples
    assert merge([dataclasses.replace(fine, undecided=0.2)]).passed
    # A coarse bound of a grouped dot is carried by exact data; never that of an ieee or a verified one.
    grouped = Contract.default("fp8", "cuda", capability=(9, 0))
    merged = merge([coarse, exact], grouped.coarse)
    assert merged.passed and "together with exact data" in merged.note and "grouped(32, 13, 13)" in merged.note
    assert merge([coarse], grouped.coarse).status is Status.VACUOUS
    assert merge([coarse, exact], grouped.verified().coarse).status is Status.VACUOUS
    assert merge([coarse, exact], Contract("fp8").coarse).status is Status.VACUOUS


def test_first_failure_decides_and_nothing_is_not_run():
    fine = Verdict(Status.PASSED, ratio=0.5, resolution=1e-4, cells=10)
    failed = Verdict(Status.FAILED, message="here", ratio=7.0, cells=10)
    error = Verdict(Status.ERROR, message="crash")
    assert merge([fine, error, failed]).message == "here" and merge([fine, error, failed]).ratio == 7.0
    assert merge([fine, error]).status is Status.ERROR
    assert merge([]).status is Status.NOT_RUN
    assert merge([Verdict(Status.UNSUPPORTED, message="no")]).message == "no"
    assert merge([Verdict(Status.UNSUPPORTED, message="no"), fine]).passed
    against = [Status.FAILED, Status.VACUOUS, Status.INCOMPLETE, Status.ERROR]
    assert [s for s in Status if s.counts_against] == against


def test_zero_logits_have_no_resolution_to_speak_of():
    operands, expected, out = little()
    zero = dataclasses.replace(expected, logits=torch.where(expected.visible(), 0.0, expected.logits))
    out[:, :70] = zero.logits.float()
    verdict = compare_bounded(out, zero, operands)
    assert verdict.passed and verdict.resolution == math.inf
    nothing = types.SimpleNamespace(**{**vars(operands), "context_lens": torch.zeros(2, 2, dtype=torch.int32)})
    blank = Expected.empty(nothing, None)
    verdict = compare_bounded(torch.full((4, 192), -math.inf), blank, nothing)
    assert verdict.passed and verdict.cells == 0 and verdict.resolution is None


def test_repro_is_absent_without_a_case():
    assert Labels().repro == "" and "parity run" not in Labels().failed(note="x").message

"""The probe on simulated units: it finds every parameter by itself, and says so where no grouped model fits."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest
import torch

from impl import configs
from parity.numerics.arithmetic import Grouped
from parity.selftest.helpers import python
from parity.tensorcore.probe import compare_models, compare_on, tile_shapes
from parity.tensorcore.probe_check import DISTRIBUTIONS, count_mismatches, draw, probe
from parity.tensorcore.probe_search import DotUnit, search

UNITS = [
    ("bf16", Grouped(16, 25, 23)),
    ("e4m3", Grouped(32, 13, 13)),
    ("e4m3", Grouped(32, 13, 13, running=False)),
    ("bf16", Grouped(8, 24, 23)),
    ("fp16", Grouped(8, 24, 23)),
    ("fp16", Grouped(16, 25, 23, rounding="nearest")),
    ("tf32", Grouped(4, 24, 23)),
    ("tf32", Grouped(8, 25, 23)),
    ("e4m3", Grouped(16, 13, 13)),
    ("e4m3", Grouped(32, 25, 23)),
    ("e4m3", Grouped(64, 17, 15, cut="down")),
    ("bf16", Grouped(32, 20, 18, rounding="nearest")),
    ("bf16", Grouped(16, 22, 19, product_exponent="product")),
    ("e4m3", Grouped(32, 13, 13, subnormals="normalised")),
    ("e4m3", Grouped(32, 13, 13, subnormals="minimum, zeros too")),
    ("bf16", Grouped(128, 24, 23)),
    ("e4m3", Grouped(16, 14, 13, rounding="down")),
]


def unit(operand: str, model: Grouped, **changes: object) -> DotUnit:
    return DotUnit(operand, model.exact_dot, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("operand, model", UNITS, ids=[f"{operand} {model}" for operand, model in UNITS])
def test_finds_the_model_of_a_card_by_itself(operand, model):
    finding = probe(unit(operand, model), tiles=1)
    assert finding.model == model, "\n".join(finding.lines())
    assert finding.unexplained == 0 and not any(finding.mismatches.values())
    assert {d.parameter for d in finding.decided} == {f.name for f in dataclasses.fields(Grouped)} - {"known_order"}
    assert all(d.reason for d in finding.decided)


@pytest.mark.parametrize("rows, columns", [(64, 16), (16, 64), (128, 32)])
def test_tile_shapes_of_every_kind(rows, columns):
    model = Grouped(32, 13, 13)
    finding = probe(unit("e4m3", model, rows=rows, columns=columns), tiles=1)
    assert finding.model == model and finding.dots == 5 * rows * columns


def sequential(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """An IEEE float32 dot that rounds every product and addition to nearest."""
    out = torch.zeros(*a.shape[:-1], b.shape[-2])
    for d in range(a.shape[-1]):
        out = out + a[..., :, None, d].float() * b[..., None, :, d].float()
    return out


def pairwise(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    terms = a.float()[..., :, None, :] * b.float()[..., None, :, :]
    while terms.shape[-1] > 1:
        terms = terms[..., ::2] + terms[..., 1::2]
    return terms[..., 0]


@pytest.mark.parametrize("dot, operand", [(sequential, "bf16"), (sequential, "e4m3"), (pairwise, "bf16")])
def test_an_ieee_dot_is_no_grouped_model_but_within_its_bound(dot, operand):
    finding = probe(DotUnit(operand, dot, rows=32, columns=32), tiles=1)
    if finding.model is not None:  # groups of one added in float32: the sum in sequence, found as what it is
        assert dot is sequential and finding.model.group == 1
    else:
        assert finding.ieee_ratio <= 1 and "ieee float32" in finding.lines()[0]
        assert "closest is grouped(" in finding.lines()[1]


def test_interleaved_groups_are_reported_as_unexplained():
    order = torch.arange(128).view(2, 64).t().flatten()
    model = Grouped(16, 25, 23)
    strange = DotUnit("bf16", lambda a, b: model.exact_dot(a[..., order], b[..., order]))
    finding = probe(strange, tiles=1)
    assert finding.model is None and sum(finding.mismatches.values()) > 0
    assert "no grouped model" in finding.lines()[0] or "no model" in finding.lines()[0]


def test_a_single_wrong_dot_is_counted():
    model = Grouped(32, 13, 13)

    def nearly(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = model.exact_dot(a, b)
        if a.shape[0] == 2:
            out[1, 3, 5] += 1.0
        return out

    assert count_mismatches(unit("e4m3", model), model, 20_000) == (0, 20_480)
    assert count_mismatches(DotUnit("e4m3", nearly), model, 40_000) == (5, 40_960)


def test_moved_parameters_do_not_verify():
    truth = Grouped(32, 13, 13)
    for change in ({"kept": 14}, {"final": 12}, {"group": 16}, {"subnormals": "normalised"}, {"running": False}):
        wrong, dots = count_mismatches(unit("e4m3", truth), dataclasses.replace(truth, **change), 65_536)
        assert wrong > 0 and dots >= 65_536, change


def test_distributions_are_what_their_names_say():
    some = unit("e4m3", Grouped(32, 13, 13))
    for name in DISTRIBUTIONS:
        a, b = (x.float() for x in draw(some, name, 2, 3))
        assert a.shape == (2, 64, 128) and b.shape == (2, 64, 128)
        assert torch.equal(a, draw(some, name, 2, 3)[0].float())
        if name == "positive":
            assert bool((a >= 0).all())
        if name == "few terms":
            assert 0.02 < float((a != 0).float().mean()) < 0.12
        if name == "heavy-tailed":
            assert bool((a[:, ::4].abs() < 2.0**-6).all())  # whole rows of subnormal operands
        if name == "cancellation":
            dot, sizes = a @ b.mT, a.abs() @ b.abs().mT
            assert float((dot.abs() / sizes).median()) < 0.02


def test_report_is_json_and_names_what_decided():
    finding = probe(unit("e4m3", Grouped(32, 13, 13)), tiles=1)
    assert json.loads(json.dumps(finding.as_dict()))["model"]["group"] == 32
    text = "\n".join(finding.lines())
    assert text.startswith("e4m3: grouped(32, 13, 13), 0 of 20,480 random dots differ")
    assert "kept = 13: 1 + 2**-d - 1 keeps 2**-d up to d = 13; 2**-14 gave 0" in text
    assert "group = 32: two products of 2**-14 at 0 and 1 vanish next to +-1 at 2 to 31, not at 32" in text
    assert "1 * 1 - 1 * 1 = 0" in text


def test_specials_of_bf16_are_reported():
    model = Grouped(16, 25, 23)

    def other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.nan_to_num(model.exact_dot(a, b), 0.0, 3e38, -3e38)

    notes = probe(DotUnit("bf16", other), tiles=1).notes
    assert "NaN * 1 = 0, the model says nan" in notes and "inf * 1 = 3e+38, the model says inf" in notes
    assert "1 * 1 - 1 * 1 = 0" in notes


def test_the_search_remembers_its_trials():
    model, _, trials = search(unit("bf16", Grouped(16, 25, 23)))
    assert trials.disagreements(model) == 0
    assert trials.disagreements(dataclasses.replace(model, kept=24)) > 0


def test_stored_models_are_verified_or_contradicted_by_todays_card():
    hopper = {"bf16": Grouped(16, 25, 23), "e4m3": Grouped(32, 13, 13)}
    found = compare_models("sm_90", lambda operand: unit(operand, hopper[operand]))
    assert [(r.operand, r.verified) for r in found] == [("bf16", True), ("e4m3", True)]
    assert str(found[1]) == "sm_90 e4m3 grouped(32, 13, 13), verified on 81,920 dots"
    hopper["e4m3"] = Grouped(32, 14, 13)
    found = compare_models("sm_90", lambda operand: unit(operand, hopper[operand]))
    assert [r.verified for r in found] == [True, False] and "the proved bound serves" in str(found[1])
    assert compare_models("sm_1", lambda operand: unit(operand, hopper[operand])) == []
    assert compare_on("cpu") == []


def test_tile_shapes_are_those_of_the_kernels():
    for layout in ("bf16", "fp8"):
        shapes = tile_shapes(90, layout)
        for config in configs.every(90):
            if config.layout == layout:
                assert (config.block, config.columns, config.num_warps) in shapes
        assert len(set(shapes)) == len(shapes) and shapes[0][0] * shapes[0][1] == max(m * n for m, n, _ in shapes)
    assert tile_shapes(80, "fp8") == []


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from parity.tensorcore.probe_kernel import tile_dots
names = {"ROWS": 128, "COLUMNS": 64, "DEPTH": 128, "IMPRECISE": 32, "TF32": False}
signature = {"a": "*fp8e4nv", "b": "*fp8e4nv", "out": "*fp32", **dict.fromkeys(names, "constexpr")}
attrs = {(i,): [["tt.divisibility", 16]] for i in range(3)}
source = ASTSource(fn=tile_dots, signature=signature, constexprs=names, attrs=attrs)
kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
assert "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3" in kernel.asm["ptx"], kernel.asm["ptx"]
"""


def test_questions_go_through_the_instruction_that_the_kernels_use():
    pytest.importorskip("triton")
    python(COMPILE)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_this_card_verifies_in_two_seconds():
    compare_on("cuda", dots=1)  # compiles
    start = time.perf_counter()
    assert all(result.verified for result in compare_on("cuda"))
    assert time.perf_counter() - start < 2


def test_the_quick_check_imports_nothing_large():
    """A session waits for it. torch.broadcast_shapes by itself once brought sympy, and with it two seconds."""
    text = (
        "import sys, torch\n"
        "from parity.numerics.arithmetic import Grouped\n"
        "from parity.tensorcore.probe_check import count_mismatches\n"
        "from parity.tensorcore.probe_search import DotUnit\n"
        "before = set(sys.modules)\n"
        "model = Grouped(32, 13, 13)\n"
        "assert count_mismatches(DotUnit('e4m3', model.exact_dot), model, 5) == (0, 20480)\n"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    )
    imported = python(text).split()
    assert "sympy" not in imported and len(imported) < 5, imported

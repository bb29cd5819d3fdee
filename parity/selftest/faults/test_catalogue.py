"""The catalogue of fault models: complete in kinds, unique in names, buildable; and correct where nothing changes."""

import re

import pytest
import torch

from parity.faults import building, catalogue
from parity.numerics.bounds import exact_expected
from parity.ops import fault as model
from parity.ops.paged_logits.faults import staged as staged_logits
from parity.ops.paged_logits.judge import compare_exact
from parity.ops.paged_logits.operands import build_logits
from parity.ops.topk.faults import staged as staged_topk
from parity.ops.topk.operands import build_topk
from parity.pages.layout import find
from parity.run.operation import parse_case
from parity.run.runner import poisoned_allocations

REPORT = re.compile(r"[\w.-]+/[\w.-]+#\d+(, [\w.-]+/[\w.-]+#\d+)*")


def test_the_catalogue_has_every_kind_several_times():
    models = catalogue.MODELS
    assert len(models) >= 100
    kinds = [fault.kind for fault in models if not fault.equivalent]
    assert set(kinds) == set(model.KINDS) and len(model.KINDS) == 13
    assert min(kinds.count(kind) for kind in model.KINDS) >= 4
    assert {fault.op for fault in models} == {"paged_logits", "topk", "store", "compressor"}


def test_names_sentences_and_reports_are_well_formed():
    for fault in catalogue.MODELS:
        assert re.fullmatch(r"[a-z0-9-]+", fault.id), fault.id
        assert len(fault.sentence) >= 12, fault.id
        assert not fault.sentence.endswith("."), fault.id
        assert fault.report == "" or REPORT.fullmatch(fault.report), fault.id
        assert fault.equivalent == "" or len(fault.equivalent) > 60, fault.id


def test_half_of_a_model_is_a_function_of_its_name():
    halves = [fault.half for fault in catalogue.MODELS]
    assert halves.count("A") > 100 < halves.count("B")
    assert catalogue.BY_ID["relu-missing"].half == catalogue.BY_ID["relu-missing"].half


def test_a_model_changes_something_and_names_its_kind():
    with pytest.raises(ValueError, match="kind"):
        model.Fault("x", "relu", "nonsense", "says nothing", op="topk", change={"relu": abs})
    with pytest.raises(ValueError, match="both or neither"):
        model.Fault("x", "relu", "formula", "says nothing", op="topk")


@pytest.mark.parametrize(
    "text",
    [
        "x: says nothing",
        "x (relu formula): says nothing",
        "x (relu, formula): ends in a stop.",
        "x (relu, formula): a report without number [owner/repository].",
        "X (relu, formula): says nothing",
    ],
)
def test_a_description_that_cannot_be_read_is_refused(text):
    _, fault = model.collector("topk")
    with pytest.raises(ValueError, match="a model is described as"):
        fault(text)


def test_a_description_becomes_the_fields_of_a_model():
    models, fault = model.collector("store")

    def same(function):
        return function

    fault("x-1 (quant, bytes): read as [heads, rows] [o/r.x#1, o/s#22]", layout="fp8", contract={"scale": "pow2"}).by(
        codes=abs, equivalent="none"
    )
    fault("y (a-b, rows): read as [heads, rows]").by(wrap=same)
    x, y = models
    assert (x.id, x.step, x.kind, x.sentence) == ("x-1", "quant", "bytes", "read as [heads, rows]")
    assert (x.report, x.op, x.layout, x.equivalent) == ("o/r.x#1, o/s#22", "store", "fp8", "none")
    assert (x.change, x.extra) == ({"codes": abs}, {"contract": {"scale": "pow2"}})
    assert (y.sentence, y.report, y.layout, y.change, y.wrap) == ("read as [heads, rows]", "", "bf16", {}, same)


@pytest.mark.parametrize("fault", catalogue.MODELS, ids=lambda fault: fault.id)
def test_every_model_builds_a_function_with_its_own_memory(fault):
    if {"compile", "route"} & set(fault.extra):
        return
    assert building.function(fault) is not building.function(fault)


CASES = (
    "v1 lens=130,70,5,64 next_n=2 heads=8 perm=5 tail=huge gap=48 strides=q+table+weights",
    "v1 lens=0,1,63 heads=16 seed=3 perm=9 poison=canary tail=canary max_len=90 width=3 data=exact_wide",
)


@pytest.mark.parametrize("text", CASES)
@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_the_staged_logits_are_exact_on_exact_data(text, layout):
    operands = build_logits(parse_case(f"{text} layout={layout}" if layout != "bf16" else text))
    with poisoned_allocations():
        out = staged_logits.function(layout)(**operands.kwargs())
    wanted = exact_expected(operands, building.contract("paged_logits", layout))
    assert compare_exact(out, wanted, operands).passed


def test_the_staged_topk_is_that_of_sorting():
    operands = build_topk(
        parse_case("v1 lens=700,3,512,0 next_n=2 stage=topk data=few k=64 perm=4 clean=no poison=canary")
    )
    slots, positions = staged_topk.function()(**operands.kwargs())
    from parity.ops.paged_logits.checks.selection import image, plain_topk

    wanted = plain_topk(operands.logits, operands.context_lens.reshape(-1), 64)
    assert torch.equal(positions, wanted)
    assert torch.equal(slots, image(wanted, operands.block_table[torch.arange(4) // 2]))


def test_memory_outside_of_pool_and_table_reads_some_other_place():
    operands = build_logits(parse_case("v1 lens=65 heads=8"))
    tables = operands.context_lens, operands.block_table
    call = staged_logits.Call(find("bf16"), operands.q, operands.kv_cache, operands.weights, *tables, 65, True)
    far = torch.tensor([1 << 40, -5])
    assert call.load(far).shape == far.shape
    assert call.entry(far, far).shape == far.shape

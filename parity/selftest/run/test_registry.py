"""Implementations: built-in names and routes, and every way in which a user's function cannot be loaded."""

import os
import re

import pytest
import torch

from parity.run import interpreter, worker
from parity.run.loading import SpecError
from parity.run.operation import parse_case
from parity.run.processes import search_path
from parity.run.registry import builtin, choose, load
from parity.run.runner import InProcess
from parity.run.worker import Worker
from parity.selftest.helpers import CPU, FAULTY

KERNELS = ("torch-bf16", "torch-fp8", "triton-bf16", "triton-fp8")
CASE = "v1 lens=65,3 heads=8 seed=2"


def test_every_builtin_is_listed_with_its_contract():
    found = builtin(CPU)
    assert tuple(found)[:5] == (*KERNELS, "topk") and all(name.startswith("store-") for name in tuple(found)[5:])
    assert [found[name].layout for name in KERNELS] == ["bf16", "fp8", "bf16", "fp8"]
    assert all(impl.name == name == impl.arguments[1] for name, impl in found.items())
    assert all((impl.op, impl.layout) == (impl.contract.op, impl.contract.layout) for impl in found.values())
    assert found["topk"].op == "topk" and found["triton-bf16"].contract.batch_invariant


def test_builtins_are_chosen_by_operation_and_layout():
    """A layout by itself means paged logits; an operation without pages is not narrowed by a layout."""
    assert tuple(choose(CPU, None, None)) == tuple(builtin(CPU))
    assert tuple(choose(CPU, None, "fp8")) == tuple(choose(CPU, "paged_logits", "fp8")) == KERNELS[1::2]
    assert tuple(choose(CPU, "topk", "fp8")) == ("topk",)
    assert {impl.layout for impl in choose(CPU, "store", "fp4").values()} == {"fp4"}
    with pytest.raises(SpecError, match="no built-in implementation of compressor"):
        choose(CPU, "compressor", None)


@pytest.mark.parametrize("name", KERNELS)
def test_the_chosen_route_ran(name):
    impl = builtin(CPU)[name]
    if impl.absent:
        pytest.skip(impl.absent)
    outcome = InProcess(impl, CPU).run(parse_case(f"{CASE} layout={impl.layout}"))
    assert outcome.complaint is None
    assert outcome.route == name.split("-")[0]
    assert outcome.launches == (1 if impl.kernel == "triton" and interpreter.interpreting() else 0)


def test_a_silent_fallback_is_an_error(monkeypatch):
    """The dispatcher reports another path than the one that was chosen."""
    from impl import dispatch

    impl = builtin(CPU)["torch-bf16"]
    monkeypatch.setattr(dispatch, "last_route", lambda: dispatch.Route("triton", "k", "because"))
    outcome = InProcess(impl, CPU).run(parse_case(CASE))
    assert outcome.output is None
    assert "ran triton instead of torch" in (outcome.error or "")


def test_flags_are_put_back(monkeypatch):
    monkeypatch.setenv("TRITON_INDEXER", "0")
    monkeypatch.delenv("TRITON_INDEXER_STRICT", raising=False)
    InProcess(builtin(CPU)["torch-bf16"], CPU).run(parse_case(CASE))
    assert os.environ["TRITON_INDEXER"] == "0" and "TRITON_INDEXER_STRICT" not in os.environ


def test_triton_without_device_or_interpreter_is_absent_with_a_reason(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET" in (builtin(CPU)["triton-bf16"].absent or "")


def refused(*arguments, **named):
    with pytest.raises(SpecError) as caught:
        load(*arguments, **named)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_wrong_specs_are_one_sentence():
    assert "expected one of torch-bf16" in refused("torch-bf17")
    assert "expected a built-in name (parity list), module:function" in refused(":f")
    assert "there is no file" in refused("no/such/file.py:f", "bf16")
    assert re.search("no module 'no_such_module'", refused("no_such_module:f", "bf16"))
    assert "has no 'nothing'" in refused(f"{FAULTY}:nothing", "bf16")
    assert "expected a function" in refused(f"{FAULTY}:no_function", "bf16")
    assert "say which of the layouts" in refused(f"{FAULTY}:correct")
    assert "op: expected one of paged_logits, topk" in refused(f"{FAULTY}:correct", "bf16", "scores")
    assert "must be one of bf16, fp8, fp4, got 'fp9'" in refused(f"{FAULTY}:correct", "fp9")


def test_builtin_names_refuse_what_they_are_not():
    assert "reads bf16 pages" in refused("torch-bf16", "fp8")
    assert "is a function of paged_logits, got topk" in refused("torch-bf16", None, "topk")
    assert "op: expected one of paged_logits" in refused("torch-bf16", None, "scores")


def test_a_broken_import_is_named(tmp_path):
    for name, text, wanted in (
        ("syntax", "def f(:\n", "SyntaxError"),
        ("missing", "import no_such_thing_at_all\n", "no_such_thing_at_all"),
        ("dies", "import os\nos._exit(5)\n", "code 5"),
        ("leaves", "import sys\nsys.exit(4)\n", "sys.exit(4)"),
    ):
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        assert wanted in refused(f"{file}:f", "bf16")


def test_contract_file_and_attribute(tmp_path):
    file = tmp_path / "contract.toml"
    file.write_text('layout = "bf16"\nout_dtype = "bf16"\n')
    impl = load(f"{FAULTY}:correct", contract_path=str(file))
    assert impl.contract.out_dtype == torch.bfloat16
    assert impl.arguments == ("--impl", f"{FAULTY}:correct", "--layout", "bf16", "--contract", str(file))
    assert load(f"{FAULTY}:logits_bf16_declared").contract.out_dtype == torch.bfloat16
    assert load("torch-bf16", contract_path=str(file)).contract.out_dtype == torch.bfloat16
    file.write_text("layout = 7\n")
    assert "layout" in refused(f"{FAULTY}:correct", contract_path=str(file))
    assert "cannot be read" in refused(f"{FAULTY}:correct", contract_path=str(tmp_path / "none.toml"))
    topk = load(f"{FAULTY}:topk_correct")
    assert (topk.op, topk.layout, topk.arguments) == ("topk", "", ("--impl", f"{FAULTY}:topk_correct", "--op", "topk"))


def test_a_contract_for_other_devices_makes_it_absent(tmp_path):
    file = tmp_path / "contract.toml"
    file.write_text('layout = "bf16"\ndevices = ["sm_90"]\n')
    assert "sm_90" in (load(f"{FAULTY}:correct", contract_path=str(file)).absent or "")


def test_modules_come_from_pythonpath_before_the_current_folder(tmp_path, monkeypatch):
    """The current folder comes last, so that a file there shadows nothing."""
    text = FAULTY.read_text()
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "kernel_of_mine.py").write_text(text)
    (tmp_path / "here" / "json.py").write_text("raise RuntimeError('shadowed')\n")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))  # as `python -m` does
    assert search_path()[-1] == str(tmp_path / "here")
    worker.shared().stop()
    impl = load("kernel_of_mine:correct", "bf16")
    assert Worker(impl, CPU).run(parse_case(CASE)).complaint is None
    worker.shared().stop()

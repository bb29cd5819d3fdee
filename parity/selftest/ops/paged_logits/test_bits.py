"""Level bits on a simulated GPU: right kernels pass, their nearest wrong ones fail; and who is judged by a model."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parity.domain.contract import Contract
from parity.domain.profiles import profile
from parity.golden.stored import StoredError
from parity.numerics.arithmetic import named_model
from parity.numerics.headsum import HeadSum
from parity.ops.check import find_check, judge_one
from parity.ops.paged_logits import predicted
from parity.ops.paged_logits.checks import bits
from parity.results import Status, merge
from parity.run.implementation import Implementation
from parity.run.operation import find, parse_case
from parity.run.registry import load
from parity.run.runner import InProcess
from parity.run.worker import runner_for
from parity.selftest.helpers import CPU
from parity.selftest.simulated_gpu import IMPRECISE, RULE, dots_function, logits_function, order_for, simulated
from parity.suite.search import run_check
from parity.suite.session import Session, row
from parity.tensorcore import verification as arithmetic
from parity.tensorcore.probe import Verified

LOGITS = find("paged_logits")
CASE = parse_case("v1 lens=70,130 next_n=2 layout=fp8 heads=16 data=octaves seed=5 perm=3")


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    """Nothing is compiled here: the simulated kernels follow the order on record."""
    monkeypatch.setattr(bits, "order_of", lambda runner, case: order_for(case.heads))


def judged(check, case=CASE, **changes):
    return judge_one(find_check(f"bits/{check}", LOGITS), InProcess(simulated(**changes), CPU), case)


@pytest.mark.parametrize("check", ["dots", "logits"])
def test_a_right_kernel_passes(check):
    found = run_check(find_check(f"bits/{check}", LOGITS), InProcess(simulated(), CPU), profile("smoke", examples=6))
    assert found.verdict.status is Status.PASSED and found.verdict.cells > 100, found.verdict.message


@pytest.mark.parametrize(
    "model", [IMPRECISE, replace(RULE, kept=14), replace(RULE, final=12), replace(RULE, group=16)], ids=str
)
def test_dots_of_another_arithmetic_fail(model):
    found = judged("dots", companion=dots_function(model))
    assert found.status is Status.FAILED
    assert "dots are not those of grouped(32, 13, 13)" in found.message and "head " in found.message
    assert "parity run --case 'v2 op=paged_logits lens=70,130 next_n=2" in found.message


def heavier(weights):
    changed = weights.clone()
    changed[:, 3] *= 1 + 1e-3
    return changed


@pytest.mark.parametrize(
    "function",
    [
        logits_function(order=lambda heads: HeadSum(".".join(map(str, range(heads))))),
        logits_function(model=IMPRECISE),
        logits_function(weigh=heavier),
        logits_function(weigh=lambda weights: torch.nextafter(weights, torch.tensor(9e9))),
    ],
    ids=["heads in sequence", "another mode", "a weight of one head", "weights one bit off"],
)
def test_logits_one_bit_off_fail(function):
    found = judged("logits", function=function)
    assert found.status is Status.FAILED and "bits differ" in found.message


def test_an_unknown_order_is_not_run_and_said_so(monkeypatch):
    monkeypatch.setattr(bits, "order_of", lambda runner, case: "no order of the head sum is on record for this")
    found = judged("logits")
    assert found.status is Status.NOT_RUN and "no order of the head sum" in found.message
    passed = replace(found, status=Status.PASSED, cells=5, message="")
    assert "1 of 2 examples not run: no order" in merge([passed, found]).note


def test_a_record_that_the_compiled_kernel_contradicts_predicts_nothing(monkeypatch):
    monkeypatch.undo()
    route = SimpleNamespace(config="decode-fp8-h64-b64-r1-w4-s2")
    monkeypatch.setattr("impl.dispatch.last_route", lambda: route)
    monkeypatch.setattr("parity.tensorcore.headorder.compiler", lambda: ("3.6.0", True))
    monkeypatch.setattr("parity.run.device.architecture", lambda device: "sm_90")
    case = replace(CASE, heads=64)
    for compiled in ([], [str(order_for(64))]):
        monkeypatch.setattr("parity.tensorcore.headorder.compiled", lambda config, compiled=compiled: compiled)
        assert bits.order_of(InProcess(simulated(), CPU), case) == order_for(64)
    monkeypatch.setattr("parity.tensorcore.headorder.compiled", lambda config: ["(0+1)"])
    assert "does not add its heads in the order on record (chain 64)" in str(
        bits.order_of(InProcess(simulated(), CPU), case)
    )


# ------------------------------------------------------------------------------------------------------ goldens


@pytest.mark.parametrize("name", predicted.CASES)
def test_stored_predictions_are_todays(name):
    """What the GPU is compared with is what this machine computes; and moving one parameter changes it."""
    stored, order = predicted.stored(name)
    fresh, _ = predicted.predict(predicted.CASES[name])
    for part in ("dots", "logits"):
        assert torch.equal(stored[part].view(torch.int32), fresh[part].view(torch.int32)), part
    assert order.heads == 64


def test_the_golden_check():
    case = parse_case(predicted.CASES["fp8-prefill"])
    assert judged("golden", case).status is Status.PASSED
    wrong = judged("golden", case, companion=dots_function(IMPRECISE))
    assert wrong.status is Status.FAILED and "dots differ from fp8-prefill" in wrong.message
    wrong = judged("golden", case, function=logits_function(weigh=heavier))
    assert wrong.status is Status.FAILED and "bits differ" in wrong.message
    assert judged("golden", CASE) is None


def test_a_damaged_prediction_is_refused(tmp_path):
    folder = predicted.folder()
    assert folder is not None
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    damaged = tmp_path / "bf16-decode.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    with pytest.raises(StoredError, match="corrupt or edited"):
        predicted.stored("bf16-decode", tmp_path)


# ----------------------------------------------------------------------------------------- who is judged by a model


def verified(name, good=True):
    model = named_model(name)
    return Verified(model.operand, model.arithmetic, good, 81920, 0 if good else 12, name)


NAMES = ("sm_90 bf16", "sm_90 e4m3", "sm_90 e4m3 imprecise 32")
ALL = arithmetic.Verification("auto", tuple(map(verified, NAMES)), 1.0, True)


def implementation(words, kernel="triton", spec=None):
    contract = Contract.from_dict(words, "cuda", capability=(9, 0))
    return Implementation("x", "paged_logits", contract.layout, contract, kernel=kernel, spec=spec)


@pytest.mark.parametrize(
    ("words", "kernel", "spec", "said"),
    [
        ({"layout": "fp8"}, "triton", None, "sm_90 e4m3 grouped(32, 13, 13), verified"),
        ({"layout": "bf16", "arithmetic": "ieee"}, "triton", None, "sm_90 bf16 grouped(16, 25, 23), verified"),
        ({"layout": "bf16", "arithmetic": "ieee"}, "torch", None, "ieee float32"),
        ({"layout": "fp8"}, "torch", None, "sm_90 e4m3 grouped(32, 13, 13), bound only"),
        ({"layout": "fp8"}, "unknown", "a:b", "sm_90 e4m3 grouped(32, 13, 13), bound only"),
        ({"layout": "bf16"}, "unknown", "a:b", "ieee float32"),
        ({"layout": "fp8", "arithmetic": "sm_90 e4m3"}, "unknown", "a:b", "sm_90 e4m3 grouped(32, 13, 13), verified"),
        (
            {"layout": "fp8", "arithmetic": {"group": 32, "kept": 13, "final": 13, "running": False}},
            "unknown",
            "a:b",
            "sm_90 e4m3 imprecise 32 grouped(32, 13, 13, running=False), verified",
        ),
        (
            {"layout": "fp8", "arithmetic": {"group": 32, "kept": 14, "final": 13}},
            "unknown",
            "a:b",
            "grouped(32, 14, 13), bound only",
        ),
        # The bf16 rule is not that of e4m3 operands, whatever a contract says.
        ({"layout": "fp8", "arithmetic": "sm_90 bf16"}, "unknown", "a:b", "sm_90 bf16 grouped(16, 25, 23), bound only"),
    ],
)
def test_only_named_or_own_dots_are_exact(words, kernel, spec, said):
    found = arithmetic.with_verified_dot(implementation(words, kernel, spec), ALL, "sm_90")
    assert found.contract.describe_dot() == said


def test_a_contradicted_model_sharpens_nothing_and_the_header_says_so():
    found = arithmetic.Verification("auto", (verified("sm_90 e4m3", good=False),), 1.0, True)
    impl = implementation({"layout": "fp8"})
    assert arithmetic.with_verified_dot(impl, found, "sm_90") is impl
    session = Session({"x": impl}, CPU, profile("smoke"), arithmetic=found)
    said = "contradicted by 12 of 81,920 dots; the proved bound serves"
    assert f"parity: dot arithmetic: sm_90 e4m3 grouped(32, 13, 13), {said}" in session.header()
    assert session.describe()["arithmetic"]["models"][0] == {
        "name": "sm_90 e4m3",
        "model": "grouped(32, 13, 13)",
        "verified": False,
        "dots": 81920,
        "mismatches": 12,
    }


def test_what_was_examined_goes_to_other_processes_and_the_report():
    assert arithmetic.Verification.from_dict(json.loads(json.dumps(ALL.as_dict()))) == ALL
    assert ALL.lines()[1] == "dot arithmetic: sm_90 e4m3 grouped(32, 13, 13), verified on 81,920 dots"
    assert arithmetic.verify_models(CPU, [simulated()]).lines() == []
    bound = arithmetic.verify_models(torch.device("cuda"), [], "bound")
    assert bound.models == () and "--parity-arithmetic bound" in arithmetic.Verification("bound", cuda=True).lines()[0]
    with pytest.raises(ValueError, match="arithmetic: expected one of auto, bound, got 'fine'"):
        arithmetic.verify_models(CPU, [], "fine")
    impl = simulated()
    check = find_check("bits/dots", LOGITS)
    found = row(impl, check, run_check(check, InProcess(impl, CPU), profile("smoke", examples=6)))
    assert str(found.dot).endswith("verified")


def test_every_reason_not_to_run_has_a_name():
    cuda = torch.device("cuda")
    unsure = implementation({"layout": "fp8"})
    assert "a GPU's matrix unit" in str(bits.unverified(unsure, CPU))
    assert "no verified model of its dots" in str(bits.unverified(unsure, cuda))
    assert "comes from" not in (bits.no_order(simulated(), cuda) or "")
    assert "library" in str(bits.unverified(implementation({"layout": "bf16"}, "torch"), cuda))
    assert "contract key `dots`" in str(bits.no_dots(simulated(companion=None), cuda))
    assert "the order in which it adds its heads" in str(bits.no_order(simulated(kernel="unknown"), cuda))


USER = """
import torch
from parity.selftest.simulated_gpu import dots_function, logits_function, IMPRECISE
logits = logits_function()
dots = dots_function()
wrong_dots = dots_function(IMPRECISE)
def flat_dots(**named):
    return dots(**named)[:, 0]
for name in ("dots", "wrong_dots", "flat_dots"):
    def f(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
        return logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)
    f.parity_contract = {"layout": "fp8", "arithmetic": "sm_90 e4m3", "dots": __file__ + ":" + name}
    globals()["with_" + name] = f
"""


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("with_dots", Status.PASSED, ""),
        ("with_wrong_dots", Status.FAILED, "dots are not those of grouped(32, 13, 13)"),
        ("with_flat_dots", Status.FAILED, "expected torch.float32 [2, 16, 130], got "),
    ],
)
def test_a_users_dots_are_computed_in_the_worker(tmp_path, name, status, said):
    source = tmp_path / "mine.py"
    source.write_text(USER)
    impl = load(f"{source}:{name}", "fp8")
    assert impl.contract.named and impl.contract.dots == f"{source}:{name.removeprefix('with_')}"
    impl = replace(impl, contract=impl.contract.verified())
    found = judge_one(find_check("bits/dots", LOGITS), runner_for(impl, CPU), CASE)
    assert found is not None and found.status is status and said in found.message, found


def test_a_contract_names_a_function():
    with pytest.raises(ValueError, match="contract key 'dots' must be module:function"):
        Contract.from_dict({"layout": "fp8", "dots": "nothing"})

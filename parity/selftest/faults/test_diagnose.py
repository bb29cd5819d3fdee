"""Diagnosis: planted faults are named first, two at once are found, and what nothing explains is described."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from parity.cli import main as cli
from parity.domain.contract import Contract
from parity.faults import building, diagnose
from parity.faults.building import CPU, function, staged
from parity.faults.capture import load_capture, save_capture
from parity.faults.catalogue import BY_ID
from parity.faults.explaining import equals, function_of, observe, problem_of, rank
from parity.gate import gate
from parity.ops.paged_logits.faults import pattern
from parity.pages import layout as layouts
from parity.results import Row
from parity.run.implementation import Implementation
from parity.run.operation import all_operations, find, parse_case
from parity.run.runner import InProcess, poisoned_allocations
from parity.vocabulary import Status

TEXT = "v1 lens=130,70,5,200 next_n=2 heads=8 data=octaves seed=3 perm=5 max_len=230"


def planted(*ids, text=TEXT):
    problem = problem_of(parse_case(text))
    return problem, observe(problem, function_of(problem, [BY_ID[id] for id in ids]))


def test_indistinguishable_models_are_listed_as_equals():
    problem, observed = planted("length-row-0", text="v1 lens=9,5 next_n=2 heads=8 data=octaves")
    names = {each.name for each in equals(problem, rank(problem, observed))}
    assert {"length-row-0", "length-first-draft", "length-longest"} <= names


def test_nothing_is_wrong_with_a_correct_result():
    problem = problem_of(parse_case(TEXT))
    found = diagnose.diagnose(problem, observe(problem, staged("paged_logits", "bf16")))
    assert not found.explained and "that of a correct implementation" in diagnose.lines(found)[0]


def test_two_faults_at_once_are_found():
    problem, observed = planted("relu-missing", "table-row-0")
    found = diagnose.diagnose(problem, observed)
    assert not found.explained
    assert {fault.id for fault in found.pairs[0].faults} == {"relu-missing", "table-row-0"}
    assert any("two faults at once" in line for line in diagnose.lines(found))
    assert diagnose.as_json(found)["pairs"][0]["wrong"] == 0


def test_what_nothing_explains_is_described_by_its_pattern():
    problem = problem_of(parse_case(TEXT))
    observed = observe(problem, staged("paged_logits", "bf16"))
    for out in observed:
        out[:, 3::16] += 1000.0
    found = diagnose.diagnose(problem, observed)
    said = "\n".join(diagnose.lines(found))
    assert not found.explained and "no single fault" in said
    assert "keys modulo 16: only 3 are wrong" in said


def test_races_are_said_to_be_unsteady():
    problem, observed = planted("double-buffer-swapped")
    found = diagnose.diagnose(problem, observed)
    assert found.unsteady and found.best[0].name == "double-buffer-swapped"


def test_patterns_in_words():
    operands = SimpleNamespace(
        context_lens=torch.tensor([[130, 200]], dtype=torch.int32), block_table=torch.tensor([[4, 2, 9, 7]])
    )
    bad = torch.zeros(2, 200, dtype=torch.bool)
    bad[1, 192:] = True
    said = "\n".join(pattern.describe(bad, operands))
    assert "wrong rows: 1 of 2" in said and "wrong draft rows within a request: 1 of 2" in said
    assert "wrong logical pages: 3, the last page" in said and "wrong physical pages: 7" in said
    assert "reach up to the newest one" in said
    assert pattern.listed([0, 1, 2, 7]) == "0..2, 7"


MINE = """
import torch
from impl.torch_path import torch_bf16_paged_mqa_logits as right

def logits(q, kv_cache, weights, **named):
    return right(q, kv_cache, weights[:1].expand_as(weights).contiguous(), **named)
"""


def test_a_function_of_ones_own_is_diagnosed(tmp_path, capsys):
    file, out = tmp_path / "mine.py", tmp_path / "out.json"
    file.write_text(MINE)
    words = ["diagnose", "--impl", f"{file}:logits", "--layout", "bf16", "--case", TEXT, "--json", str(out)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "first bad step: head-weight" in said and "weight-row-0" in said and "prime-rl#3504" in said
    report = json.loads(out.read_text())
    assert report["best"][0]["faults"] == ["weight-row-0"] and report["separating_case"].startswith("v2 ")


def test_without_a_case_one_is_looked_for(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert cli.main(["diagnose", "--impl", f"{file}:logits", "--layout", "bf16"]) == 0
    assert "weight-row-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, id",
    [
        (TEXT + " layout=fp8", "scale-neighbour"),
        ("v1 lens=900,30 stage=topk data=random k=64 perm=3", "slots-without-modulo"),
        ("v1 stage=store ids=0..9 pages=3 layout=fp8 data=octaves", "store-scale-page-0"),
    ],
)
def test_a_captured_call_is_diagnosed(text, id, tmp_path, capsys):
    fault, case = BY_ID[id], parse_case(text)
    named = find(case.op).build(case, CPU).kwargs()
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    with poisoned_allocations():
        result = function(fault)(**named)
    path = tmp_path / "call.safetensors"
    save_capture(path, case.op, fault.layout, before, named["kv_cache"] if result is None else result)
    assert load_capture(path).op == case.op
    assert cli.main(["diagnose", "--capture", str(path)]) == 0
    assert id in capsys.readouterr().out


def test_a_file_that_is_no_capture_is_usage(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    assert cli.main(["diagnose", "--capture", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert cli.main(["diagnose", "--capture", str(tmp_path / "missing")]) == 2
    assert cli.main(["diagnose"]) == 2
    with pytest.raises(ValueError, match="kv_cache"):
        save_capture(path, "paged_logits", "bf16", {"q": torch.zeros(1)}, torch.zeros(1))
    with pytest.raises(ValueError, match="paged_logits, topk, store"):
        save_capture(path, "compressor", "", {}, torch.zeros(1))


# ------------------------------------------------------------------------------- any operation and layout, any failure

WRONG = {
    "paged_logits": lambda weights, max_context_len, **named: torch.zeros(weights.shape[0], max_context_len),
    "topk": lambda logits, k, **named: (torch.full((len(logits), k), 7, dtype=torch.int32),) * 2,
    "store": lambda kv_cache, **named: None,
    "compressor": lambda kv, positions, **named: (torch.zeros(len(kv), 128), positions % 4 == 2),
}
PLACES = [
    (operation.name, layout)
    for operation in all_operations()
    for layout in (layouts.names() if operation.layouts else ("",))
]


def of_function(op, layout, call):
    """The finding on a function, on a case that is drawn for one of the operation's models."""
    contract = dict(building.diagnosis_of(op).promises) | ({"layout": layout} if layout else {})
    made = Contract.from_dict({"op": op, **contract})
    runner = InProcess(Implementation("mine", op, layout, made, call), CPU)
    model = replace(find(op).faults()[0], layout=layout)
    return diagnose.of_runner(runner, building.diagnosis_of(op).draw(model, random.Random(3)))


@pytest.mark.parametrize("op, layout", PLACES)
def test_a_wrong_function_of_any_operation_and_layout_gets_a_diagnosis_or_the_reason_why_not(op, layout):
    found = of_function(op, layout, WRONG[op])
    said = diagnose.lines(found)
    assert json.dumps(diagnose.as_json(found))
    if found.obstacle:
        assert said[0] == f"no diagnosis: {found.obstacle}" and layout in found.obstacle
    else:
        assert found.ranked and not found.best[0].correct and len(said) > 1


def test_logits_over_pages_that_no_model_reads_are_described_by_the_oracle(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits=True):\n"
        "    return torch.zeros(weights.shape[0], max_context_len)\n"
    )
    case = TEXT.replace("heads=8", "heads=8 layout=fp4")
    assert cli.main(["diagnose", "--impl", f"{file}:logits", "--layout", "fp4", "--case", case]) == 1
    said = capsys.readouterr().out
    assert "no diagnosis: staged logits read keys of" in said and "not fp4" in said
    assert "every row is wrong somewhere" in said and "wrong physical pages:" in said


def test_a_call_that_gives_no_result_says_why():
    def crashing(**named):
        raise ZeroDivisionError("no such tile")

    found = of_function("topk", "", crashing)
    assert "the call gives no result to compare: ZeroDivisionError: no such tile" in found.obstacle
    assert not found.explained and diagnose.lines(found) == [f"no diagnosis: {found.obstacle}"]


def test_a_function_that_only_crashes_is_looked_at_on_the_case_of_its_crash(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text("def topk(logits, context_lens, block_table, k):\n    raise ZeroDivisionError('no such tile')\n")
    assert cli.main(["diagnose", "--impl", f"{file}:topk", "--op", "topk"]) == 1
    assert "no diagnosis: the call gives no result to compare: ZeroDivisionError" in capsys.readouterr().out


def test_an_operation_without_models_says_so(monkeypatch):
    monkeypatch.setattr(building, "find", lambda op: SimpleNamespace(hook=lambda name: None))
    with pytest.raises(ValueError, match="scale_and_add has no fault models"):
        building.diagnosis_of("scale_and_add")


def test_the_gates_first_failure_is_the_one_that_is_diagnosed(monkeypatch, capsys):
    commands: list[list[str]] = []
    monkeypatch.setattr(gate.processes, "call", lambda command, output: commands.append(command))
    rows = [
        Row("b", "invariance", "rows", Status.FAILED, case="v1 lens=1"),
        Row("a", "resources", "memory", Status.FAILED, case="v1 lens=1"),
        Row("x.py:f", "layout", "exact", Status.FAILED, layout="fp8", case="v1 lens=1", first_case="v1 lens=7"),
    ]
    gate.show_diagnosis(rows, "cpu", None)
    assert commands[0][commands[0].index("--case") + 1] == "v1 lens=7" and "--layout" in commands[0]
    assert "layout/exact of x.py:f" in capsys.readouterr().out
    gate.show_diagnosis(rows[1:2], "cpu", None)
    assert len(commands) == 1

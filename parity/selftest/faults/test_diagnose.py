"""Diagnosis: planted faults are named first, two at once are found, and what nothing explains is described."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

from parity.cli import main as cli
from parity.faults import confusion, diagnose, pattern
from parity.faults.building import function, staged
from parity.faults.capture import load_capture, save_capture
from parity.faults.catalogue import BY_ID
from parity.faults.explaining import equals, function_of, observe, problem_of, rank
from parity.ops.paged_logits.operands import build_logits as build
from parity.run.operation import parse_case
from parity.run.runner import poisoned_allocations

TEXT = "v1 lens=130,70,5,200 next_n=2 heads=8 data=octaves seed=3 perm=5 max_len=230"
SAMPLE = 14
EVERY_PIPELINE = ("relu-after-sum", "topk-bits-unsigned", "store-scale-neighbour", "ape-chunk-local")


def planted(*ids, text=TEXT):
    problem = problem_of(parse_case(text))
    return problem, observe(problem, function_of(problem, [BY_ID[id] for id in ids]))


def test_a_sample_of_all_models_is_named_first_on_random_cases():
    ids = random.Random(7).sample(confusion.measurable(), SAMPLE)
    rows = [confusion.measure_one(id, seed=1) for id in [*EVERY_PIPELINE, *ids]]
    assert confusion.share(rows) >= confusion.WANTED, rows  # the whole catalogue: `parity diagnose --measure`
    assert sum(row["outcome"] != "hidden" for row in rows) >= 12
    assert "Named first, alone or among equals" in confusion.markdown(rows)


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
    assert report["best"][0]["faults"] == ["weight-row-0"] and report["separating_case"].startswith("v1 ")


def test_without_a_case_one_is_looked_for(tmp_path, capsys):
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert cli.main(["diagnose", "--impl", f"{file}:logits", "--layout", "bf16"]) == 0
    assert "weight-row-0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "stage, text, id",
    [
        ("logits", TEXT, "scale-neighbour"),
        ("topk", "v1 lens=900,30 stage=topk data=random k=64 perm=3", "slots-without-modulo"),
        ("store", "v1 stage=store ids=0..9 layout=fp8 data=octaves", "store-scale-page-0"),
    ],
)
def test_a_captured_call_is_diagnosed(stage, text, id, tmp_path, capsys):
    fault = BY_ID[id]
    text = text.replace("heads=8", "heads=8 layout=fp8") if stage == "logits" else text
    text = text.replace("ids=0..9", "ids=0..9 pages=3") if stage == "store" else text
    operands = build(parse_case(text))
    named = dict(operands.kwargs())
    before = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in named.items()}
    with poisoned_allocations():
        result = function(fault)(**named)
    path = tmp_path / "call.safetensors"
    save_capture(path, stage, fault.layout, before, named["kv_cache"] if stage == "store" else result)
    assert load_capture(path).stage == stage
    assert cli.main(["diagnose", "--capture", str(path)]) == 0
    assert id in capsys.readouterr().out


def test_a_file_that_is_no_capture_is_usage(tmp_path, capsys):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"nonsense")
    assert cli.main(["diagnose", "--capture", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
    assert cli.main(["diagnose"]) == 2
    with pytest.raises(ValueError, match="kv_cache"):
        save_capture(path, "logits", "bf16", {"q": torch.zeros(1)}, torch.zeros(1))


def test_the_gates_first_failure_is_the_one_that_is_diagnosed(monkeypatch, capsys):
    from parity.faults import gate_hook
    from parity.gate import gate

    seen: list[list[str]] = []

    def call(command, environment, output):
        seen.append(command)
        return 0

    monkeypatch.setattr(gate, "call", call)
    rows = [
        {"implementation": "b", "level": "invariance", "check": "rows", "status": "failed", "case": "v1 lens=1"},
        {"implementation": "a", "level": "resources", "check": "memory", "status": "failed", "case": "v1 lens=1"},
        {"implementation": "x.py:f", "stage": "logits", "layout": "fp8", "level": "layout", "check": "exact"}
        | {"status": "failed", "case": "v1 lens=1", "first_case": "v1 lens=70"},
    ]
    gate_hook.show_diagnosis(rows, "cpu", None)
    assert seen[0][seen[0].index("--case") + 1] == "v1 lens=70" and "--layout" in seen[0]
    assert "layout/exact of x.py:f" in capsys.readouterr().out
    gate_hook.show_diagnosis(rows[1:2], "cpu", None)
    assert len(seen) == 1

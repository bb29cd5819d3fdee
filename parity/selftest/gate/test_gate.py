"""The gate as its users start it: from any folder, on a function of their own, with every report and exit code."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest

from parity.command import CommandError
from parity.gate import gate, progress, summary

ROOT = Path(__file__).resolve().parents[3]
GOOD = ROOT / "examples" / "own_kernel.py"

FUNCTIONS = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("own_kernel", {str(GOOD)!r})
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)

def short(context_lens, **named):
    # The last, partly filled page is left out.
    return own.logits(context_lens=context_lens // 64 * 64, **named)

def elsewhere(**named):
    return own.logits(**named)

elsewhere.parity_contract = {{"layout": "bf16", "devices": ["sm_999"]}}
"""

HOSTILE = """
raise RuntimeError("a conftest of the current folder was loaded")
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A user's folder: his functions, and pytest settings that must not matter."""
    (tmp_path / "kernels.py").write_text(FUNCTIONS)
    (tmp_path / "conftest.py").write_text(HOSTILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --collect-only --no-such-option\n")
    # In front of the path this would shadow a module that the gate needs.
    (tmp_path / "json.py").write_text(HOSTILE)
    return tmp_path


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("CI", "GITHUB_STEP_SUMMARY")}
    # -P: as an installed `parity` starts, without the current folder on its path.
    command = [sys.executable, "-P", "-m", "parity", "gate", "--profile", "smoke", "--device", "cpu", *words]
    env |= {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "--collect-only", **environment}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600)


def test_a_correct_function_passes_with_every_report(folder):
    reports = ["--json", "out.json", "--junit", "out.xml", "--markdown", "out.md"]
    levels = [word for level in ("layout", "rounding", "selection", "invariance") for word in ("--level", level)]
    words = ["--impl", "kernels:own.logits", *reports, *levels, "--seed", "3", "--examples", "12"]
    done = run(folder, *words, GITHUB_STEP_SUMMARY="step.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity passed: ")
    report = json.loads((folder / "out.json").read_text())
    assert (report["kind"], report["format"], report["exit"]) == (summary.KIND, summary.FORMAT, 0)
    assert (report["profile"], report["seed"], report["device"]) == ("smoke", 3, "cpu")
    assert report["provenance"]["torch"]
    names = {row["implementation"] for row in report["rows"]}
    assert names == {"kernels:own.logits", "reference"}, "with --impl only that one is judged"
    judged = {row["level"] for row in report["rows"] if row["implementation"] != "reference"}
    assert judged == {"layout", "rounding", "selection", "invariance", "golden"}
    for row in report["rows"]:
        assert {"implementation", "level", "check", "status", "examples"} <= set(row)
    selection = [row["examples"] for row in report["rows"] if row["level"] == "selection"]
    assert selection == [12]
    tests = ElementTree.parse(folder / "out.xml").getroot().iter("testcase")
    assert len(list(tests)) == sum(row["level"] != "golden" for row in report["rows"])
    assert (folder / "out.md").read_text().startswith("## ✅ parity passed: ")
    assert (folder / "step.md").read_text() == (folder / "out.md").read_text()
    # Progress: one line a check, on stderr alone.
    assert "[  1/" in done.stderr
    assert "[  1/" not in done.stdout


def test_a_wrong_function_is_rejected_with_a_case_that_repeats_it(folder):
    words = ["--impl", "kernels.py:short", "--layout", "bf16", "--level", "layout", "--json", "out.json"]
    done = run(folder, *words, "--no-golden", "--workers", "0")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity failed: ")
    rows = json.loads((folder / "out.json").read_text())["rows"]
    assert {row["level"] for row in rows} == {"layout"}
    failed = [row for row in rows if row["status"] == "failed"]
    assert failed
    assert "lens=1 " in f"{failed[0]['case']} ", "the smallest case has one key"
    assert failed[0]["repro"] in done.stdout


def test_a_function_that_cannot_run_here_is_nothing_judged(folder):
    done = run(folder, "--impl", "kernels:elsewhere", "--level", "layout", "--workers", "0")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity nothing judged: ")
    assert "sm_999" in done.stdout


@pytest.mark.parametrize(
    "words, part",
    [
        (["--impl", "no_such_module:f", "--layout", "bf16"], "no_such_module"),
        (["--impl", "kernels:short"], "layout"),
        (["--contract", "x.toml"], "contract"),
        (["--impl", "torch-bf16", "--examples", "0"], "examples: expected at least 1, got 0"),
    ],
    ids=["module", "layout", "contract", "examples"],
)
def test_an_option_that_the_suite_refuses_exits_2(folder, words, part):
    done = run(folder, *words, "--level", "layout", "--workers", "0")
    assert done.returncode == 2, done.stdout + done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture
def options(monkeypatch):
    """Options for a gate whose children are replaced by the test."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    return gate.Options(device="cpu", golden=False, compile=False, faults=False)


def child(code: int, rows=None):
    """A child that ends with `code` and leaves a report, if it has rows."""

    def call(command, environment, output=2):
        if rows is not None:
            Path(command[command.index("--parity-json") + 1]).write_text(json.dumps({"rows": rows}))
        return code

    return call


PASSED = {"implementation": "a", "level": "layout", "check": "exact", "status": "passed", "examples": 1}


@pytest.mark.parametrize(
    "code, rows, wanted",
    [
        (0, [PASSED], 0),
        (1, [{**PASSED, "status": "failed"}], 1),
        (3, [PASSED], 1),
        (2, [PASSED], 1),
        (-11, None, 1),
        (1, None, 1),
        (1, [PASSED], 1),
        (5, [], 2),
        (2, [], 1),
        (2, [{**PASSED, "status": "not run"}], 2),
        (0, [{**PASSED, "status": "not run"}], 2),
    ],
)
def test_how_the_suites_child_ends_decides_with_its_rows(code, rows, wanted, options, monkeypatch, capsys):
    monkeypatch.setattr(gate, "call", child(code, rows))
    assert gate.gate(options) == wanted
    out = capsys.readouterr().out
    if wanted == 1 and (rows is None or rows in ([], [PASSED])):
        assert f"exit code {code}" in out


def test_a_refused_option_of_the_suite_is_usage(options, monkeypatch):
    monkeypatch.setattr(gate, "call", child(4))
    with pytest.raises(CommandError, match="refused an option"):
        gate.gate(options)


def test_goldens_that_leave_no_report_are_an_error(options, monkeypatch, capsys):
    monkeypatch.setattr(gate, "call", child(0, [PASSED]))
    monkeypatch.setattr(gate, "run_golden", lambda *_: gate.golden_lost(139))
    assert gate.gate(gate.Options(device="cpu", compile=False, faults=False)) == 1
    assert "exit code 139" in capsys.readouterr().out


CONFIGURATIONS = [
    {"arch": 90, "layout": "fp8", "kernel": "decode", "config": "a", "status": "passed", "reason": ""},
    {"arch": 90, "layout": "fp8", "kernel": "prefill", "config": "b", "status": "failed", "reason": "spills 8 bytes"},
    {"arch": 80, "layout": "fp8", "status": "unsupported", "reason": "no e4m3"},
    {"arch": 90, "layout": "fp4", "kernel": "store", "config": "fp4_fused f32", "status": "passed", "reason": ""},
    {"arch": 90, "kernel": "store", "status": "not run", "reason": "no compiler"},
]


def test_the_compile_gate_is_added_up_by_implementation_and_architecture():
    found = {(row["implementation"], row["check"]): row for row in gate.compile_rows(CONFIGURATIONS)}
    assert {key: (row["status"], row["examples"], row["message"]) for key, row in found.items()} == {
        ("triton-fp8", "compile sm_90"): ("failed", 2, "b: spills 8 bytes"),
        ("triton-fp8", "compile sm_80"): ("unsupported", 0, "no e4m3"),
        ("store-fp4-fused", "compile sm_90"): ("passed", 1, ""),
        ("store", "compile sm_90"): ("not run", 0, "no compiler"),
    }
    assert found["triton-fp8", "compile sm_90"]["repro"] == "parity compile --arch 90"


@pytest.mark.parametrize(
    "code, rows, status", [(1, CONFIGURATIONS, "failed"), (2, None, "not run"), (134, None, "error")]
)
def test_how_the_compiling_child_ends_decides(code, rows, status, tmp_path, monkeypatch):
    def call(command, environment, output):
        assert command[-2:] == ["--fixtures", "f"] and "--quick" not in command
        if rows is not None:
            Path(command[command.index("--json") + 1]).write_text(json.dumps({"rows": rows}))
        return code

    monkeypatch.setattr(gate, "call", call)
    assert status in {row["status"] for row in gate.run_compile(gate.Options(fixtures="f"), tmp_path)}


def test_smoke_compiles_for_one_architecture_alone(tmp_path, monkeypatch):
    asked: list[list[str]] = []

    def call(command, environment, output):
        asked.append(command)
        return 1

    monkeypatch.setattr(gate, "call", call)
    gate.run_compile(gate.Options(profile="smoke"), tmp_path)
    assert asked[0][-1] == "--quick"


def test_the_compile_gate_runs_where_it_belongs(options, monkeypatch):
    asked: list[Path] = []

    def compile_nothing(given: gate.Options, folder: Path) -> list[dict]:
        asked.append(folder)
        return []

    monkeypatch.setattr(gate, "call", child(0, [PASSED]))
    monkeypatch.setattr(gate, "run_compile", compile_nothing)
    elsewhere = replace(options, compile=True)
    for given in (
        replace(elsewhere, impl="torch-bf16"),
        replace(elsewhere, level=("layout",)),
        options,
    ):
        assert gate.gate(given) == 0
    assert asked == []
    assert gate.gate(elsewhere) == 0
    assert len(asked) == 1


def test_what_is_missing_is_named(monkeypatch):
    find = gate.importlib.util.find_spec
    monkeypatch.setattr(
        gate.importlib.util, "find_spec", lambda name: None if name in ("xdist", "torch") else find(name)
    )
    with pytest.raises(CommandError, match="needs torch, pytest-xdist: pip install torch pytest-xdist"):
        gate.require_packages()


def test_the_childs_environment():
    given = {
        "PYTHONPATH": "/a",
        "PYTEST_ADDOPTS": "-x",
        "PYTEST_PLUGINS": "evil",
        "OMP_NUM_THREADS": "64",
        "HOME": "/h",
    }
    found = gate.suite_environment(given)
    assert not {"PYTEST_ADDOPTS", "PYTEST_PLUGINS"} & set(found)
    assert found["PYTHONPATH"].split(os.pathsep)[0] == "/a"
    assert (found["OMP_NUM_THREADS"], found["PYTHONSAFEPATH"], found["HOME"]) == ("1", "1", "/h")


def test_rows_come_in_the_reports_order_not_in_the_processes():
    rows = [{**PASSED, "implementation": name} for name in "bxab"]
    found = gate.in_order({"implementations": {"a": 0, "b": 0}, "rows": rows})
    assert [row["implementation"] for row in found] == ["a", "b", "b", "x"]


def test_a_progress_line_says_what_was_found():
    row = {**PASSED, "worst_ratio": 0.25, "seconds": 1.25}
    assert " ".join(progress.line(row).split()) == "passed a layout/exact 1 example, worst/bound 0.25, 1.2 s"
    absent = {**PASSED, "status": "not run", "message": "no card"}
    assert progress.line(absent) == "not run     a layout/exact: no card"


@pytest.mark.parametrize(
    ("device", "cores", "gigabytes", "workers"),
    [
        ("cpu", 1, 0, 0),
        ("cpu", 16, 0, 2),
        ("cuda", 16, 140, 8),
        ("cuda", 64, 80, 5),
        ("cuda", 16, 24, 0),
        ("cuda", 2, 140, 0),
    ],
)
def test_as_many_workers_as_cores_and_memory_hold(monkeypatch, device, cores, gigabytes, workers):
    monkeypatch.setattr(gate.os, "cpu_count", lambda: cores)
    monkeypatch.setattr("parity.run.device.total_memory", lambda: gigabytes << 30)
    assert gate.default_workers(device) == workers

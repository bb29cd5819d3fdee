"""The gate as its users start it: from any folder, on a function of their own, with every report and exit code."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parity.cli import main as cli
from parity.command import CommandError
from parity.gate import gate
from parity.results import FORMAT, GATE, Report, Row
from parity.run import worker
from parity.selftest.suite.test_pool import gone
from parity.selftest.test_results import row
from parity.suite.pool import Job, Lost, Part
from parity.vocabulary import Status

ROOT = Path(__file__).resolve().parents[3]
GOOD = ROOT / "examples" / "own_kernel.py"
CPU = torch.device("cpu")

FUNCTIONS = f"""
import importlib.util, time
spec = importlib.util.spec_from_file_location("own_kernel", {str(GOOD)!r})
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)
calls = 0

def short(context_lens, **named):
    # The last, partly filled page is left out.
    return own.logits(context_lens=context_lens // 64 * 64, **named)

def elsewhere(**named):
    return own.logits(**named)

elsewhere.parity_contract = {{"layout": "bf16", "devices": ["sm_999"]}}

def stuck(**named):
    # Two checks of a smoke run, then never again.
    global calls
    calls += 1
    if calls > 14:
        time.sleep(600)
    return own.logits(**named)

def compressor(**named):
    raise NotImplementedError("not written yet")
"""

HOSTILE = """
raise RuntimeError("a module of the current folder was loaded")
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A user's folder: functions, and a file that in front of the path would shadow a module that the gate needs."""
    (tmp_path / "kernels.py").write_text(FUNCTIONS)
    (tmp_path / "json.py").write_text(HOSTILE)
    (tmp_path / "conftest.py").write_text(HOSTILE)
    return tmp_path


def command(*words: str, **environment: str) -> dict:
    env = {key: value for key, value in os.environ.items() if key not in ("CI", "GITHUB_STEP_SUMMARY")}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    # -P: as an installed `parity` starts, without the current folder on its path.
    arguments = [sys.executable, "-P", "-m", "parity", "gate", "--profile", "smoke", "--device", "cpu", *words]
    return {"args": arguments, "env": env, "text": True}


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**command(*words, **environment), cwd=folder, capture_output=True, timeout=600)


def test_a_correct_function_passes_with_every_report(folder):
    reports = ["--json", "out.json", "--junit", "out.xml", "--markdown", "out.md"]
    levels = [word for level in ("layout", "rounding", "selection", "invariance") for word in ("--level", level)]
    words = ["--impl", "kernels:own.logits", *reports, *levels, "--seed", "3", "--examples", "12"]
    done = run(folder, *words, GITHUB_STEP_SUMMARY="step.md")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity passed: ")
    report = json.loads((folder / "out.json").read_text())
    assert (report["kind"], report["format"], report["exit"]) == (GATE, FORMAT, 0)
    assert (report["profile"], report["seed"], report["device"]) == ("smoke", 3, "cpu")
    assert report["provenance"]["torch"]
    names = {row["implementation"] for row in report["rows"]}
    assert names == {"kernels:own.logits", "reference"}, "with --impl only that one is judged"
    judged = [row["level"] for row in report["rows"] if row["implementation"] != "reference"]
    assert list(dict.fromkeys(judged)) == ["layout", "rounding", "selection", "invariance", "golden"]
    assert [row["examples"] for row in report["rows"] if row["level"] == "selection"] == [12]
    suites = list(ElementTree.parse(folder / "out.xml").getroot().iter("testsuite"))
    assert int(suites[0].get("tests", 0)) == len(report["rows"]) == len(list(suites[0].iter("testcase")))
    assert (folder / "out.md").read_text().startswith("## ✅ parity passed: ")
    assert (folder / "step.md").read_text() == (folder / "out.md").read_text()
    # Progress: one line per check, on stderr only.
    assert "[  1/" in done.stderr
    assert "[  1/" not in done.stdout


def test_a_wrong_function_is_rejected_with_a_case_that_repeats_it(folder):
    words = ["--impl", "kernels.py:short", "--layout", "bf16", "--level", "layout", "--json", "out.json"]
    done = run(folder, *words, "--no-golden", "--workers", "1", "--no-faults", "--junit", "out.xml")
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity failed: ")
    rows = json.loads((folder / "out.json").read_text())["rows"]
    assert {row["level"] for row in rows} == {"layout"}
    failed = [row for row in rows if row["status"] == "failed"]
    assert failed
    assert "lens=1 " in f"{failed[0]['case']} ", "the smallest case has one key"
    assert failed[0]["repro"] in done.stdout
    assert failed[0]["repro"] in (folder / "out.xml").read_text().replace("&#39;", "'").replace("&quot;", '"')


def test_a_function_that_cannot_run_here_is_nothing_judged(folder):
    done = run(folder, "--impl", "kernels:elsewhere", "--level", "layout", "--workers", "1")
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity nothing judged: ")
    assert "sm_999" in done.stdout


def test_a_function_without_pages_needs_no_layout(folder):
    words = ["--impl", "kernels.py:compressor", "--op", "compressor", "--level", "layout", "--examples", "1"]
    done = run(folder, *words, "--no-faults", "--workers", "1", "--json", "out.json")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((folder / "out.json").read_text())["rows"]
    assert {(row["op"], row["status"]) for row in rows} == {("compressor", "error")}
    assert "not written yet" in done.stdout and "layout" not in rows[0]


@pytest.mark.parametrize(
    "words, part",
    [
        (["--impl", "no_such_module:f", "--layout", "bf16"], "no_such_module"),
        (["--impl", "kernels:short"], "layout"),
        (["--impl", "kernels:short", "--layout", "int8"], "int8"),
        (["--impl", "kernels:short", "--op", "logits"], "op: expected one of paged_logits"),
        (["--contract", "x.toml"], "contract"),
        (["--fixtures", "no/such"], "--fixtures no/such: no such folder"),
    ],
    ids=["module", "layout", "unknown layout", "unknown operation", "contract", "fixtures"],
)
def test_an_option_that_the_suite_refuses_exits_2(folder, words, part, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    worker.shared().stop()  # the next one starts in this folder
    assert cli.main(["gate", "--device", "cpu", *words]) == 2
    worker.shared().stop()
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert part in line


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="not run: reads /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["terminated", "interrupted"])
def test_ended_from_outside_it_keeps_what_was_judged_and_leaves_nothing(folder, number):
    (folder / "tmp").mkdir()
    words = ["--impl", "kernels.py:stuck", "--layout", "bf16", "--level", "layout", "--level", "rounding"]
    started = command(*words, "--workers", "1", "--json", "out.json", TMPDIR=str(folder / "tmp"))
    with subprocess.Popen(**started, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[  1/"):
                break
        time.sleep(3)
        pids = descendants(process.pid)
        assert len(pids) >= 3, "a pool, its process, and the process of the function"
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    report = Report.from_json(json.loads((folder / "out.json").read_text()))
    assert report.verdict == "incomplete" and len(report.rows) in (1, 2) and report.rows[0].status is Status.PASSED
    word = "terminated" if number is signal.SIGTERM else "interrupted"
    assert f"{word} before everything was judged" in out and "kernels.py:stuck  layout  passed" in out
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(map(gone, pids)):
        time.sleep(0.1)
    assert all(map(gone, pids)) and os.listdir(folder / "tmp") == []
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(f"parity-pool-{process.pid}-")]


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found += [int(path.parent.name), *descendants(int(path.parent.name))]
    return found


@pytest.fixture
def judged(monkeypatch):
    """Replaces the parts of a gate by rows."""

    def give(*rows: Row):
        monkeypatch.setattr(gate, "run_parts", lambda options, session, golden, found: found.extend(rows))
        monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
        return gate.Options(device=CPU, impl="topk", faults=False)

    return give


def test_the_table_is_printed_before_a_file_that_cannot_be_written(judged, capsys, tmp_path):
    options = judged(row("failed", message="what"))
    missing, text = tmp_path / "gone" / "out.json", tmp_path / "out.md"
    with pytest.raises(CommandError, match=f"cannot write {missing}: No such file"):
        gate.gate(replace(options, json=str(missing), markdown=str(text)))
    out = capsys.readouterr().out
    assert "failed: a layout/exact" in out and out.splitlines()[-1].startswith("parity failed: ")
    assert text.read_text().startswith("## ❌ parity failed")


def test_an_interrupt_is_a_partial_report(judged, monkeypatch, capsys):
    def interrupted(options, session, golden, found):
        found.append(row())
        raise KeyboardInterrupt

    options = judged()
    monkeypatch.setattr(gate, "run_parts", interrupted)
    assert gate.gate(options) == 2
    assert "parity incomplete: 1 check of 1 implementation" in capsys.readouterr().out


def test_a_lost_process_is_a_row_of_its_check():
    session = gate.session_of(gate.Options(device=CPU, impl="topk"))
    part = gate.judging_part(gate.Options(device=CPU, impl="topk", level=("selection",)), session, Path("x"), 1)
    (found,) = part.read(0, Lost("its process was killed by SIGSEGV"))
    assert (found.implementation, found.op, found.level, found.status) == ("topk", "topk", "selection", Status.ERROR)
    assert found.message == "its process was killed by SIGSEGV" and not found.repro
    (golden,) = part.read(len(part.jobs) - 1, Lost("its process ended with exit code 139"))
    assert (golden.implementation, golden.level, golden.status) == ("reference", "golden", Status.ERROR)
    (kernels,) = gate.compile_part(gate.Options(device=CPU)).read(0, Lost("its process was killed by SIGABRT"))
    assert (kernels.implementation, kernels.check, kernels.status) == ("kernels", "compile", Status.ERROR)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, ["judge", "compile", "faults"]),
        ({"impl": "topk"}, ["judge"]),
        ({"level": ("selection",)}, ["judge"]),
        ({"profile": "smoke"}, ["judge", "compile"]),
        ({"compile": False, "faults": False}, ["judge"]),
    ],
    ids=lambda value: " ".join(value) or "all",
)
def test_each_part_is_run_where_it_belongs(more, wanted, monkeypatch):
    run: list[str] = []
    names = {"parity.suite.jobs:judge_here": "judge", "parity.build.compile:rows_of_gate": "compile"}

    def collect(part: Part, rows: list[Row]) -> None:
        run.append(names.get(part.jobs[0].function, "faults"))

    monkeypatch.setattr(gate, "collect", collect)
    options = gate.Options(device=CPU, golden=False, **more)
    rows: list[Row] = []
    gate.run_parts(options, gate.session_of(replace(options, impl="topk")), None, rows)
    assert run == wanted and rows == []


def test_smoke_compiles_for_one_architecture_only():
    assert gate.compile_part(gate.Options(device=CPU, profile="smoke", fixtures="f")).jobs == [
        Job("parity.build.compile:rows_of_gate", (True, "f"))
    ]


@pytest.mark.parametrize(
    ("device", "cores", "gigabytes", "workers"),
    [
        ("cpu", 1, 0, 1),
        ("cpu", 16, 0, 2),
        ("cuda", 16, 140, 8),
        ("cuda", 64, 80, 5),
        ("cuda", 16, 24, 1),
        ("cuda", 2, 140, 1),
    ],
)
def test_as_many_workers_as_cores_and_memory_hold(monkeypatch, device, cores, gigabytes, workers):
    monkeypatch.setattr(gate.os, "cpu_count", lambda: cores)
    monkeypatch.setattr("parity.run.device.total_memory", lambda: gigabytes << 30)
    assert gate.default_workers(device) == workers

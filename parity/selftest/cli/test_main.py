"""The command line: every subcommand, option and exit code, and that a mistake costs one sentence."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity.cli import main as cli
from parity.command import CommandError
from parity.results import FORMAT, GATE
from parity.vocabulary import LEVELS, PROFILES

ROOT = Path(__file__).resolve().parents[3]
GOOD = str(ROOT / "examples" / "own_kernel.py")


def one_sentence(text: str) -> str:
    """The single line that was printed."""
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


@pytest.mark.parametrize(
    "words, part",
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["gate", "--nonsense"], "unknown argument '--nonsense'"),
        (["gate", "--prof", "ci"], "unknown argument '--prof'"),
        (["gate", "--profile", "fast"], "invalid choice: 'fast'"),
        (["gate", "--layout", "int8", "--device", "cpu"], "layout must be one of bf16"),
        (["gate", "--op", "store-all", "--device", "cpu"], "op: expected one of"),
        (["gate", "--device", "tpu"], "invalid choice: 'tpu'"),
        (["gate", "--require-device", "tpu"], "invalid choice: 'tpu'"),
        (["gate", "--require-device", "cuda", "--device", "cpu"], "contradicts --device cpu"),
        (["gate", "--seconds", "0"], "must be a positive number, got 0"),
        (["gate", "--seconds", "soon"], "invalid number value: 'soon'"),
        (["gate", "--seed", "-1"], "must be 0 or more, got -1"),
        (["gate", "--examples", "few"], "invalid whole number value: 'few'"),
        (["gate", "--examples", "0"], "must be 1 or more, got 0"),
        (["gate", "--workers", "x"], "invalid whole number value: 'x'"),
        (["gate", "--workers", "0"], "must be 1 or more, got 0"),
        (["gate", "--workers", "9999999"], "must be at most"),
        (["gate", "--fixtures", "no/such"], "--fixtures no/such: no such folder"),
        (["gate", "--level", "magic"], "invalid choice: 'magic'"),
        (["gate", "--json", "no/such/folder/a.json"], "cannot write no/such/folder/a.json"),
        (["gate", "--junit", "no/such/folder/a.xml"], "cannot write no/such/folder/a.xml"),
        (["gate", "--markdown", "no/such/folder/a.md"], "cannot write no/such/folder/a.md"),
        (["run"], "--case"),
        (["run", "--case", "v1 lens=3"], "--impl is missing"),
        (["run", "--case", "v0 lens=3", "--impl", "torch-bf16"], "must begin with v2 or v1"),
        (["run", "--case", "v1 lens=3 colour=red", "--impl", "torch-bf16"], "unknown name"),
        (["golden"], "ACTION"),
        (["golden", "paint"], "invalid choice: 'paint'"),
        (["golden", "verify", "--fixtures", "no/such/folder"], "no such folder"),
        (["merge"], "FILE"),
        (["merge", "no-such.json"], "no-such.json: No such file"),
        (["recorded"], "DIR"),
        (["list", "--json", "."], "is a folder"),
        (["compile", "--arch", "sm_75"], "must be one of sm_80"),
        (["compile", "--arch", "ninety"], "invalid architecture value: 'ninety'"),
        (["compile", "--nonsense"], "unknown argument '--nonsense'"),
        (["compile", "--fixtures", "no/such"], "--fixtures no/such: no such folder"),
        (["bench", "--rounds", "0"], "must be 1 or more, got 0"),
        (["bench", "--only", "nothing"], "invalid choice: 'nothing'"),
        (["bench", "--json", "no/such/x.json"], "its folder does not exist"),
        (["probe", "--operand", "int8"], "invalid choice: 'int8'"),
        (["probe", "--json", "no/such/x.json"], "its folder does not exist"),
        (["mutants", "--workers", "9999999"], "must be at most"),
        (["mutants", "--kind", "magic"], "invalid choice: 'magic'"),
        (["mutants", "no-such-model"], "no fault model 'no-such-model'"),
        (["diagnose"], "say either --impl"),
        (["diagnose", "--capture", "no-such.pt"], "no-such.pt"),
        (["explain", "--heads", "0"], "must be 1 or more, got 0"),
        (["explain", "--preset", "no-such"], "cannot explain"),
        (["sweep"], "recall|memory"),
        (["sweep", "recall", "--cases", "x"], "invalid whole number value: 'x'"),
        (["story", "--seed", "-1"], "must be 0 or more, got -1"),
        (["report"], "expected at least one JSON file"),
    ],
    ids=lambda value: "-".join(value)[:40] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_sentence_and_exit_code_2(words, part, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # a command must not decide for the process of the tests
    code: object
    try:
        code = cli.main(words)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    line = one_sentence(err)
    assert part in line
    assert line.startswith(f"parity {words[0]}" if words[0] != "nonsense" else "parity:")


def test_no_command_prints_the_help_and_exits_2(capsys):
    assert cli.main([]) == 2
    assert "gate" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["gate", "--help"], ["golden", "verify", "--help"]], ids=" ".join)
def test_help_names_the_exit_codes(words, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    assert "0 passed, 1 parity failed, 2 usage" in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("indexer-parity")


def test_the_command_line_itself_needs_no_torch():
    code = "import sys, parity.cli.main as cli; cli.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_a_package_that_is_not_installed_is_named(capsys, monkeypatch):
    def missing(options):
        raise ModuleNotFoundError("No module named 'torch'", name="torch.nn")

    monkeypatch.setattr("parity.cli.list.run", missing)
    assert cli.main(["list"]) == 2
    assert "needs the package torch, which is not installed here: pip install torch" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("words", [["bench"], ["probe"], ["probe", "--device", "cuda"]], ids=" ".join)
def test_commands_that_need_a_gpu_say_so(words, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(words) == 2
    assert "no CUDA device" in one_sentence(capsys.readouterr().err)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_an_interrupt_and_exits_2(number, capsys, monkeypatch):
    monkeypatch.setattr("parity.cli.list.run", lambda options: os.kill(os.getpid(), number))
    assert cli.main(["list"]) == 2
    assert {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number] in one_sentence(capsys.readouterr().err)


def test_list_names_everything_there_is(tmp_path, commands):
    done = commands("list", "--device", "cpu", "--json", "list.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "list.json").read_text())
    names = {item["name"] for item in found["implementations"]}
    assert {"torch-bf16", "torch-fp8", "triton-bf16", "triton-fp8", "topk", "store-bf16-published"} <= names
    assert {item["level"] for item in found["checks"]} == set(LEVELS)
    assert set(found["profiles"]) == set(PROFILES)
    for word in (*sorted(names), *LEVELS, *PROFILES, "octaves", "narrow", "compressor", "fp4"):
        assert word in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("words", [["list", "--device", "cuda"], ["gate", "--require-device", "cuda"]], ids=" ".join)
def test_a_missing_card_is_one_sentence(words, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(words) == 2
    assert "no CUDA device" in one_sentence(capsys.readouterr().err)


FAULTY = """
import importlib.util
spec = importlib.util.spec_from_file_location("own_kernel", {good!r})
own = importlib.util.module_from_spec(spec)
spec.loader.exec_module(own)

def late(**named):
    result = own.logits(**named)
    result[0, 0] *= 1.001
    return result

def crash(**named):
    import os
    os.abort()
"""


@pytest.fixture
def faulty(tmp_path) -> Path:
    path = tmp_path / "faulty.py"
    path.write_text(FAULTY.format(good=GOOD))
    return path


def test_run_passes_a_correct_function(tmp_path, commands):
    words = ("run", "--case", "v1 lens=65,3 data=exact seed=4 perm=2", "--device", "cpu", "--json", "run.json")
    done = commands(*words, "--impl", f"{GOOD}:logits", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("parity passed: ")
    report = json.loads((tmp_path / "run.json").read_text())
    assert report["exit"] == 0
    assert "layout" in {row["level"] for row in report["rows"]}
    assert report["case"] == "v2 op=paged_logits lens=65,3 seed=4 perm=2"


def test_run_rejects_a_wrong_cell_and_says_where(tmp_path, faulty, commands):
    words = ("run", "--case", "v1 lens=65,3 data=exact seed=4", "--device", "cpu", "--layout", "bf16")
    done = commands(*words, "--impl", f"{faulty}:late", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed      layout/" in done.stdout
    assert "request 0, row 0, key 0" in done.stdout


def test_run_reports_a_crash_as_an_error(tmp_path, faulty, commands):
    words = ("run", "--case", "v1 lens=5", "--device", "cpu", "--check", "layout/exact")
    done = commands(*words, "--impl", f"{faulty}:crash", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "SIGABRT" in done.stdout


@pytest.mark.parametrize(
    "words, part",
    [
        (["--case", "v1 lens=3", "--impl", "warp-bf16"], "warp-bf16"),
        (["--case", "v1 lens=3", "--impl", "no.such.module:f", "--layout", "bf16"], "no.such.module"),
        (["--case", "v1 lens=3", "--impl", "torch-fp8"], "bf16 pages"),
        (["--case", "v1 lens=3 stage=topk data=random", "--impl", "torch-bf16"], "is of topk"),
        (["--case", "v1 lens=3", "--impl", "torch-bf16", "--contract", "none.toml"], "none.toml"),
        (["--case", "v1 lens=3", "--impl", "torch-bf16", "--check", "layout/none"], "layout/none"),
    ],
    ids=lambda value: value[-1][:24] if isinstance(value, list) else None,
)
def test_run_refuses_what_does_not_fit(words, part, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["run", "--device", "cpu", *words]) == 2
    assert part in one_sentence(capsys.readouterr().err)


def test_merge_adds_examples_and_keeps_the_worst(tmp_path, capsys):
    first = {"implementation": "a", "level": "layout", "check": "exact", "status": "passed", "examples": 3}
    rows = [first, {**first, "check": "tail", "status": "not run", "examples": 0, "message": "why"}]
    others = [{**first, "examples": 4, "ratio": 0.5}, {**first, "check": "tail", "examples": 1}]
    files = []
    for name, found in (("a.json", rows), ("b.json", others)):
        report = {"kind": GATE, "format": FORMAT, "rows": found, "provenance": {"device": name}}
        (tmp_path / name).write_text(json.dumps(report))
        files.append(str(tmp_path / name))
    out = tmp_path / "all.json"
    assert cli.main(["merge", *files, "--json", str(out), "--markdown", str(tmp_path / "all.md")]) == 0
    merged = json.loads(out.read_text())
    assert [(row["check"], row["status"], row["examples"]) for row in merged["rows"]] == [
        ("exact", "passed", 7),
        ("tail", "passed", 1),
    ]
    assert merged["rows"][0]["ratio"] == 0.5
    assert [run["provenance"]["device"] for run in merged["runs"]] == ["a.json", "b.json"]
    assert "8 examples" in capsys.readouterr().out
    assert (tmp_path / "all.md").read_text().startswith("## ✅ parity passed")
    assert cli.main(["merge", str(out), str(out)]) == 0, "a merged file can be merged again"

    others[0]["status"] = "failed"
    (tmp_path / "b.json").write_text(json.dumps({"kind": GATE, "format": FORMAT, "rows": others}))
    assert cli.main(["merge", *files]) == 1


@pytest.mark.parametrize(
    "text, part",
    [
        ("{", "not JSON"),
        ("[]", "not a report"),
        (json.dumps({"kind": GATE, "format": 99}), "report format 99"),
        (json.dumps({"kind": GATE, "format": 1, "rows": [{"level": "layout"}]}), "lacks implementation"),
        (
            json.dumps(
                {
                    "kind": GATE,
                    "format": 1,
                    "rows": [{"implementation": "a", "level": "layout", "check": "c", "status": "fine"}],
                }
            ),
            "unknown status 'fine'",
        ),
    ],
)
def test_merge_refuses_a_foreign_file(text, part, tmp_path, capsys):
    (tmp_path / "x.json").write_text(text)
    assert cli.main(["merge", str(tmp_path / "x.json")]) == 2
    line = one_sentence(capsys.readouterr().err)
    assert part in line
    assert "x.json" in line


def test_recorded_replays_the_selection_and_refuses_another_folder(tmp_path, commands):
    done = commands("recorded", str(ROOT / "fixtures" / "official"), "--json", "out.json", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "out.json").is_file()
    empty = commands("recorded", str(tmp_path), folder=tmp_path)
    assert empty.returncode == 2
    assert "index.json" in one_sentence(empty.stderr)


def test_a_command_error_is_not_swallowed():
    with pytest.raises(CommandError, match="cannot write"):
        cli.dispatch(["merge", "x", "--json", "no/such/folder/x.json"])

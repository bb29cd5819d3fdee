"""The pytest face: every option, exit codes, header, table, JSON, xdist, and that it does nothing unasked."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from parity.selftest.helpers import FAULTY, ROOT
from parity.suite import plugin

SUITE = ["--pyargs", "parity.suite"]
FAST = ["--parity-profile", "smoke", "--parity-examples", "8"]
LAYOUT = ["-k", "test_layout"]


def run_pytest(folder, *words, **environment):
    """pytest in a process of its own, started in `folder`, with this checkout on the path."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "TRITON_", "COV_"))}
    kept |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "parity.suite.plugin"]
    done = subprocess.run([*command, *words], cwd=folder, env=kept, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def user(name, layout="bf16"):
    """The functions of faulty.py know nothing but a CPU."""
    return ["--parity-impl", f"{FAULTY}:{name}", "--parity-layout", layout, "--parity-device", "cpu"]


def test_a_correct_function_from_another_folder(tmp_path):
    out = tmp_path / "rows.json"
    code, text = run_pytest(
        tmp_path, *SUITE, *user("correct"), *FAST, *LAYOUT, "--parity-seed", "5", "--parity-json", str(out)
    )
    assert code == 0, text
    assert "profile smoke, seed 5" in text and f"{FAULTY}:correct: paged_logits, bf16" in text
    assert "in a worker process" in text and "interpreted" in text
    assert "parity passed: 6 checks of 1 implementation" in text
    report = json.loads(out.read_text())
    assert report["seed"] == 5 and report["profile"] == "smoke"
    assert report["provenance"]["torch"] and report["kind"] == "indexer-parity/gate"
    rows = {row["check"]: row for row in report["rows"]}
    assert set(rows) == {"exact", "exact_wide", "poisoned", "strided", "borders", "long"}
    assert sum(row["examples"] for row in rows.values()) >= 8
    assert all(row["status"] == "passed" and row["cells"] > 0 and row["seconds"] >= 0 for row in rows.values())


def test_a_faulty_function_exits_1_with_a_minimal_case(tmp_path):
    code, text = run_pytest(tmp_path, *SUITE, *user("no_relu"), *FAST, "-k", "test_layout and exact", "-x")
    assert code == 1
    assert "layout/exact failed: request 0, row 0, key 0" in text
    assert f"--impl {FAULTY}:no_relu --layout bf16" in text
    assert "parity failed" in text


def test_two_processes_give_the_same_rows_as_one(tmp_path):
    tables = []
    for name, more in (("one", []), ("two", ["-n", "2"])):
        out = tmp_path / f"{name}.json"
        words = ["--parity-op", "topk", "--parity-impl", "topk", *FAST, "-k", "selection or invariance"]
        code, text = run_pytest(tmp_path, *SUITE, *words, *more, "--parity-json", str(out))
        assert code == 0, text
        rows = json.loads(out.read_text())["rows"]
        tables.append(sorted((row["level"], row["check"], row["examples"], row["status"]) for row in rows))
    assert tables[0] == tables[1] and len(tables[0]) >= 6


def test_a_dead_worker_process_is_a_row_of_its_own(tmp_path):
    """A crash in the judging process itself (a built-in kernel's, say) must not vanish from the report."""
    (tmp_path / "killer.py").write_text(
        "import os\n"
        "def pytest_runtest_call(item):\n"
        "    if 'poisoned' in item.name and 'PYTEST_XDIST_WORKER' in os.environ:\n"
        "        os._exit(9)\n"
    )
    out = tmp_path / "rows.json"
    words = [*SUITE, "--parity-impl", "torch-bf16", *FAST, *LAYOUT, "-p", "killer", "-n", "1"]
    environment = {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    code, text = run_pytest(tmp_path, *words, "--parity-json", str(out), **environment)
    assert code == 1
    rows = {row["check"]: row for row in json.loads(out.read_text())["rows"]}
    assert rows["poisoned"]["status"] == "error" and rows["poisoned"]["implementation"] == "torch-bf16", text
    assert rows["exact"]["status"] == "passed"


def test_nothing_judged_exits_2(tmp_path):
    contract = tmp_path / "contract.toml"
    contract.write_text('layout = "bf16"\ndevices = ["sm_42"]\n')
    out = tmp_path / "rows.json"
    words = ["--parity-impl", f"{FAULTY}:correct", "--parity-contract", str(contract), "--parity-json", str(out)]
    code, text = run_pytest(tmp_path, *SUITE, *words, *FAST)
    assert code == 2
    assert "nothing judged" in text and "sm_42" in text
    assert {row["status"] for row in json.loads(out.read_text())["rows"]} == {"not run"}


def test_the_time_budget_holds(tmp_path):
    words = [*SUITE, *user("correct"), "--parity-profile", "nightly", "--parity-seconds", "3", *LAYOUT]
    out = tmp_path / "rows.json"
    code, text = run_pytest(tmp_path, *words, "--parity-json", str(out))
    assert code == 0, text
    report = json.loads(out.read_text())
    assert f"seed {report['seed']}" in text  # drawn, and reported
    assert sum(row["seconds"] for row in report["rows"]) < 12


def test_two_processes_share_one_clock(tmp_path):
    """Cheap checks leave nearly all the time; the clock of each process must know what ended in both."""
    spy = tmp_path / "spy.py"
    spy.write_text(
        "import os\n"
        "from parity.suite.clock import Clock\n"
        "share = Clock.share\n"
        "def noted(self, weight, total):\n"
        f"    with open({str(tmp_path / 'seen')!r}, 'a') as file:\n"
        "        file.write(f'{os.getpid()} {self.processes} {self.ended()} {total} {self.started}\\n')\n"
        "    return share(self, weight, total)\n"
        "Clock.share = noted\n"
    )
    words = ["-p", "spy", *SUITE, *user("correct"), *FAST, "--parity-seconds", "60", *LAYOUT, "-n", "2"]
    code, text = run_pytest(tmp_path, *words)
    assert code == 0, text
    seen = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) == 6 and {line[1] for line in seen} == {"2"} and len({line[4] for line in seen}) == 1
    assert len({line[0] for line in seen}) == 2 and len({line[3] for line in seen}) == 1
    # The last to start has seen the others' end, bar the one that may still run beside it.
    assert max(float(line[2]) for line in seen) > float(seen[0][3]) / 3


def test_the_nightly_profile_remembers_failures(tmp_path):
    words = [*SUITE, *user("no_relu"), "--parity-profile", "nightly", "--parity-examples", "40", "-k", "ordinary"]
    assert run_pytest(tmp_path, *words)[0] == 1
    assert any((tmp_path / ".parity" / "examples").iterdir())
    code, text = run_pytest(tmp_path, *words)
    assert code == 1 and "rounding  failed         1 " in text  # the first case drawn is the remembered one


def config_of(**given):
    """As much of a pytest config as opening a session reads."""
    names = [*("impl", "layout", "op", "contract", "device", "require_device"), *("profile", "seed", "seconds")]
    values = {f"parity_{name}": given.get(name) for name in [*names, "examples", "json", "arithmetic"]}
    return SimpleNamespace(option=SimpleNamespace(**values), getini={"parity_profile": "ci"}.get)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"impl": "no-such"}, "expected one of torch-bf16"),
        ({"impl": f"{FAULTY}:correct"}, "say which of the layouts (parity list)"),
        ({"impl": f"{FAULTY}:nothing", "layout": "bf16"}, "has no 'nothing'"),
        ({"impl": "torch-bf16", "layout": "fp8"}, "reads bf16 pages, got fp8"),
        ({"impl": "torch-bf16", "op": "topk"}, "is a function of paged_logits, got topk"),
        ({"op": "scores"}, "op: expected one of paged_logits, topk"),
        ({"layout": "fp9"}, "layout must be one of bf16, fp8, fp4, got 'fp9'"),
        ({"op": "compressor"}, "no built-in implementation of compressor"),
        ({"layout": "fp4"}, "no built-in implementation of paged_logits has fp4 pages"),
        ({"impl": f"{FAULTY}:correct", "op": "scores"}, "op: expected one of paged_logits, topk"),
        ({"impl": "torch-bf16", "contract": "none.toml"}, "cannot be read"),
        ({"contract": "none.toml"}, "name it with --impl"),
        ({"profile": "fast"}, "expected one of smoke"),
        ({"seed": -3}, "non-negative"),
        ({"seconds": 0.0}, "positive"),
        ({"examples": 0}, "at least 1"),
        ({"json": "no/such/folder/x.json"}, "its folder does not exist"),
        ({"require_device": "cuda", "device": "cpu"}, "contradicts"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_bad_options_are_one_sentence(given, sentence):
    with pytest.raises(pytest.UsageError) as caught:
        plugin._open(config_of(**given))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_device_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for option in ("require_device", "device"):
        with pytest.raises(pytest.UsageError, match="no CUDA device"):
            plugin._open(config_of(**{option: "cuda"}))


@pytest.mark.parametrize("words", [["--parity-seed", "x"], ["--parity-impl", "no-such"]])
def test_a_usage_error_exits_4(tmp_path, words):
    code, text = run_pytest(tmp_path, *SUITE, *words)
    assert code == pytest.ExitCode.USAGE_ERROR
    assert any(part in text for part in ("invalid", "expected one of", "must be one of"))


def test_unasked_it_does_nothing(tmp_path):
    (tmp_path / "test_mine.py").write_text(
        "import os, sys\n"
        "def test_mine():\n"
        "    assert not {'torch', 'triton', 'hypothesis'} & set(sys.modules)\n"
        "    assert 'TRITON_INTERPRET' not in os.environ\n"
    )
    code, text = run_pytest(tmp_path, "-p", "no:hypothesispytest", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    assert code == 0, text
    said = [line for line in text.splitlines() if not line.startswith(("plugins:", "rootdir:"))]
    assert not any("parity" in line.replace(str(tmp_path), "") for line in said), text


def test_asked_it_decides_on_interpretation_before_conftests(tmp_path):
    (tmp_path / "conftest.py").write_text(
        "import os, torch\nassert torch.cuda.is_available() or os.environ.get('TRITON_INTERPRET') == '1'\n"
    )
    (tmp_path / "test_mine.py").write_text("def test_mine():\n    pass\n")
    code, text = run_pytest(tmp_path, ".", "--parity-impl", "torch-bf16")
    assert code == 0, text


def test_help_lists_every_option(tmp_path):
    code, text = run_pytest(tmp_path, "--help")
    assert code == 0
    for name in ("impl", "layout", "op", "contract", "device", "require-device", "profile", "seed", "seconds"):
        assert f"--parity-{name}=" in text
    assert "--parity-examples=" in text and "--parity-json=" in text

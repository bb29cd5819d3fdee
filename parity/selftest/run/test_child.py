"""The child process from outside: whose files it takes for ours, and that it leaves nothing when its parent ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from parity.run.processes import ROOT, claim_packages
from parity.run.worker import Child

ZEROS = """
import helper
import torch

def f(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    return torch.zeros(q.shape[0] * q.shape[1], max_context_len) + helper.ZERO
"""
HANGS = """
import os, pathlib, subprocess, sys, time

def f(**named):
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    pathlib.Path("pids.tmp").write_text(f"{os.getpid()} {started.pid}")
    pathlib.Path("pids.tmp").rename("pids")
    time.sleep(600)
"""
RUN = ("run", "--case", "v2 op=paged_logits lens=3 heads=8", "--layout", "bf16", "--check", "layout/exact")


def parity(folder: Path, *words: str, flags: tuple[str, ...] = (), **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "parity", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_a_file_may_have_the_name_of_a_module_of_ours(tmp_path: Path) -> None:
    # `python -m parity` would run a parity.py here; the installed command does not look there, as with -P.
    started = []
    for names, flags in ((("impl", "reference", "torch"), ()), (("parity", "impl"), ("-P",))):
        folder = tmp_path / names[0]
        folder.mkdir()
        for name in names:
            (folder / f"{name}.py").write_text(ZEROS)
        (folder / "helper.py").write_text("ZERO = 0.0\n")
        started.append(parity(folder, *RUN, "--impl", f"{names[0]}.py:f", flags=flags))
    for process in started:
        out, _ = process.communicate(timeout=300)
        assert "got 0; wanted" in out, out


def test_our_packages_are_imported_from_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("impl", "reference"):
        (tmp_path / f"{name}.py").write_text("")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    claim_packages()
    for name in ("impl", "reference"):
        assert sys.modules[name].__file__ == str(ROOT / name / "__init__.py")


def test_files_of_one_name_in_two_folders_are_two_modules(tmp_path: Path) -> None:
    from parity.run.loading import resolve_name

    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "kernel.py").write_text(
            f"calls = []\ndef f(): calls.append(0); return '{folder}', calls\n"
        )
    for count in (1, 2):
        for folder in ("a", "b"):
            assert resolve_name(f"{tmp_path / folder / 'kernel.py'}:f")() == (folder, [0] * count)


@pytest.mark.slow
def test_nothing_is_left_when_the_parent_ends(tmp_path: Path) -> None:
    started = []
    for number, code in ((signal.SIGTERM, 2), (signal.SIGKILL, -signal.SIGKILL)):
        folder = tmp_path / number.name
        (folder / "scratch").mkdir(parents=True)
        (folder / "hangs.py").write_text(HANGS)
        parent = parity(folder, *RUN, "--impl", "hangs.py:f", PARITY_SCRATCH=str(folder / "scratch"))
        started.append((folder, parent, number, code))
    for folder, parent, number, code in started:
        until((folder / "pids").exists, 300)
        pids = [int(pid) for pid in (folder / "pids").read_text().split()]
        assert all(map(runs, pids)) and list((folder / "scratch").iterdir())
        with parent:
            parent.send_signal(number)
            assert parent.wait(60) == code
        until(lambda: not any(map(runs, pids)), 30)  # noqa: B023
        until(lambda: not list((folder / "scratch").iterdir()), 30)  # noqa: B023


def test_an_idle_child_ends_with_its_pipe() -> None:
    child = Child()
    child.start()
    folder, process = child.log.parent, child._process
    assert folder.is_dir() and process is not None
    os.close(child._send)
    child._send = os.open(os.devnull, os.O_WRONLY)
    process.wait(30)
    assert not folder.exists()
    child.stop()


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended (a zombie has)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def until(true: Callable[[], bool], seconds: float) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit, "not within the time"
        time.sleep(0.05)

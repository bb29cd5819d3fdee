"""The pool of processes: order, environment, processes that die, and that nothing is left behind."""

import os
import time
from pathlib import Path

import pytest

from parity.suite import pool
from parity.suite.pool import Job, Lost, Part, Pool, collect

JOBS = "parity.selftest.pool_jobs"


def run(jobs, workers=1, **named):
    with Pool(workers, **named) as opened:
        return dict(opened.run(jobs))


def test_results_come_with_the_index_of_their_job():
    jobs = [Job(f"{JOBS}:double", (number,)) for number in range(7)]
    assert run(jobs, 2) == {number: 2 * number for number in range(7)}


def test_a_process_is_set_up_once_and_knows_its_place(tmp_path, monkeypatch, capfd):
    (tmp_path / "json.py").write_text("raise RuntimeError('a file of the current folder was imported')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")
    jobs = [Job(f"{JOBS}:about")] * 3
    found = run(jobs, setup=Job(f"{JOBS}:set_up", ("once",)), environment={"PARITY_TEST": "1"})
    first = found[0]
    assert [found[index]["pid"] for index in range(3)] == [first["pid"]] * 3 != [os.getpid()] * 3
    assert first["opened"] == ["once"] and first["last"] == str(tmp_path) != first["json"] and not first["torch"]
    wanted = {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PARITY_TEST": "1", "PYTEST_ADDOPTS": None}
    assert first["environment"] == wanted
    assert "PARITY_TEST" not in os.environ and os.environ["PYTEST_ADDOPTS"] == "--collect-only"
    out, err = capfd.readouterr()
    assert out == "" and "this is not the result" in err


def test_a_process_that_dies_costs_its_own_job():
    found = run([Job(f"{JOBS}:crash", (number,)) for number in range(6)], 2)
    assert [found[index] for index in (0, 4, 5)] == [0, 4, 5]
    assert found[1] == Lost("its process was killed by SIGSEGV")
    assert found[2] == Lost("its process ended with exit code 7")
    assert found[3].message.endswith("ZeroDivisionError: the framework's own fault\n") and "crash" in found[3].message


@pytest.mark.parametrize(
    ("setup", "part"), [("crash_at_once", "SIGSEGV"), ("no_such_function", "AttributeError")], ids=["crash", "error"]
)
def test_a_process_that_cannot_be_set_up_ends_the_pool(setup, part):
    found = run([Job(f"{JOBS}:double", (1,))] * 5, 1, setup=Job(f"{JOBS}:{setup}"))
    assert len(found) == 5 and all(part in lost.message for lost in found.values())


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has: whoever adopted it will see to it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("clean", [True, False], ids=["ends", "must be killed"])
def test_an_interrupt_leaves_nothing_behind_but_the_rows(clean, tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "GRACE_SECONDS", 60.0 if clean else 0.5)
    rows: list[object] = []

    def show(found):
        for _ in range(600):
            if (tmp_path / "traces").exists() and len(rows) == 0:
                break
            time.sleep(0.1)
        raise KeyboardInterrupt

    jobs = [Job(f"{JOBS}:leave_traces", (str(tmp_path), clean)), Job(f"{JOBS}:double", (4,))]
    with pytest.raises(KeyboardInterrupt):
        collect(Part(jobs, lambda index, result: [(index, result)], show, workers=2), rows)
    assert rows == [(1, 8)]
    folder, *pids = (tmp_path / "traces").read_text().split()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(gone(int(pid)) for pid in pids):
        time.sleep(0.1)
    assert all(gone(int(pid)) for pid in pids) and not Path(folder).exists() and not Path(folder).parent.exists()
    assert (tmp_path / "closed").exists() is clean

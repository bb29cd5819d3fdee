"""An operation that another package adds through an entry point goes all the way, with no change here.

`toy.py` beside this file is all that such a package holds; the tests install it into a folder of its own, and every
process that they start finds it there by its metadata."""

import json
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from parity.results import GATE, RUN, Report, Row
from parity.selftest.helpers import ROOT, Commands, python
from parity.vocabulary import Status

SOURCE = Path(__file__).with_name("toy.py")
FUNCTIONS = """
import torch

def right(x, a, b):
    return torch.add(b, x, alpha=a)

def wrong(x, a, b):
    y = a * x + b
    y[2:3] += 1
    return y

def shifted(x, a, b):
    return a * x.roll(1) + b

def writes(x, a, b):
    return x.mul_(a).add_(b)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the installed package, and the functions that are judged."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "toy.py").write_text(SOURCE.read_text())
    info = folder / "toy-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text("[parity.operations]\ntoy = toy:OPERATION\n")
    (folder / "mine.py").write_text(FUNCTIONS)
    return folder


def path(home: Path) -> str:
    return os.pathsep.join([str(home), str(ROOT)])


@pytest.fixture(scope="module")
def parity(home: Path) -> Iterator[Callable[..., tuple[int, str]]]:
    """A function that gives exit code and output of a command where the package is installed."""
    commands = Commands(home)

    def parity(*words: str) -> tuple[int, str]:
        done = commands(*words, *(["--device", "cpu"] if words[0] != "report" else []), folder=home)
        return done.returncode, done.stdout + done.stderr

    yield parity
    commands.close()


def test_a_toy_is_no_operation_here():
    assert "toy" not in python("from parity.run import operation; print(operation.names())")


CASES = """
from parity.domain.fields import table
from parity.run.operation import find, parse_case
for text in ("v2 op=toy n=3 seed=5", "v1 stage=toy n=0"):
    case = parse_case(text)
    print(case, parse_case(str(case)) == case, case.size)
for text in ("v2 op=toy", "v2 op=toy n=3 k=1", "v2 op=toy n=65537", "v2 op=joy n=1"):
    try:
        parse_case(text)
    except ValueError as error:
        print(error)
print(table(find("toy").case))
"""


def test_its_cases_are_read_printed_refused_and_documented(home):
    assert python(CASES, PYTHONPATH=path(home)).splitlines() == [
        "v2 op=toy n=3 seed=5 True (20,)",
        "v2 op=toy n=0 True (13,)",
        "a case of toy must say how many numbers, n=..., got none",
        "unknown name in the case string, expected n, seed, got 'k'",
        "n must be an integer from 0 to 65536, got 65537",
        "op: expected one of paged_logits, topk, compressor, store, toy, got 'joy'",
        "| name | default | legal | meaning |",
        "|---|---|---|---|",
        "| `n` | required | 0 to 2^16 | how many numbers |",
        "| `seed` | 0 | 0 to 2^62 | of the numbers |",
    ]


SEARCH = """
import json
import torch
from parity.domain.profiles import profile
from parity.suite.session import open_session
rows = []
for name in ("right", "wrong", "shifted", "writes"):
    session = open_session(
        impl=f"HOME/mine.py:{name}", layout=None, op="toy", contract=None,
        device=torch.device("cpu"), profile=profile("smoke"),
    )
    rows += [session.judge(impl, check).to_json() for impl, check in session.pairs()]
session.close()  # all four functions are called in one child
print(json.dumps(rows))
"""


def test_a_search_finds_and_reduces_what_is_wrong(home):
    """Number 2 is wrong from n = 3 on, to which cases are reduced; another order and written inputs are seen too."""
    code = SEARCH.replace("HOME", str(home))
    rows = [Row.from_json(row) for row in json.loads(python(code, PYTHONPATH=path(home)))]
    found = {row.implementation.rpartition(":")[2]: row for row in rows}
    assert len(found) == 4 and all((row.op, row.layout, row.check) == ("toy", None, "whole") for row in rows)
    right, wrong = found["right"], found["wrong"]
    assert right.status is Status.PASSED and right.examples == 24 and right.cells > 1000
    assert wrong.status is Status.FAILED and wrong.case.split()[2] == "n=3"
    assert wrong.message.startswith("got ") and "; number 2 of 3; parity run --case " in wrong.message
    assert found["shifted"].status is Status.FAILED
    assert found["writes"].message.startswith("inputs: the call wrote x")


def test_it_is_listed(home, parity):
    code, text = parity("list", "--json", f"{home}/list.json")
    assert code == 0 and "toy           a number times another plus a third" in text
    assert "whole (toy)" in text
    found = json.loads((home / "list.json").read_text())["implementations"]
    assert {"name": "toy-torch", "op": "toy", "layout": None, "arithmetic": None, "absent": None} in found


def test_one_case_is_run_and_the_repro_line_of_a_failure_repeats_it(home, parity):
    def run(function: str, case: str) -> tuple[int, str]:
        return parity("run", "--case", case, "--impl", f"{home}/mine.py:{function}", "--json", f"{home}/run.json")

    code, text = run("right", "v2 op=toy n=40 seed=1")
    assert code == 0 and "passed      layout/whole" in text and "1 check of 1 implementation" in text
    report = Report.from_json(json.loads((home / "run.json").read_text()), RUN)
    assert [(row.op, row.status, row.cells) for row in report.rows] == [("toy", Status.PASSED, 40)]
    code, text = run("wrong", "v2 op=toy n=40")
    assert code == 1 and "failed      layout/whole" in text and "number 2 of 40" in text
    (row,) = Report.from_json(json.loads((home / "run.json").read_text()), RUN).rows
    assert row.status is Status.FAILED and float(row.got or 0) == float(row.wanted or 0) + 1
    words = shlex.split(row.repro)
    assert words == ["parity", "run", "--case", "v2 op=toy n=40", "--impl", f"{home}/mine.py:wrong", "--op", "toy"]
    assert parity(*words[1:], "--json", f"{home}/again.json")[0] == 1
    assert Report.from_json(json.loads((home / "again.json").read_text()), RUN).rows == (row,)


def test_the_gate_judges_it_and_the_report_shows_it(home, parity):
    words = ["gate", "--op", "toy", "--profile", "smoke", "--json", f"{home}/gate.json", "--workers", "1"]
    words += ["--no-golden", "--no-faults", "--no-compile"]
    code, text = parity(*words)
    assert code == 0, text
    rows = Report.from_json(json.loads((home / "gate.json").read_text()), GATE).rows
    assert [(row.implementation, row.check, row.status) for row in rows] == [("toy-torch", "whole", Status.PASSED)]
    assert parity(*words, "--impl", f"{home}/mine.py:wrong")[0] == 1
    code, text = parity("report", f"{home}/gate.json", "--output", f"{home}/page.html")
    assert code == 0, text
    assert "v2 op=toy n=3" in (home / "page.html").read_text()

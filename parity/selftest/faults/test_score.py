"""The mutation score: kills by value count, crashes and wrong shapes do not, and correct functions must pass."""

import json

import pytest

from parity.cli import main as cli
from parity.domain.profiles import profile
from parity.faults import catalogue, launches, mutants, score
from parity.ops.check import checks_of
from parity.ops.fault import Fault
from parity.results import MUTANTS, Report
from parity.suite import pool
from parity.vocabulary import Status

QUICK = score.quick(profile("ci"))
BRIEF = score.quick(profile("smoke", examples=6))


@pytest.fixture
def planted(monkeypatch):
    """Adds a model of the test's own to the catalogue; it meets only the first three checks."""
    monkeypatch.setattr(score, "ordered", lambda operation, kind=None: checks_of(operation)[:3])

    def plant(**fields):
        fault = Fault("planted", "relu", "formula", "planted by a test", op="paged_logits", **fields)
        monkeypatch.setitem(catalogue.BY_ID, "planted", fault)
        return fault

    return plant


def test_the_smoke_selection_has_one_model_of_every_kind():
    assert len(catalogue.smoke()) == 13


@pytest.mark.parametrize(
    "id, killer",
    [
        ("relu-missing", "layout/exact"),
        ("weight-bf16", "rounding/ordinary"),
        ("tail-lowest", "layout/exact"),
        ("key-fp16", "rounding/extreme"),
        ("topk-padded-with-0", "selection/synthetic"),
        ("store-scale-page-0", "layout/keys"),
        ("overlap-empty-each-call", "layout/chunks"),
        ("flag-without-effect", "layout/exact"),
    ],
)
def test_a_model_is_killed_by_the_check_that_looks_for_it(id, killer):
    row = score.score(id, QUICK)
    assert (row.facts["outcome"], row.status) == ("killed", Status.PASSED)
    kill = row.kills[0]
    assert f"{kill.level}/{kill.check}" == killer and kill.examples >= 1 and kill.case.startswith("v2 ")


def test_a_crash_is_no_kill(planted):
    def broken(c, x):
        raise RuntimeError("no kernel image")

    planted(change={"relu": broken})
    row = score.score("planted", BRIEF)
    assert row.facts["outcome"] == "crashed only" and "no kernel image" in row.crashes[0]
    assert row.status is Status.FAILED and "crashed only" in row.message and row.repro == "parity mutants planted"


def test_a_wrong_shape_is_no_kill(planted):
    planted(change={"finish": lambda c, out: out[:, :-1]})
    assert score.score("planted", BRIEF).facts["outcome"] == "crashed only"


def test_a_model_that_does_nothing_survives(planted):
    planted(change={"finish": lambda c, out: out})
    row = score.score("planted", BRIEF)
    assert row.facts["outcome"] == "survived" and not row.kills
    assert score.summary([row])["bad"] == ["planted"]


def test_an_equivalent_model_must_be_accepted(planted):
    planted(change={"finish": lambda c, out: out}, equivalent="nothing is changed")
    assert score.score("planted", BRIEF).facts["outcome"] == "accepted"
    planted(change={"relu": lambda c, x: x}, equivalent="a wrong proof")
    row = score.score("planted", BRIEF)
    assert row.facts["outcome"] == "rejected" and score.summary([row])["bad"] == ["planted"]


@pytest.mark.parametrize("id", ["correct-topk", "correct-store-fp8", "correct-compressor"])
def test_correct_implementations_are_accepted(id):
    assert score.score(id, BRIEF).facts["outcome"] == "accepted"


def test_full_asks_every_level():
    row = score.score("relu-missing", BRIEF, full=True)
    assert len({kill.level for kill in row.kills}) >= 3


def test_the_command_runs_models_in_processes_of_its_own(tmp_path, capsys):
    out, text = tmp_path / "m.json", tmp_path / "m.md"
    models = ["topk-padded-with-0", "relu-missing"]
    words = ["mutants", *models, "--workers", "1", "--json", str(out), "--markdown", str(text)]
    assert cli.main(words) == 0
    report = Report.from_json(json.loads(out.read_text()), MUTANTS)
    assert [row.implementation for row in report.rows] == models[::-1]
    assert report.head["summary"]["killed"] == 2 and "mutation score: 2 of 2" in capsys.readouterr().out
    assert "| relu-missing |" in text.read_text()


def test_a_model_whose_process_dies_is_a_row(monkeypatch, capsys):
    part = mutants.part(["relu-missing", "topk-padded-with-0"], "smoke", False, 1)
    rows = part.read(1, pool.Lost("its process was killed by SIGSEGV"))
    part.show(rows)
    assert "[  1/2] topk-padded-with-0: lost" in capsys.readouterr().err
    assert rows[0].status is Status.ERROR and score.summary(rows)["bad"] == ["topk-padded-with-0"]
    assert mutants.problems(rows) == [
        "not as it should be: topk-padded-with-0 lost",
        "its process was killed by SIGSEGV",
    ]


def test_an_unknown_model_is_usage(capsys):
    assert cli.main(["mutants", "no-such-model"]) == 2
    assert "no-such-model" in capsys.readouterr().err


def test_the_catalogue_is_printed(capsys):
    assert cli.main(["mutants", "--list"]) == 0
    assert "gather-materialised" in capsys.readouterr().out


def test_the_row_of_a_launch_that_a_compiler_refuses(monkeypatch):
    row = {"status": "failed", "shared": 131072, "shared_limit": 101376, "reason": "too large"}
    monkeypatch.setattr(launches, "compile_in_children", lambda wanted, timeout: {"key": row})
    assert score.score("tile-128-kib").facts["outcome"] == "killed"
    monkeypatch.setattr(launches, "compile_in_children", lambda wanted, timeout: {"key": {"status": "passed"}})
    assert score.score("tile-128-kib").facts["outcome"] == "survived"


def test_matrix_text_names_the_crash_of_what_was_not_killed(planted):
    planted(change={"finish": lambda c, out: out[:1, :-1]})
    text = mutants.text([score.score("planted", BRIEF)])
    assert "crashed only" in text and "result: expected" in text

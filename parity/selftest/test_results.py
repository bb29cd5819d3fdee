"""From rows to a report: what rejects, what counts as judged, and JSON both ways, also of older files."""

import dataclasses
import json
from itertools import permutations
from pathlib import Path

import pytest

from parity import vocabulary
from parity.command import finite
from parity.results import FORMAT, GATE, Report, Row, Verdict, add_up
from parity.vocabulary import Grounds, Status

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def row(status="passed", implementation="a", level="layout", check="exact", examples=1, **more):
    return Row(implementation, level, check, Status(status), examples, **more)


def test_orders_of_statuses_are_complete():
    assert set(vocabulary.SEVERITY) == set(vocabulary.PRECEDENCE) == set(Status)
    assert [s for s in Status if s.counts_against] == [
        *(Status.FAILED, Status.VACUOUS, Status.INCOMPLETE, Status.ERROR)
    ]
    assert [grounds for grounds in Grounds if grounds.evidence] == [Grounds.VALUES, Grounds.ROUTE]


@pytest.mark.parametrize(
    "statuses, verdict",
    [
        ([], ("nothing judged", 2)),
        (["not run"], ("nothing judged", 2)),
        (["unsupported", "not run"], ("nothing judged", 2)),
        (["passed"], ("passed", 0)),
        (["passed", "not run", "unsupported"], ("passed", 0)),
        (["passed", "failed"], ("failed", 1)),
        (["passed", "vacuous"], ("failed", 1)),
        (["passed", "error"], ("failed", 1)),
        (["not run", "error"], ("failed", 1)),
    ],
)
def test_the_verdict_of_a_run(statuses, verdict):
    for order in permutations(statuses):
        report = Report(tuple(row(status) for status in order))
        assert (report.verdict, report.exit) == verdict
        partial = dataclasses.replace(report, partial="interrupted")
        assert (partial.verdict, partial.exit) == ("incomplete", 2) and partial.sentence.endswith(", interrupted")


def test_the_verdict_line_counts_what_was_not_judged():
    rows = (row(examples=1200), row("not run", check="b"), row("unsupported", implementation="b"))
    line = Report(rows).sentence
    assert line == "parity passed: 1 check of 1 implementation, 1,200 examples, 1 not run, 1 unsupported"


def test_a_passing_reference_alone_judges_nothing_but_a_failing_one_rejects():
    assert Report((row(implementation="reference"), row("not run"))).verdict == "nothing judged"
    assert Report((row("failed", implementation="reference"), row())).verdict == "failed"


def test_compiling_judges_no_implementation_but_can_reject_one():
    compiled, failed = row(arch="sm_90"), row("failed", arch="sm_90")
    unsupported = row("unsupported", arch="sm_80")
    assert Report((compiled,)).verdict == "nothing judged" and Report((compiled, failed)).verdict == "failed"
    line = Report((row(), compiled, unsupported)).sentence
    assert line == "parity passed: 1 check of 1 implementation, 1 example, 1 compiled, 1 unsupported"


FULL = row(
    "failed",
    op="store",
    layout="fp8",
    dot="ieee float32",
    cells=4,
    ratio=float("inf"),
    resolution=0.0,
    undecided=0.5,
    seconds=1.5,
    message="what",
    note="a note",
    grounds=Grounds.ROUTE,
    case="v2 op=store",
    repro="parity run",
    first_case="v2 first",
    worst_case="v2 worst",
    where={"row": 3},
    got=1.5,
    wanted="inf",
    bound=1e-3,
    arch="sm_90",
    kills=(row("failed", check="b", case="v2 small"),),
    crashes=("layout/c: error: no",),
    coverage={"reached": {"length": {"0": 1}}, "pairs": "0"},
    facts={"half": "A"},
)


def test_a_row_is_read_back_as_it_was_written():
    assert all(getattr(FULL, field.name) not in (None, "", (), {}) for field in dataclasses.fields(Row))
    for each in (FULL, row(), row("not run", examples=0)):
        assert Row.from_json(json.loads(json.dumps(finite(each.to_json())))) == each
    assert row().to_json() == {
        "implementation": "a",
        "level": "layout",
        "check": "exact",
        "status": "passed",
        "examples": 1,
    }


def test_a_row_takes_everything_that_a_verdict_says():
    verdict = Verdict(Status.FAILED, "layout", "exact", "m", 2.0, 0.1, 0.2, 3, {"row": 1}, 1, 2, 0.5, "c", "r", "n")
    made = Row.of(verdict, "a", examples=7, repro="")
    for field in dataclasses.fields(verdict):
        assert getattr(made, field.name) == ("" if field.name == "repro" else getattr(verdict, field.name))
    assert (made.implementation, made.examples) == ("a", 7)


def test_a_report_is_read_back_as_it_was_written():
    report = Report((FULL, row()), head={"profile": "ci", "provenance": {"device": "cpu"}}, partial="interrupted")
    written = json.loads(json.dumps(finite(report.to_json())))
    # A report adds up its rows' coverage; they are written without it.
    plain = dataclasses.replace(FULL, coverage={})
    assert Report.from_json(written) == dataclasses.replace(report, rows=(plain, row()))
    assert (written["kind"], written["format"], written["exit"]) == (GATE, FORMAT, 2)


@pytest.mark.parametrize("file", sorted(FIXTURES.glob("*/suite*.json")), ids=lambda path: path.stem)
def test_files_of_the_first_format_are_read(file):
    given = json.loads(file.read_text())
    report = Report.from_json(given)
    assert (report.verdict, report.exit, report.sentence) == (given["verdict"], given["exit"], given["sentence"])
    assert {found.op for found in report.rows} <= {"paged_logits", "topk", "store", None}
    for found, old in zip(report.rows, given["rows"], strict=True):
        assert str(found.ratio) == str(None if (ratio := old.get("worst_ratio")) is None else float(ratio))


@pytest.mark.parametrize(
    "given, part",
    [
        ([], "not a report"),
        ({"kind": "indexer-parity/explain", "format": 1}, "not a report of `parity gate --json`"),
        ({"kind": GATE, "format": 99}, "report format 99, this version reads 2"),
        ({"kind": GATE, "format": 1, "rows": [{"level": "layout"}]}, "lacks implementation, check, status"),
        ({"kind": GATE, "format": 2, "rows": [{**row().to_json(), "status": "fine"}]}, "unknown status 'fine'"),
    ],
)
def test_a_foreign_file_is_refused(given, part):
    with pytest.raises(ValueError, match=part):
        Report.from_json(given)


def test_adding_up_keeps_the_case_of_the_worst_run():
    good = Report((row(case="good", ratio=0.5, worst_case="x", seconds=1.5),), head={"seed": 1})
    bad = Report((row("failed", case="bad", message="why", ratio=float("nan"), seconds=2),), head={"seed": 2})
    for order in ((good, bad), (bad, good)):
        report = add_up(order)
        assert report.exit == 1
        (found,) = report.rows
        assert (found.case, found.message, found.examples, found.seconds) == ("bad", "why", 2, 3.5)
        assert found.ratio == float("inf")
        assert {run["seed"] for run in report.runs} == {1, 2}
    again = add_up([add_up([good, bad]), dataclasses.replace(good, partial="interrupted")])
    assert (again.rows[0].examples, again.exit, len(again.runs)) == (3, 2, 3)


def test_adding_up_prefers_what_was_judged():
    assert add_up([Report((row("not run", examples=0),)), Report((row(),))]).rows == (row(),)


def test_adding_up_does_not_mix_layouts_or_checks():
    rows = (row(layout="bf16"), row(layout="fp8"), row(layout="fp8", check="b"))
    assert [found.examples for found in add_up([Report(rows)] * 2).rows] == [2, 2, 2]

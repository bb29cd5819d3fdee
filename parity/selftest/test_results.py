"""From rows to a verdict: what rejects, what counts as judged, what a table and a step summary say."""

from itertools import permutations

import pytest

from parity.gate import summary
from parity.ops.paged_logits.judge import Status


def row(status="passed", implementation="a", level="layout", check="exact", examples=1, **more):
    return {"implementation": implementation, "level": level, "check": check, "status": status} | {
        "examples": examples,
        **more,
    }


def test_the_statuses_are_the_judges():
    assert set(summary.SEVERITY) == {str(status) for status in Status}
    assert {str(status) for status in Status if status.counts_against} == summary.REJECTING


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
        assert summary.verdict([row(status) for status in order])[:2] == verdict


def test_the_verdict_line_counts_what_was_not_judged():
    line = summary.verdict([row(examples=1200), row("not run", check="b"), row("unsupported", implementation="b")])[2]
    assert line == "parity passed: 1 check of 1 implementation, 1,200 examples, 1 not run, 1 unsupported"


def test_a_passing_reference_alone_judges_nothing_but_a_failing_one_rejects():
    assert summary.verdict([row(implementation="reference"), row("not run")])[:2] == ("nothing judged", 2)
    assert summary.verdict([row("failed", implementation="reference"), row()])[:2] == ("failed", 1)


def test_the_table_adds_up_a_level_and_shows_the_worst():
    rows = [
        row(level="rounding", worst_ratio=0.25, resolution=1e-6),
        row(level="rounding", check="b", worst_ratio=0.5, resolution=None, examples=9),
        row("not run", level="layout", examples=0),
        row(level="layout", check="b", implementation="b", worst_ratio=float("nan")),
    ]
    assert summary.table_rows(rows) == [
        ("a", "layout", "not run", "0", "-", "-"),
        ("a", "rounding", "passed", "10", "0.5", "1e-06"),
        ("b", "layout", "passed", "1", "inf", "-"),
    ]
    assert len({len(line) for line in summary.table(rows).splitlines()}) == 1


@pytest.mark.parametrize("bad", sorted(summary.REJECTING))
def test_a_cell_is_as_bad_as_its_worst_row(bad):
    rows = [row(), row(bad, check="b"), row("not run", check="c")]
    assert summary.table_rows(rows)[0][2] == bad


def test_reasons_are_grouped_by_what_they_say():
    rows = [row("not run", name, check=check, message="no card") for name in "ab" for check in "xy"]
    rows.append(row("unsupported", message="no fp8"))
    assert summary.reasons(rows) == [
        "not run: layout/x, layout/y of a, b: no card",
        "unsupported: layout/exact of a: no fp8",
    ]


def test_a_rejection_says_what_and_how_to_repeat_it_once():
    text = summary.complaint(row("failed", message="request 0, row 1", repro="parity run --case 'v1 lens=3'"))
    assert text.splitlines() == [
        "failed: a layout/exact",
        "  request 0, row 1",
        "  repeat: parity run --case 'v1 lens=3'",
    ]
    assert "repeat" not in summary.complaint(row("failed", message="bad; parity run X", repro="parity run X"))


def test_of_a_long_message_the_end_is_shown():
    text = summary.complaint(row("error", message="\n".join(f"frame {i}" for i in range(50))))
    assert text.splitlines()[1] == "  ..."
    assert text.splitlines()[-1] == "  frame 49"
    assert len(text.splitlines()) == 2 + summary.SAID_LINES


def test_a_step_summary_starts_with_the_verdict_and_stays_under_its_limit():
    rows = [row("failed", check=f"c{i}", message="x" * 3000) for i in range(1000)]
    status, code, line = summary.verdict(rows)
    report = {"rows": rows, "verdict": status, "sentence": line, "provenance": {"device": "cpu", "a": {"b": 1}}}
    text = summary.markdown(report)
    assert text.startswith(f"## ❌ {line}\n")
    assert 900_000 < len(text.encode()) < 2**20
    assert "more notes left out" in text
    assert "a.b: 1" in text
    assert code == 1


def test_merging_keeps_the_case_of_the_worst_run():
    reports = [
        {"kind": summary.KIND, "format": 1, "rows": [row(case="good", seconds=1.5)], "seed": 1},
        {"kind": summary.KIND, "format": 1, "rows": [row("failed", case="bad", message="why", seconds=2)], "seed": 2},
    ]
    for order in (reports, reports[::-1]):
        merged = summary.merge(order, ["x", "y"])
        assert merged["exit"] == 1
        (found,) = merged["rows"]
        assert (found["case"], found["message"], found["examples"], found["seconds"]) == ("bad", "why", 2, 3.5)
        assert {run["seed"] for run in merged["runs"]} == {1, 2}


def test_merging_does_not_mix_layouts_or_checks():
    rows = [row(layout="bf16"), row(layout="fp8"), row(layout="fp8", check="b")]
    merged = summary.merge([{"kind": summary.KIND, "format": 1, "rows": rows}] * 2, ["x", "y"])
    assert [found["examples"] for found in merged["rows"]] == [2, 2, 2]


COMPILED = [
    row(implementation="triton-fp8", level="resources", check="compile sm_90"),
    row("unsupported", implementation="triton-fp8", level="resources", check="compile sm_80", message="no e4m3"),
    row("failed", implementation="store-fp4", level="resources", check="compile sm_90", message="spills"),
    row("not run", implementation="store-fp4", level="resources", check="compile sm_120", message="later"),
]


def test_kernels_and_architectures_have_a_table_of_their_own():
    assert [line.split("  ")[0] for line in summary.compile_table(COMPILED).splitlines()] == [
        "compiled for",
        "triton-fp8",
        "store-fp4",
    ]
    assert summary.compile_cells(COMPILED) == [
        ("compiled for", "sm_80", "sm_90", "sm_120"),
        ("triton-fp8", "unsupported", "passed", "-"),
        ("store-fp4", "-", "failed", "not run"),
    ]
    report = {"rows": COMPILED, "verdict": "failed", "sentence": "s"}
    assert "| triton-fp8 | unsupported | passed | - |" in summary.markdown(report)
    assert summary.compile_table([row()]) == "" and "compiled for" not in summary.markdown(report | {"rows": [row()]})


def test_compiling_judges_no_implementation_but_can_reject_one():
    assert summary.verdict(COMPILED[:1])[:2] == ("nothing judged", 2)
    assert summary.verdict(COMPILED)[:2] == ("failed", 1)
    assert summary.verdict([row(), *COMPILED[:2]])[2] == (
        "parity passed: 1 check of 1 implementation, 1 example, 1 compiled, 1 unsupported"
    )

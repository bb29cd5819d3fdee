"""Rows as text: tables, rejections, reasons and the Markdown summary."""

import pytest

from parity import tables
from parity.results import Report
from parity.selftest.test_results import row
from parity.vocabulary import Status


def test_the_table_adds_up_a_level_and_shows_the_worst():
    rows = [
        row(level="rounding", ratio=0.25, resolution=1e-6),
        row(level="rounding", check="b", ratio=0.5, resolution=None, examples=9),
        row("not run", level="layout", examples=0),
        row(level="layout", check="b", implementation="b", ratio=float("nan")),
    ]
    assert tables.table_rows(rows) == [
        ("a", "layout", "not run", "0", "-", "-"),
        ("a", "rounding", "passed", "10", "0.5", "1e-06"),
        ("b", "layout", "passed", "1", "inf", "-"),
    ]
    lines = tables.table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1 and "error/bound" in lines[0]


@pytest.mark.parametrize("bad", sorted(status for status in Status if status.counts_against))
def test_a_cell_is_as_bad_as_its_worst_row(bad):
    rows = [row(), row(bad, check="b"), row("not run", check="c")]
    assert tables.table_rows(rows)[0][2] == bad


def test_reasons_are_grouped_by_what_they_say():
    rows = [row("not run", name, check=check, message="no GPU") for name in "ab" for check in "xy"]
    rows.append(row("unsupported", message="no fp8"))
    assert tables.reasons(rows) == [
        "not run: layout/x, layout/y of a, b: no GPU",
        "unsupported: layout/exact of a: no fp8",
    ]


def test_a_rejection_says_what_and_how_to_repeat_it_once():
    text = tables.rejection(row("failed", message="request 0, row 1", repro="parity run --case 'v1 lens=3'"))
    assert text.splitlines() == [
        "failed: a layout/exact",
        "  request 0, row 1",
        "  repeat: parity run --case 'v1 lens=3'",
    ]
    assert "repeat" not in tables.rejection(row("failed", message="bad; parity run X", repro="parity run X"))


def test_of_a_long_message_the_end_is_shown():
    text = tables.rejection(row("error", message="\n".join(f"frame {i}" for i in range(50))))
    assert text.splitlines()[1] == "  ..."
    assert text.splitlines()[-1] == "  frame 49"
    assert len(text.splitlines()) == 2 + tables.SAID_LINES


def test_a_progress_line_says_what_was_found():
    line = tables.progress(row(ratio=0.25, seconds=1.25))
    assert " ".join(line.split()) == "passed a layout/exact 1 example, error/bound 0.25, 1.2 s"
    assert tables.progress(row("not run", message="no GPU")) == "not run     a layout/exact: no GPU"


def test_the_text_shows_some_rejections_and_counts_the_others():
    rows = tuple(row("failed", check=f"c{i}") for i in range(tables.SHOWN + 2))
    text = tables.text(Report(rows))
    assert text.count("failed: a layout/") == tables.SHOWN and "... and 2 more rejections, see --json" in text


def test_a_step_summary_starts_with_the_verdict_and_stays_under_its_limit():
    rows = tuple(row("failed", check=f"c{i}", message="x" * 3000) for i in range(1000))
    report = Report(rows, head={"provenance": {"device": "cpu", "a": {"b": 1}}})
    text = tables.markdown(report)
    assert text.startswith(f"## ❌ {report.sentence}\n")
    assert 900_000 < len(text.encode()) < 2**20
    assert "more notes left out" in text
    assert "a.b: 1" in text


COMPILED = (
    row(implementation="triton-fp8", level="resources", check="compile sm_90", arch="sm_90"),
    row("unsupported", "triton-fp8", "resources", "compile sm_80", message="no e4m3", arch="sm_80"),
    row("failed", "store-fp4", "resources", "compile sm_90", message="spills", arch="sm_90"),
    row("not run", "store-fp4", "resources", "compile sm_120", message="later", arch="sm_120"),
)


def test_kernels_and_architectures_have_a_table_of_their_own():
    assert [line.split("  ")[0] for line in tables.compile_table(COMPILED).splitlines()] == [
        "compiled for",
        "triton-fp8",
        "store-fp4",
    ]
    assert tables.compile_cells(COMPILED) == [
        ("compiled for", "sm_80", "sm_90", "sm_120"),
        ("triton-fp8", "unsupported", "passed", "-"),
        ("store-fp4", "-", "failed", "not run"),
    ]
    assert "| triton-fp8 | unsupported | passed | - |" in tables.markdown(Report(COMPILED))
    assert tables.compile_table([row()]) == "" and "compiled for" not in tables.markdown(Report((row(),)))

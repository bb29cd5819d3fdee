"""Faulty kernels handed over as a user would are rejected by the check that is meant to see them; correct ones pass."""

from dataclasses import replace
from functools import cache

import pytest

from parity.domain.profiles import profile
from parity.ops.check import checks_of, find_check
from parity.results import Status
from parity.run.implementation import Implementation
from parity.run.registry import load
from parity.run.worker import Worker
from parity.selftest.helpers import CPU, FAULTY
from parity.suite.search import run_check

QUICK = replace(profile("smoke", examples=120), shrink_seconds=1.0, reduce_calls=40, case_seconds=20.0)


@cache
def loaded(name: str, layout: str | None) -> Implementation:
    return load(f"{FAULTY}:{name}", layout)


def judged(name: str, check: str, layout: str | None = "bf16", setting=QUICK):
    impl = loaded(name, layout)
    return run_check(find_check(check, impl.operation), Worker(impl, CPU, setting.case_seconds), setting)


FAULTS = [
    ("stale_page", "bf16", "layout/exact"),
    ("stale_page", "fp8", "layout/exact"),
    ("neighbours_scale", "fp8", "layout/exact"),
    ("one_key_of_1024", "bf16", "layout/long"),
    ("one_key_of_1024", "fp8", "layout/long"),
    ("last_partial_page", "bf16", "layout/exact"),
    ("head_63", "bf16", "layout/exact"),
    ("head_63", "fp8", "layout/exact_wide"),
    ("no_relu", "bf16", "layout/exact"),
    ("relu_after_sum", "bf16", "layout/exact"),
    ("weights_bf16", "bf16", "layout/exact_wide"),
    ("weights_bf16", "fp8", "rounding/ordinary"),
    ("dot_bf16", "bf16", "layout/exact_wide"),
    ("dot_bf16", "fp8", "rounding/ordinary"),
    ("logits_bf16", "bf16", "layout/exact"),
    ("logits_bf16", "fp8", "rounding/ordinary"),
    ("times_1001", "bf16", "layout/exact"),
    ("times_1001", "fp8", "rounding/ordinary"),
    ("nan_in_one_cell", "bf16", "layout/exact"),
    ("tail_unwritten", "bf16", "layout/exact"),
    ("tail_zero", "bf16", "layout/exact"),
    ("row_0_table", "bf16", "layout/exact"),
    ("table_ignored", "bf16", "layout/exact"),
    ("length_of_row_0", "bf16", "layout/exact"),
    ("fp8_keys", "bf16", "rounding/ordinary"),
    ("nan_lost", "bf16", "rounding/nonfinite"),
    ("nondeterministic", "bf16", "invariance/repeat"),
    ("gathers", "bf16", "resources/memory"),
    ("wrong_shape", "bf16", "layout/exact"),
    ("writes_inputs", "bf16", "layout/exact"),
    ("stale_page", "bf16", "selection/end_to_end"),
    ("no_relu", "bf16", "selection/end_to_end"),
    ("topk_ignores_length", None, "selection/synthetic"),
    ("topk_half_precision", None, "selection/synthetic"),
    ("topk_pads_zero", None, "selection/synthetic"),
    ("topk_row_0_table", None, "selection/synthetic"),
]


@pytest.mark.parametrize(("name", "layout", "check"), FAULTS, ids=lambda value: str(value).replace("/", "."))
def test_a_fault_is_rejected_at_its_level(name, layout, check):
    found = judged(name, check, layout)
    verdict = found.verdict
    assert verdict.status is Status.FAILED, verdict.message
    assert f"--impl {FAULTY}:{name}" in verdict.message and "parity run --case 'v2 op=" in verdict.message


@pytest.mark.parametrize("name", ["raises", "segfaults"])
def test_a_crash_is_reported_once_and_not_shrunk(name):
    found = judged(name, "layout/exact")
    assert found.verdict.status is Status.ERROR and found.examples == 1


def test_a_hang_is_an_error_within_the_time_out():
    found = judged("hangs", "layout/exact", setting=replace(QUICK, case_seconds=0.5))
    assert found.verdict.status is Status.ERROR and "no answer within" in found.verdict.message


SLOW = ("resources/many_rows",)
# `correct_out` is `correct` with a result that it is given, so that real shapes and borders say nothing more of it.
SAME = (*SLOW, "resources/memory", "layout/borders")


@pytest.mark.parametrize(
    ("name", "layout"), [("correct", "bf16"), ("correct", "fp8"), ("correct_out", "bf16"), ("topk_correct", None)]
)
def test_a_correct_function_passes_every_check(name, layout):
    impl = loaded(name, layout)
    runner = Worker(impl, CPU, 120.0)  # the largest cases take long on a busy machine
    setting = replace(QUICK, examples=20)
    for check in checks_of(impl.operation):
        if check.id in {"topk_correct": (), "correct_out": SAME}.get(name, SLOW):
            continue
        found = run_check(check, runner, setting)
        assert found.verdict.status in (Status.PASSED, Status.NOT_RUN), (check.id, found.verdict.message)


def test_a_declared_rounding_is_judged_by_its_own_bound():
    """What is a fault under the default contract is correct under one that says so."""
    for check in ("layout/exact", "layout/exact_wide", "rounding/ordinary", "rounding/alarm"):
        impl = loaded("logits_bf16_declared", None)
        found = run_check(find_check(check, impl.operation), Worker(impl, CPU, 20.0), replace(QUICK, examples=40))
        assert found.verdict.status in (Status.PASSED, Status.VACUOUS), (check, found.verdict.message)
        assert not (check != "rounding/ordinary" and found.verdict.status is Status.VACUOUS), found.verdict.message

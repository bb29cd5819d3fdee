"""Functions with a memory, handed over as a user would: rejected in process and in the worker alike, the harmless ones
accepted."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from parity.domain.profiles import profile
from parity.faults import building
from parity.faults.catalogue import BY_ID
from parity.ops.check import find_check
from parity.results import Status
from parity.run.implementation import Implementation
from parity.run.loading import resolve_name
from parity.run.registry import builtin, load
from parity.run.runner import InProcess, Runner
from parity.run.worker import Worker, shared
from parity.selftest.helpers import CPU
from parity.suite.search import run_check

STATEFUL = Path(__file__).parents[1] / "stateful.py"
SMOKE = profile("smoke")


@functools.cache
def loaded(name: str) -> Implementation:
    return load(f"{STATEFUL}:{name}", None if name.startswith("topk") else "bf16")


def runner(name: str, where: str) -> Runner:
    impl = loaded(name)
    if where == "worker":
        return Worker(impl, CPU, 60.0)
    return InProcess(replace(impl, function=resolve_name(str(impl.spec))), CPU)


def judged(name: str, check: str, where: str = "worker"):
    impl = loaded(name)
    return run_check(find_check(check, impl.operation), runner(name, where), SMOKE).verdict


FAULTS = [
    ("shared_buffer", "invariance/history", "changed what call"),
    ("fifth_call_of_a_shape", "invariance/history", "in one process: v2 op="),
    ("larger_call_left", "invariance/history", "in one process: v2 op="),
    ("topk_shared_buffers", "invariance/history", "changed what call"),
    ("weights_restored", "layout/exact", "inputs: the call wrote weights and put it back"),
    ("pool_view_restored", "layout/exact", "the call wrote pool and put it back"),
    ("lens_detached_restored", "layout/exact", "inputs: the call wrote context_lens and put it back"),
    ("row_after_the_last", "layout/exact", "out: the call wrote outside of it, at row"),
    ("row_before_the_first", "layout/exact", "outside of it, at row -1 of"),
    ("gap_written", "layout/strided", "outside of it, at row"),
]


@pytest.mark.parametrize("where", ["worker", "in process"])
@pytest.mark.parametrize(("name", "check", "sentence"), FAULTS, ids=[name for name, *_ in FAULTS])
def test_a_fault_is_rejected_wherever_it_is_called(name, check, sentence, where):
    shared().stop()  # what the function keeps begins anew
    found = judged(name, check, where)
    assert found.status is Status.FAILED and found.grounds.evidence
    assert sentence in found.message and f"--impl {STATEFUL}:{name}" in found.repro


@pytest.mark.parametrize(
    ("name", "sentence"),
    [("tall_first", "of process 1 of 4, whose first call was"), ("many_heads_first", "of process 3 of 4, whose")],
)
def test_what_the_first_call_of_a_process_decides_is_seen_in_fresh_ones(name, sentence):
    shared().stop()
    for check in ("layout/exact", "invariance/history"):  # the first case of all is the emptiest
        assert judged(name, check).status is Status.PASSED
    found = judged(name, "invariance/processes")
    assert found.status is Status.FAILED and sentence in found.message


def test_a_process_chosen_at_import_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("STATEFUL_COUNTER", str(tmp_path / "counter"))
    shared().stop()
    found = judged("one_process_of_three", "invariance/processes")
    assert found.status is Status.FAILED and "in process" not in found.message
    # Each fresh process has imported the file for itself.
    assert (tmp_path / "counter").stat().st_size >= 2


def test_a_fresh_process_that_dies_is_an_error_and_the_next_one_lives():
    found = judged("dies_in_a_fresh_process", "invariance/processes")
    assert found.status is Status.ERROR and "a process in which it was first called ended with code 5" in found.message
    assert judged("workspace_kept", "invariance/processes").status is Status.PASSED


@pytest.mark.parametrize("name", ["cached_by_shape", "workspace_kept", "stays_inside"])
@pytest.mark.parametrize("check", ["layout/exact", "invariance/history", "invariance/processes"])
def test_a_memory_that_no_result_depends_on_is_allowed(name, check):
    assert judged(name, check).status is Status.PASSED


def test_a_builtin_has_no_fresh_processes():
    impl = builtin(CPU)["torch-bf16"]
    found = run_check(find_check("invariance/processes", impl.operation), InProcess(impl, CPU), SMOKE).verdict
    assert found.status is Status.NOT_RUN and "lives in the judging process" in found.message


@pytest.mark.parametrize(
    "id",
    [
        *("fifth-call-of-a-shape", "larger-call-left-behind", "result-buffer-shared"),
        *("topk-fifth-call-of-a-shape", "topk-result-buffers-shared"),
        *("store-fifth-call-of-a-shape", "store-into-earlier-pool"),
        *("pool-fifth-call-of-a-shape", "pooled-buffer-shared"),
    ],
)
def test_the_history_of_every_operation_is_judged(id):
    impl = building.implementation(BY_ID[id])
    found = run_check(find_check("invariance/history", impl.operation), InProcess(impl, CPU), SMOKE).verdict
    assert found.status is Status.FAILED and found.grounds.evidence, found.message


@pytest.mark.parametrize("op", ["paged_logits", "topk", "store", "compressor"])
def test_a_history_repeats_a_shape_eight_times_and_grows_and_shrinks(op):
    layout = "bf16" if op in ("paged_logits", "store") else ""
    impl = building.correct_implementation(op, layout or "bf16")
    check = find_check("invariance/history", impl.operation)
    seen: list = []

    class Spy(InProcess):
        def sequence(self, cases):
            seen.append(cases)
            return super().sequence(cases)

    run_check(check, Spy(impl, CPU), profile("ci"))
    for cases in seen:
        base = cases[0]
        same = [case for case in cases if replace(case, seed=base.seed, perm=base.perm) == base]
        assert len(same) >= 8 and len({str(case) for case in same}) >= 4
        sizes = [case.size[:-1] for case in cases]
        assert max(sizes) > base.size[:-1] > min(sizes)
    assert len(seen) >= 2

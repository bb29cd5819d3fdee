"""A user's function in the worker: results, broken conventions, crashes, hangs, and that the next case still runs."""

import re

import pytest
import torch

from parity.run.operation import parse_case
from parity.run.registry import builtin, load
from parity.run.runner import InProcess
from parity.run.worker import Worker, shared
from parity.selftest.helpers import CPU, FAULTY

CASE = parse_case("v1 lens=65,3 heads=8 seed=2")


def run(name, case=CASE, timeout=20.0, **options):
    impl = load(f"{FAULTY}:{name}", None if name in ("needs_meta", "topk_correct") else "bf16")
    return Worker(impl, CPU, timeout).run(case, **options)


def test_a_correct_function_gives_the_builtin_paths_result():
    mine, theirs = run("correct"), InProcess(builtin(CPU)["torch-bf16"], CPU).run(CASE)
    assert mine.complaint is None
    torch.testing.assert_close(mine.output, theirs.output)
    assert torch.equal(mine.operands.q, theirs.operands.q)


def test_out_is_given_to_functions_that_name_it():
    for seed in (1, 2):
        assert run("correct_out", parse_case(f"v1 lens=65,3 heads=8 seed={seed}")).complaint is None


def test_printing_and_reading_do_not_disturb():
    assert run("chatty").complaint is None


def test_schedule_meta_is_built_as_the_contract_says():
    assert run("needs_meta").complaint is None


def test_topk_returns_two_tensors():
    slots, positions = run("topk_correct", parse_case("v1 stage=topk lens=65,3 data=random k=64")).output
    assert slots.shape == positions.shape == (2, 64)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("wrong_shape", r"result: expected torch.float32 \[2, 65\], got torch.float32 \[2, 66\]"),
        ("wrong_dtype", r"result: expected torch.float32 \[2, 65\], got torch.float64"),
        ("returns_none", r"result: expected a torch.float32 tensor \[2, 65\], got None"),
        ("writes_inputs", r"inputs: the call wrote weights"),
    ],
)
def test_a_broken_convention_is_a_defect(name, sentence):
    outcome = run(name)
    assert outcome.output is None and outcome.error is None
    assert re.search(sentence, outcome.defect), outcome.defect


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("raises", "RuntimeError: no luck today at faulty.py"),
        ("exits", "the function called sys.exit(3)"),
        ("leaves", "the process ended with code 7 (last words)"),
        ("segfaults", "killed by SIGSEGV"),
    ],
)
def test_a_crash_is_an_error_of_that_case_alone(name, sentence):
    outcome = run(name)
    assert outcome.output is None and sentence in outcome.error
    assert run("correct").complaint is None


def test_a_hang_ends_with_the_time_out():
    outcome = run("hangs", timeout=0.5)
    assert "no answer within" in outcome.error
    assert run("correct").complaint is None


def test_repeats_show_the_first_run_that_differs():
    outcome = run("nondeterministic", repeats=4)
    index, again = outcome.differing
    assert index == 1 and not torch.equal(again, outcome.output)
    assert run("correct", repeats=3).differing is None


def test_peak_bytes_are_measured():
    plain = run("correct", measure=True).peak_bytes
    greedy = run("gathers", measure=True)
    # Two rows, two pages of 16 KiB each.
    assert greedy.peak_bytes >= 2 * 2 * 16384 > 0 and plain is not None
    assert "of [" in greedy.peak_note


def test_uninitialised_memory_is_poisoned():
    outcome = run("tail_unwritten")
    assert bool(outcome.output[1, 3:].isnan().all())


def test_one_child_serves_all_functions():
    run("correct")
    before = shared().pid
    run("correct_out")
    assert shared().pid == before


def test_a_builtin_needs_no_worker():
    with pytest.raises(ValueError, match="built-in"):
        Worker(builtin(CPU)["torch-bf16"], CPU)

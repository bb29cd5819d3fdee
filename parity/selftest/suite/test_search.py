"""Drawing, counting, stopping and shrinking: what a check's search does, and what its minimal examples look like."""

import time
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from parity.domain import profiles
from parity.domain.contract import Contract
from parity.domain.profiles import PROFILES, profile
from parity.ops.check import LEVELS, Check, checks_of, examples_of, find_check, judge_case
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.oracle import sampled_rows
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.operation import all_operations, find, parse_case
from parity.run.registry import builtin
from parity.run.runner import InProcess
from parity.selftest import faulty
from parity.selftest.helpers import CPU
from parity.suite.search import Finding, run_check

LOGITS = find("paged_logits")
EXACT = find_check("layout/exact", LOGITS)
PATIENT = replace(profile("ci", examples=400), shrink_seconds=20.0, reduce_calls=600)


def runner_of(name, layout="bf16"):
    contract = Contract.default(layout)
    return InProcess(Implementation(name, "paged_logits", layout, contract, function=getattr(faulty, name)), CPU)


def minimal(name, check="layout/exact", layout="bf16") -> tuple[Case, Verdict]:
    found = run_check(find_check(check, LOGITS), runner_of(name, layout), PATIENT)
    assert found.verdict.status is Status.FAILED
    return parse_case(found.verdict.case), found.verdict


def test_no_relu_shrinks_to_one_key_of_one_head():
    case, verdict = minimal("no_relu")
    assert case.lengths == ((1,),) and case.heads == 8
    assert case.only_heads is not None and len(case.only_heads) == 1
    assert verdict.where["row"] == 0 and verdict.where["key"] == 0


def test_a_stale_page_shrinks_to_the_first_key_of_a_second_page():
    case, verdict = minimal("stale_page")
    assert case.rows == 1 and case.pages == 2 and case.longest == 65
    assert (verdict.where["key"], verdict.where["logical_page"]) == (64, 1)


def test_the_wrong_table_row_shrinks_to_two_rows():
    case, _ = minimal("row_0_table")
    assert case.requests == 2 and case.next_n == 1
    assert case.lengths[1] == (1,) and case.longest <= 1


def test_a_dropped_head_shrinks_to_that_head():
    case, _ = minimal("head_63")
    assert case.heads == 64 and case.only_heads == (63,) and case.lengths == ((1,),)


@pytest.mark.parametrize("seed", range(4))
def test_the_smallest_case_does_not_depend_on_what_was_drawn(seed):
    found = run_check(EXACT, runner_of("head_63"), replace(PATIENT, seed=seed))
    case = parse_case(found.verdict.case)
    assert case.only_heads == (63,) and case.lengths == ((1,),)


def test_an_unwritten_tail_shrinks_to_a_row_without_keys():
    case, verdict = minimal("tail_unwritten")
    assert case.rows == 1 and case.longest <= 1 and case.clean
    assert "past the context length" in verdict.message


def test_the_message_has_everything_in_order():
    case, verdict = minimal("times_1001", "rounding/ordinary")
    words = ["request 0, row 0, key ", "got ", "wanted ", "bound ", "ratio ", "parity run --case 'v2 op=paged_logits "]
    places = [verdict.message.index(word) for word in words]
    assert places == sorted(places)
    again = judge_case(runner_of("times_1001"), case, [find_check("rounding/ordinary", LOGITS)])
    assert [v.status for v in again] == [Status.FAILED]


def test_a_fault_found_once_is_found_again_from_its_string():
    case, verdict = minimal("dot_bf16", "layout/exact_wide")
    found = judge_case(runner_of("dot_bf16"), parse_case(str(case)))
    assert "layout/exact_wide" in {f"{v.level}/{v.check}" for v in found if v.status is Status.FAILED}
    assert verdict.got != verdict.wanted


# ------------------------------------------------------------------------------------------------- a search by itself


def counted(strategy, judge, examples=50, **options) -> tuple[list[Case], Finding]:
    seen: list[Case] = []

    def remembering(runner, case):
        seen.append(case)
        return judge(case)

    check = Check("layout", "exact", lambda impl, setting, device: strategy, remembering, 1.0)
    impl = builtin(CPU)["torch-bf16"]
    shares = sum(c.share_of(impl, CPU) for c in checks_of(LOGITS, ["layout"]))
    setting = profile("ci", examples=int(examples * shares), seed=options.pop("seed", None))
    return seen, run_check(check, InProcess(impl, CPU), setting, **options)


def good(case: Case) -> Verdict:
    return Verdict(Status.PASSED, "layout", "exact", cells=1, ratio=case.longest / 1e6, resolution=1e-6, case=str(case))


many = st.integers(1, 10_000).map(lambda n: Case(lengths=((n,),)))


def test_the_number_of_examples_is_exact_and_none_repeats():
    seen, found = counted(many, good)
    assert found.examples == len(seen) == 50 == len({str(case) for case in seen})
    assert found.verdict.status is Status.PASSED
    assert found.worst_case == str(max(seen, key=lambda case: case.longest))


def test_the_same_seed_draws_the_same_cases():
    first, again, other = (counted(many, good, seed=seed)[0] for seed in (5, 5, 6))
    assert first == again != other


def test_a_listed_strategy_runs_every_case():
    cases = [Case(lengths=((n,),)) for n in range(1, 8)]
    seen, found = counted(st.sampled_from(cases), good)
    assert sorted(map(str, seen)) == sorted(map(str, cases)) and found.examples == 7


def test_the_time_budget_ends_the_drawing():
    def slow(case):
        time.sleep(0.02)
        return good(case)

    _, found = counted(many, slow, examples=10_000, seconds=0.3)
    assert 1 <= found.examples < 100 and found.verdict.status is Status.PASSED


def test_a_check_that_judged_nothing_is_vacuous():
    _, found = counted(many, lambda case: replace(good(case), cells=0))
    assert found.verdict.status is Status.VACUOUS
    _, found = counted(many, lambda case: replace(good(case), resolution=0.1))
    assert found.verdict.status is Status.VACUOUS and "resolution" in found.verdict.message


def test_a_flaky_failure_is_still_reported():
    calls = []

    def once(case):
        calls.append(case)
        return replace(good(case), status=Status.FAILED if len(calls) == 3 else Status.PASSED)

    _, found = counted(many, once)
    assert found.verdict.status is Status.FAILED


def test_remembered_failures_come_first_and_leave_when_they_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "DATABASE", tmp_path)
    setting = replace(profile("nightly", seed=1, examples=60), shrink_seconds=2.0, reduce_calls=60)
    check, bad = EXACT, runner_of("no_relu")
    first = run_check(check, bad, setting)
    again = run_check(check, bad, setting)
    assert (again.examples, again.first_case) == (1, first.verdict.case)
    mended = InProcess(replace(bad.impl, function=faulty.correct), CPU)
    assert run_check(check, mended, setting).verdict.status is Status.PASSED
    store = setting.store()
    assert store is not None and not list(store.fetch(b"no_relu/layout/exact"))
    store.save(b"no_relu/layout/exact", b"v0 from another time")
    store.save(b"no_relu/layout/exact", b"v1 stage=nothing lens=1")
    assert run_check(check, mended, setting).verdict.status is Status.PASSED


def test_an_absent_implementation_is_not_run():
    impl = replace(builtin(CPU)["torch-bf16"], absent="no such GPU")
    found = run_check(EXACT, InProcess(impl, CPU), profile("smoke"))
    assert (found.verdict.status, found.verdict.message, found.examples) == (Status.NOT_RUN, "no such GPU", 0)


# ----------------------------------------------------------------------------------------------------- tables of names


def test_names_are_unique_and_fit_a_test_id():
    for operation in all_operations():
        names = [check.id for check in checks_of(operation)]
        assert names and len(names) == len(set(names)) and not any("-" in name for name in names)
        assert sorted(names) == sorted(check.id for check in operation.checks())
        assert all(find_check(name.replace("/", "."), operation).id == name for name in names)
    levels = {check.level for check in checks_of(LOGITS)}
    assert {"layout", "rounding", "selection", "invariance", "resources"} <= levels <= set(LEVELS)
    with pytest.raises(ValueError, match="check: expected one of layout/exact, .*, got 'layout/nothing'"):
        find_check("layout/nothing", LOGITS)
    with pytest.raises(ValueError, match="level: expected one of layout, .*, got 'speed'"):
        checks_of(LOGITS, ["speed"])


@pytest.mark.parametrize("name", ["torch-bf16", "triton-bf16", "topk"])
def test_a_level_has_at_least_the_profiles_examples(name):
    impl = builtin(CPU)[name]
    for level in LEVELS:
        counts = [examples_of(check, 210, impl, CPU) for check in checks_of(impl.operation, [level])]
        if any(counts):  # listed cases alone have no count
            assert sum(count or 0 for count in counts) >= 210


def test_profiles_refuse_nonsense():
    assert set(PROFILES) == {"smoke", "ci", "nightly", "debug"}
    for named in ({"seed": -1}, {"seconds": 0.0}, {"examples": 0}):
        with pytest.raises(ValueError, match=next(iter(named))):
            profile("ci", **named)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one of smoke"):
        profile("fast")
    assert profile("ci").seed == 0 and profile("nightly", seed=7).seed == 7
    assert profile("nightly").seed != profile("nightly").seed


def test_rows_are_sampled_only_where_the_oracle_is_dear():
    assert sampled_rows(Case(lengths=((300,),) * 6), CPU) is None
    rows = sampled_rows(Case(lengths=((2,) * 65_536,), heads=8), CPU)
    assert rows is not None and len(rows) < 10_000 and {0, 65_535} <= set(rows.tolist())
    assert torch.equal(rows, rows.unique())


def test_no_check_is_vacuous_where_the_dot_is_known_by_its_bound_alone():
    """As on a GPU whose matrix unit has no verified model: exact data beside it keep every check awake."""
    coarse = Contract.default("fp8", torch.device("cuda"), capability=(9, 0))
    impl = replace(builtin(CPU)["torch-fp8"], contract=coarse)
    for check in checks_of(LOGITS, ["rounding"]):
        found = run_check(check, InProcess(impl, CPU), profile("smoke"))
        assert found.verdict.status is Status.PASSED, (check.id, found.verdict)

"""Every example of a search is drawn for itself, rare shapes are as rare as they say, and no folder changes a case."""

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, find, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample

from parity.domain.dimensions import mostly
from parity.domain.draws import BACKEND
from parity.domain.profiles import profile
from parity.ops.check import find_check
from parity.run.operation import find as find_operation
from parity.run.registry import load
from parity.run.worker import Worker
from parity.selftest.helpers import CPU, FAULTY
from parity.suite.search import run_check

SETTING = replace(profile("smoke", examples=120), case_seconds=20.0)
CHECK = find_check("layout/exact", find_operation("paged_logits"))


def cases_of(path: Path, name: str = "correct") -> list:
    seen: list = []
    impl = load(f"{path}:{name}", "bf16")
    run_check(CHECK, Worker(impl, CPU, SETTING.case_seconds), SETTING, note=lambda case, verdict: seen.append(case))
    return seen


def drawn(strategy: st.SearchStrategy, backend: str, count: int) -> list:
    seen: list = []

    def note(value: object) -> bool:
        seen.append(value)
        return False

    chosen = settings(max_examples=count, database=None, deadline=None, phases=(Phase.generate,), backend=backend)
    with pytest.raises(NoSuchExample):
        find(strategy, note, settings=chosen, random=profile("ci").source("draws"))
    return seen


def followers(seeds: list[int]) -> int:
    """How many took over the seed of the one before, as a near copy does."""
    return sum(a == b for a, b in pairwise(seeds))


def test_no_case_is_a_near_copy_of_the_one_before():
    cases = cases_of(FAULTY)
    assert len(cases) == 48 == len(set(cases))
    assert followers([case.seed for case in cases]) == 0


def test_hypothesis_by_itself_would_draw_near_copies():
    strategy = CHECK.strategy(load(f"{FAULTY}:correct", "bf16"), SETTING, CPU)
    assert followers([case.seed for case in drawn(strategy, "hypothesis", 48)]) > 48 / 4
    assert followers([case.seed for case in drawn(strategy, BACKEND, 48)]) == 0


def test_a_file_in_another_folder_is_judged_on_the_same_cases(tmp_path):
    assert cases_of(Path(shutil.copy(FAULTY, tmp_path))) == cases_of(FAULTY)


def test_rare_is_as_rare_as_it_says():
    """600 draws of one in five: within five standard deviations (9.8) of 120, where `one_of` gives half of them."""
    usual, rare = st.just("usual"), st.just("rare")
    assert abs(drawn(mostly(usual, rare, 5), BACKEND, 600).count("rare") - 120) < 49
    assert drawn(st.one_of(*[usual] * 4, rare), BACKEND, 600).count("rare") > 200


def test_mostly_shrinks_to_the_usual():
    assert find(mostly(st.just("usual"), st.just("rare"), 16), lambda value: True) == "usual"

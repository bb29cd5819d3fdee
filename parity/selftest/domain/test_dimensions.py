"""Dimensions and their buckets, the count of what was judged, and how contracts narrow a domain."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.domain.contract import Contract
from parity.domain.dimensions import Coverage, Dimension, numbers
from parity.domain.profiles import profile
from parity.ops.check import find_check
from parity.ops.paged_logits import domain as paged
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.strategies import paged_cases
from parity.ops.shared.domain import narrowed
from parity.ops.store import domain as store
from parity.ops.store.strategies import store_cases
from parity.ops.topk import domain as topk
from parity.ops.topk.strategies import topk_cases
from parity.results import Row
from parity.run.operation import find
from parity.run.registry import builtin
from parity.run.runner import InProcess
from parity.selftest.helpers import CPU
from parity.suite.session import Session
from parity.vocabulary import Status

CI = profile("ci")
SIZE = Dimension("size", "", lambda case: (case[0],), 0, 300)
KIND = Dimension("kind", "", lambda case: (case[1],), among=("a", "b", "c"), free=True)
OTHER = Dimension("other", "", lambda case: (case[2],), among=("x", "y"), free=True)
THREE = (SIZE, KIND, OTHER)
PROMISE = {each.name: each.buckets for each in THREE}


def test_numbers_fall_into_buckets_of_their_binary_length():
    assert SIZE.buckets[:4] == ("0", "1", "2..3", "4..7") and SIZE.buckets[-1] == "256..300"
    assert [SIZE.bucket(n) for n in (0, 1, 3, 4, 300, 999)] == ["0", "1", "2..3", "4..7", "256..300", "256..300"]
    assert Dimension("k", "", lambda case: (), 1, 8).buckets == ("1", "2..3", "4..7", "8")
    assert SIZE.up_to(63)[-1] == "32..63" and SIZE.up_to(31)[-1] == "16..31"
    assert SIZE.spans(("0", "1", "2..3", "8..15", "256..300")) == "0 to 3, 8 to 15, 256 to 300"
    assert KIND.spans({"c", "a"}) == "a, c" and KIND.spans({"c", "a", "b"}) == "all 3"


def test_numbers_are_drawn_in_every_bucket_and_at_its_ends():
    seen: Counter[int] = Counter()

    @settings(max_examples=2000, database=None, deadline=None)
    @given(numbers(0, 300))
    def draw(n):
        seen[n] += 1

    draw()
    assert min(seen) == 0 and max(seen) == 300
    for bits in range(1, 9):
        assert seen[1 << (bits - 1)] and seen[min(300, (1 << bits) - 1)], bits


@given(st.lists(st.tuples(st.integers(0, 300), st.sampled_from("abc"), st.sampled_from("xy")), max_size=8))
def test_coverage_counts_buckets_and_pairs(cases):
    counted = Coverage(THREE)
    for case in cases:
        counted.add(case)
    again = Coverage.from_json(counted.to_json(), THREE)
    assert again == counted
    assert all(counted.count("size", name) == sum(SIZE.bucket(c[0]) == name for c in cases) for name in SIZE.buckets)
    assert counted.met(PROMISE) == (len({c[1:] for c in cases}), 6)
    left = {name for name in "abc" if name not in {c[1] for c in cases}}
    assert set(counted.missed(PROMISE).get("kind", ())) == left
    twice = Coverage(THREE)
    twice.merge(counted)
    twice.merge(again)
    assert twice.pairs == counted.pairs and all(twice.count("kind", k) == 2 * counted.count("kind", k) for k in "abc")


# --------------------------------------------------------------------------------------------------------------- reach


def _borders(op):
    impl = builtin(CPU)[{"paged_logits": "torch-bf16", "topk": "topk", "store": "store-bf16-fused"}[op]]
    if op == "paged_logits":
        return impl, paged.borders("bf16", paged.HEADS, "exact", paged.reach(impl, CI, CPU)), set(paged.AXES)
    if op == "topk":
        return impl, topk.borders(topk.reach(impl, CI, CPU)), set(topk.AXES)
    return impl, store.borders("bf16", store.reach(impl, CI, CPU)[0]), set(store.AXES)


@pytest.mark.parametrize("op", ["paged_logits", "topk", "store"])
def test_the_borders_reach_every_bucket_of_numbers_that_is_promised(op):
    impl, cases, axes = _borders(op)
    domain = find(op).domain()
    counted = Coverage(domain.dimensions)
    for case in cases:
        counted.add(case)
    promised, _ = domain.promise(impl, CI, CPU)
    assert set(counted.missed(promised)) <= ({"data"} if op == "paged_logits" else set())
    if op != "store":  # CUDA source on a CPU is slow
        assert {name for name in axes if set(promised[name]) != set(by_name(domain)[name].buckets)} == set()


def by_name(domain):
    return {each.name: each for each in domain.dimensions}


def test_a_fault_in_any_bucket_of_any_length_or_count_is_rejected_by_its_border():
    """A function that is wrong in one cell, in one bucket of one dimension only."""
    impl, cases, axes = _borders("paged_logits")
    right, check = impl.function, find_check("layout/borders", impl.operation)
    assert right is not None

    def spoiled(**named):
        out = right(**named)
        visible = torch.isfinite(out).nonzero()
        if len(visible):
            row, key = visible[-1].tolist()
            out[row, key] += 1
        return out

    wrong = InProcess(replace(impl, function=spoiled), CPU)
    for name in sorted(axes):
        each = by_name(impl.operation.domain())[name]
        for bucket in each.buckets:
            inside = [case for case in cases if bucket in {each.bucket(value) for value in each.of(case)}]
            hit = next((case for case in inside if case.longest), None)
            if hit is not None:
                assert check.judge(wrong, hit).status is Status.FAILED, (name, bucket)
            else:  # nothing to see: no rows, no keys
                assert bucket == "0"


def test_a_promise_that_is_not_kept_is_an_incomplete_row():
    impl = builtin(CPU)["topk"]
    session = Session({impl.name: impl}, CPU, CI)
    counted = Coverage(topk.DIMENSIONS)
    cases = topk.borders(topk.reach(impl, CI, CPU))
    for case in cases:
        counted.add(case)
    checks = impl.operation.checks()
    rows = [Row(impl.name, c.level, c.name, Status.PASSED, 1, op="topk", coverage=counted.to_json()) for c in checks]
    found, broken = session.coverage(rows)
    assert not broken and found["topk"]["not_judged"] == {} and found["topk"]["why"] == ""
    counted = Coverage(topk.DIMENSIONS)
    for case in cases:
        if case.k < 1024:
            counted.add(case)
    fewer = [replace(row, coverage=counted.to_json()) for row in rows]
    _, (row,) = session.coverage(fewer)
    assert row.status is Status.INCOMPLETE and row.status.counts_against
    assert row.message == "promised, but judged in no example: k 1024..2047, 2048"
    # Who failed was not drawn to the end, and parts of a suite promise nothing.
    assert session.coverage([*fewer[:-1], replace(fewer[-1], status=Status.FAILED)])[1] == []
    assert session.coverage(fewer[1:])[1] == []


# ----------------------------------------------------------------------------------------------------------- contracts

NARROW = {
    "next_n": ([1, 2], lambda case: case.next_n in (1, 2) or not case.requests),
    "lengths": ("ascending", lambda case: all(list(row) == sorted(row) for row in case.lengths)),
    "max_rows": (3, lambda case: case.rows <= 3),
    "min_pages": (5, lambda case: case.table_width >= 5),
    "page_gap": (False, lambda case: case.gap == 0),
    "width_multiple": (64, lambda case: case.max_context_len % 64 == 0),
    "table_tail": ("valid", lambda case: case.tail == "canary"),
    "contiguous": (["q", "table"], lambda case: not {"q", "table"} & set(case.strides)),
    "storage_offset": (False, lambda case: not case.offsets),
    "singleton_strides": (False, lambda case: not case.singletons),
    "clean_logits": ("never", lambda case: not case.clean),
}


@pytest.mark.parametrize("key", NARROW)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_case_is_made_to_fit_each_restriction(key, data):
    value, holds = NARROW[key]
    contract = Contract.from_dict({"layout": "bf16", key: value})
    assert len(contract.restrictions) == 1 and contract.restrictions[0].startswith(f"{key} = ")
    case = paged.DOMAIN.fit(data.draw(paged_cases(max_next_n=5, max_rows=9)), contract)
    assert holds(case)
    assert paged.DOMAIN.fit(case, contract) == case


@settings(max_examples=60, deadline=None)
@given(topk_cases(max_length=300), store_cases(layout="fp8"))
def test_top_k_and_stores_fit_theirs(chosen, stored):
    contract = Contract.from_dict({"op": "topk", "k": [512, 1024], "nonfinite": "unspecified"})
    found = topk.DOMAIN.fit(chosen, contract)
    assert found.k in (512, 1024) and found.data not in topk.NONFINITE
    contract = Contract.from_dict({"op": "store", "layout": "fp8", "contiguous": ["pooled"], "storage_offset": False})
    kept = store.DOMAIN.fit(stored, contract)
    assert not kept.strides and not kept.offsets and kept.ids == stored.ids


def test_a_contract_without_restrictions_changes_nothing():
    contract = Contract.from_dict({"layout": "bf16", "batch_invariant": True, "dot_dtype": "bf16"})
    assert contract.restrictions == ()
    case = Case(lengths=((3,),))
    assert paged.DOMAIN.fit(case, contract) is case


def test_what_a_contract_leaves_out_is_not_promised():
    impl, cases, _ = _borders("paged_logits")
    contract = Contract.from_dict({"layout": "bf16", "next_n": [1, 2], "max_rows": 64})
    far, _ = paged.DOMAIN.promise(impl, CI, CPU)
    near: Any = narrowed({name: tuple(names) for name, names in far.items()}, paged.DOMAIN, cases, contract)
    assert near["next_n"] == ("1", "2..3") and near["requests"][-1] == "64..127" and near["length"] == far["length"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"next_n": [0]}, "contract key 'next_n' must list integers of at least 1"),
        ({"k": ["512"]}, "contract key 'k' must be a list of int"),
        ({"lengths": "falling"}, "contract key 'lengths' must be one of any, ascending"),
        ({"max_rows": 0}, "contract key 'max_rows' must be an integer of at least 1, got 0"),
        ({"page_gap": 0}, "contract key 'page_gap' must be true or false"),
        ({"ties": "free"}, "contract key 'ties' must be one of stable, any"),
    ],
)
def test_a_restriction_that_means_nothing_is_refused(given, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        Contract.from_dict({"layout": "bf16", **given})


def test_free_dimensions_are_those_whose_pairs_are_counted():
    free = [each for each in paged.DIMENSIONS if each.free]
    pairs = sum(len(a.buckets) * len(b.buckets) for a, b in combinations(free, 2))
    assert Coverage(paged.DIMENSIONS).met({each.name: each.buckets for each in paged.DIMENSIONS}) == (0, pairs)

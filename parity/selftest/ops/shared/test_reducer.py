"""The reducer on synthetic failures whose smallest case is known, its budget, and its determinism."""

from dataclasses import replace

import pytest

from parity.domain.reducer import Step
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.operands import build_logits
from parity.ops.paged_logits.reduce import reduce
from parity.ops.topk.reduce import reduce as reduce_topk
from parity.pages.placement import row_names
from parity.run.operation import parse_case
from parity.selftest.case_reading import read_row

BIG = parse_case(
    "v1 lens=300,301,302,500,501,502,64,65,66,9,10,11 next_n=3 layout=fp8 data=octaves seed=77 perm=5 spare=40 gap=128 "
    "width=12 max_len=600 tail=canary poison=canary strides=q+table clean=no prefix=1"
)


def _names(case: Case) -> list[tuple[int, int]]:
    requests, rows = row_names(case)
    return list(zip(requests.tolist(), rows.tolist(), strict=True))


def _sees(case: Case, key: int) -> bool:
    """Whether some row sees the key (page id * 64 + offset) and it was not zeroed."""
    if case.only_keys is not None and key not in case.only_keys:
        return False
    ids = range(case.pages) if case.page_ids is None else case.page_ids
    places = [64 * i + key % 64 for i, page in enumerate(ids) if page == key // 64]
    return any(place < case.longest for place in places)


def test_a_failure_everywhere_ends_at_one_row_one_key_one_head():
    small = reduce(BIG, lambda case: case.rows > 0 and case.longest > 0)
    assert str(small) == "v2 op=paged_logits lens=1 layout=fp8 heads=8 data=octaves only_heads=0"


def test_a_row_is_found_among_its_company():
    small = reduce(BIG, lambda case: (1, 2) in _names(case))
    assert small.rows == 1 and small.longest == 0
    assert _names(small) == [(1, 2)]
    assert "request_ids=1 row_ids=2" in str(small)


def test_a_failure_that_needs_two_rows_of_a_request_keeps_them():
    small = reduce(BIG, lambda case: case.next_n >= 2 and case.longest >= 65)
    assert (small.requests, small.next_n, small.longest) == (1, 2, 65)
    assert sorted(small.lengths[0]) == [0, 65]


def test_two_rows_of_different_requests_are_kept_alone():
    small = reduce(BIG, lambda case: {(0, 1), (2, 2)} <= set(_names(case)), budget=400)
    assert small.rows == 2 and set(_names(small)) == {(0, 1), (2, 2)}


def test_a_key_far_back_ends_in_one_page_with_its_value():
    small = reduce(BIG, lambda case: _sees(case, 5 * 64 + 7), budget=500)
    assert small.rows == 1 and small.pages == 1 and small.longest == 8
    assert small.page_ids == (5,) and small.only_keys == (5 * 64 + 7,)
    one, whole = read_row(build_logits(small), 0), read_row(build_logits(BIG), 3)
    name = small.request_ids[0] if small.request_ids else 0
    if name == 1:
        assert bytes(one.keys[-1]) == bytes(whole.keys[5 * 64 + 7])


def test_a_head_is_found():
    small = reduce(BIG, lambda case: case.heads == 64 and (case.only_heads is None or 63 in case.only_heads))
    assert small.heads == 64 and small.only_heads == (63,)


def test_what_matters_stays_and_the_rest_goes():
    small = reduce(BIG, lambda case: case.tail == "canary" and case.gap > 0 and "table" in case.strides)
    assert small.tail == "canary" and small.gap == 16 and small.strides == ("table",)
    assert small.poison == "nan" and small.width is None and small.perm == 0 and small.clean


def test_a_wide_table_that_matters_stays_as_narrow_as_it_can():
    small = reduce(BIG, lambda case: case.table_width > case.pages and case.longest > 0)
    assert small.longest == 1 and small.pages == 1 and small.table_width > 1


def test_a_prefill_of_thousands_ends_at_its_row_in_few_calls():
    calls: list[Case] = []

    def fails(case: Case) -> bool:
        calls.append(case)
        return (0, 3217) in _names(case)

    small = reduce(parse_case("v1 lens=p0+4096 next_n=4096 data=octaves width=344"), fails, budget=100)
    assert small.rows == 1 and _names(small) == [(0, 3217)] and len(calls) <= 100


def test_topk_cases_shrink_rows_keys_and_k():
    case = parse_case("v1 stage=topk data=narrow lens=5000,4000,30,2000 next_n=2 k=512 perm=3 strides=logits clean=no")
    small = reduce_topk(case, lambda c: c.longest > c.k)
    assert (small.rows, small.longest, small.k) == (1, 2, 1)
    assert reduce_topk(case, lambda c: c.k >= 100 and c.longest > c.k).longest == 101


def test_the_budget_bounds_the_calls_and_what_was_found_is_kept():
    for budget in (1, 2, 7, 30):
        calls: list[Case] = []

        def fails(case: Case, calls: list[Case] = calls) -> bool:
            calls.append(case)
            return case.longest >= 3

        small = reduce(BIG, fails, budget=budget)
        assert len(calls) <= budget and small in calls and small.longest >= 3
    with pytest.raises(ValueError, match="budget must be at least 1"):
        reduce(BIG, lambda case: True, budget=0)


def test_every_result_was_seen_to_fail_and_repeats():
    seen: dict[Case, bool] = {}

    def fails(case: Case) -> bool:
        assert case not in seen, "no case is tried twice"
        seen[case] = len(str(case)) % 3 == 0 or case == BIG
        return seen[case]

    steps: list[Step] = []
    small = reduce(BIG, fails, on_step=steps.append)
    assert seen[small] and steps[-1].case == small and [s.calls for s in steps] == sorted(s.calls for s in steps)
    again: list[Step] = []
    seen.clear()
    assert reduce(BIG, fails, on_step=again.append) == small and again == steps


def test_a_failure_that_does_not_repeat_is_left_alone():
    assert reduce(BIG, lambda case: False) is BIG


def test_reduced_rows_compute_with_the_values_of_the_original():
    plain = replace(BIG, prefix=0)
    small = reduce(plain, lambda case: (1, 1) in _names(case) and case.longest >= 129 and case.seed == 77)
    row = read_row(build_logits(small), _names(small).index((1, 1)))
    whole = read_row(build_logits(plain), _names(plain).index((1, 1)))
    assert small.rows == 1 and row.keys.view(-1, 128).shape[0] == 129
    kept = [0, 64, 128] if small.only_keys is None else [key for key in small.only_keys if key < 129]
    for key in kept:
        assert bytes(row.keys.view(-1, 128)[key]) == bytes(whole.keys.view(-1, 128)[key])
    assert bytes(row.query[0]) == bytes(whole.query[0])

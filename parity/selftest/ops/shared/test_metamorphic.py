"""Metamorphic pairs: row by row the same operands, bit for bit, at another place or in other company."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.ops.paged_logits.operands import build_logits
from parity.ops.shared import metamorphic
from parity.ops.topk.operands import build_topk
from parity.ops.topk.strategies import topk_cases
from parity.pages.placement import place
from parity.run.operation import parse_case
from parity.selftest.case_reading import any_paged_case, read_row, same_row, slots_of
from parity.selftest.helpers import bits, refusals

PLACEMENT = (
    *("repeat", "permute_pages", "alias_pages", "copy_pages", "more_pages", "other_gap", "widen_table"),
    *("other_max_len", "other_poison", "other_tail", "other_strides", "permute_requests", "expand_rows"),
)


@pytest.mark.parametrize("name", PLACEMENT)
@settings(max_examples=25, deadline=None)
@given(case=any_paged_case())
def test_pairs_compute_with_the_same_values(name, case):
    transform = getattr(metamorphic, name)
    pair = transform(case, ("q", "table")) if name == "other_strides" else transform(case)
    assert len(pair.rows) == pair.case.rows == case.rows
    _check_same_rows(case, pair)


@settings(max_examples=60, deadline=None)
@given(any_paged_case(), st.data())
def test_fewer_rows_keep_their_values(case, data):
    requests = data.draw(st.lists(st.sampled_from(range(case.requests)), unique=True) if case.requests else st.just([]))
    _check_same_rows(case, metamorphic.keep_requests(case, requests))
    columns = data.draw(st.lists(st.sampled_from(range(case.next_n)), unique=True, min_size=1))
    _check_same_rows(case, metamorphic.keep_columns(case, columns))
    rows = data.draw(st.lists(st.sampled_from(range(case.rows)), unique=True) if case.rows else st.just([]))
    pair = metamorphic.keep_rows(case, rows)
    assert pair.case.next_n == 1
    _check_same_rows(case, pair)


def _check_same_rows(case, pair):
    one, two = build_logits(case), build_logits(pair.case)
    for row, original in enumerate(pair.rows):
        assert same_row(read_row(two, row), read_row(one, original))


@settings(max_examples=40, deadline=None)
@given(topk_cases(max_length=300, ks=(1, 64)))
def test_pairs_of_topk_keep_their_scores(case):
    one = build_topk(case)
    for transform in (metamorphic.permute_requests, metamorphic.expand_rows, metamorphic.other_max_len):
        pair = transform(case)
        two = build_topk(pair.case)
        for row, original in enumerate(pair.rows):
            length = int(one.context_lens.flatten()[original])
            left, right = two.logits[row, :length], one.logits[original, :length]
            assert torch.equal(bits(left), bits(right))


def test_placement_really_changes():
    """A pair that changes nothing would prove nothing."""
    case = parse_case("v1 lens=300,299,130 perm=3 prefix=2 poison=nan tail=minus1 width=8")
    one = build_logits(case)
    moved = build_logits(metamorphic.permute_pages(case).case)
    assert not torch.equal(one.block_table, moved.block_table)
    copied = build_logits(metamorphic.copy_pages(case).case)
    assert int(slots_of(one, 0)[0]) == int(slots_of(one, 1)[0])
    assert int(slots_of(copied, 0)[0]) != int(slots_of(copied, 1)[0])
    assert place(copied.case).used == 13 and place(case).used == 3 + 3 + 1 + 2
    reordered = metamorphic.permute_requests(case)
    assert reordered.rows != (0, 1, 2) and sorted(reordered.rows) == [0, 1, 2]
    assert not torch.equal(one.pool, build_logits(metamorphic.other_poison(case).case).pool)
    assert not torch.equal(one.block_table, build_logits(metamorphic.other_tail(case).case).block_table)
    assert build_logits(metamorphic.widen_table(case).case).block_table.shape[1] == 11
    assert metamorphic.expand_rows(parse_case("v1 lens=5,6 next_n=2")).case.next_n == 1
    assert int(slots_of(build_logits(metamorphic.expand_rows(parse_case("v1 lens=5,6 next_n=2")).case), 1)[0]) == 0


def test_expanded_rows_print_short():
    pair = metamorphic.expand_rows(parse_case("v1 lens=p0+4096 next_n=4096"))
    assert str(pair.case) == "v2 op=paged_logits lens=p0+4096 request_ids=0x4096 row_ids=0..4095"


FOUR = parse_case("v1 lens=1,2,3,4 next_n=2")
test_bad_selections = refusals(
    {
        "which must name different numbers from 0 to 1": lambda: metamorphic.keep_requests(FOUR, [0, 0]),
        "from 0 to 3": lambda: metamorphic.keep_rows(FOUR, [4]),
        "at least one row": lambda: metamorphic.keep_columns(FOUR, []),
    }
)

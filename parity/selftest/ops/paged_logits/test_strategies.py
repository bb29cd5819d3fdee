"""Strategies: options are checked early, limits kept, every kind of structure turns up, and shrinking ends small."""

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from parity.ops.paged_logits.strategies import paged_cases
from parity.ops.shared.case import POISONS, TAILS
from parity.ops.topk.strategies import topk_cases
from parity.selftest.case_reading import LAYOUTS

FIND = settings(max_examples=3000, database=None, deadline=None)
ANY = settings(FIND, phases=(Phase.generate,))  # that it exists is enough, it need not be small


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_limits_are_kept(data):
    layout = data.draw(st.sampled_from(LAYOUTS))
    case = data.draw(
        paged_cases(
            layout=layout,
            heads=(16,),
            data=("octaves", "exact"),
            max_requests=2,
            max_next_n=2,
            max_rows=3,
            max_pages=2,
            min_length=5,
            strides=("q",),
            tails=("huge",),
            poisons=("nan",),
            clean=(True,),
            wide=False,
        )
    )
    assert case.layout == layout and case.heads == 16 and case.data in ("octaves", "exact")
    assert 1 <= case.rows <= 3 and case.pages <= 2 and min(min(row) for row in case.lengths) >= 5
    assert case.tail == "huge" and case.poison == "nan" and case.clean and case.strides in ((), ("q",))
    assert case.width is None and case.max_len is None and case.gap == 0


STRUCTURES = {
    "empty row": lambda case: any(0 in row for row in case.lengths),
    "partial page": lambda case: case.longest % 64 != 0,
    "full page": lambda case: case.longest and case.longest % 64 == 0,
    "ragged": lambda case: len({row[0] for row in case.lengths}) > 1,
    "speculation": lambda case: case.next_n > 1,
    "every residue": lambda case: case.next_n > 2 and len(set(case.lengths[0])) == 2,
    "shared prefix": lambda case: case.prefix > 0,
    "page used twice": lambda case: case.page_ids is not None and len(set(case.page_ids)) < len(case.page_ids),
    "copies": lambda case: case.alias == "copied",
    "expanded rows": lambda case: case.request_ids is not None,
    "wide table": lambda case: case.table_width > max(1, case.pages),
    "wide result": lambda case: case.max_context_len > max(1, case.longest),
    "result ends inside a page": lambda case: case.max_context_len % 64 != 0,
    "gaps": lambda case: case.gap > 0,
    "strided": lambda case: case.strides == ("q", "table", "weights"),
    "large pool": lambda case: case.spare >= 40,
    "unclean": lambda case: not case.clean,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_structure_turns_up(name):
    find(paged_cases(layout="fp8"), STRUCTURES[name], settings=ANY)


def test_shrinking_ends_at_the_simplest_case():
    assert str(find(paged_cases(), lambda case: True, settings=FIND)) == "v2 op=paged_logits lens=0 heads=8"
    assert str(find(paged_cases(layout="fp8"), lambda case: case.longest > 0, settings=FIND)) == (
        "v2 op=paged_logits lens=1 layout=fp8 heads=8"
    )
    two = find(paged_cases(), lambda case: case.rows >= 2 and case.longest > 64, settings=FIND)
    assert two.rows == 2 and two.longest == 65 and two.perm == 0 and two.tail == TAILS[0] and two.poison == POISONS[0]
    assert str(find(topk_cases(), lambda case: True, settings=FIND)) == "v2 op=topk lens=0 k=1"


def test_big_pools_pass_the_limit_of_a_signed_integer():
    for kind in (lambda case: case.gap > 0, lambda case: case.gap == 0):
        case = find(paged_cases(layout="fp8", big=True), kind, settings=ANY)
        assert (case.spare + 1) * case.page_stride > 1 << 31


@settings(max_examples=60, deadline=None)
@given(topk_cases(ks=(64, 512), max_length=1100))
def test_topk_limits_are_kept(case):
    assert case.k in (64, 512) and case.longest <= 1100


@pytest.mark.parametrize("around", [-1, 0, 1])
def test_topk_lengths_stand_around_k(around):
    find(topk_cases(), lambda case: case.k >= 512 and case.longest == case.k + around, settings=ANY)


def test_topk_mixes_short_and_long_rows():
    find(topk_cases(), lambda case: case.longest > 4096 and min(map(min, case.lengths)) < case.k, settings=ANY)


BAD_OPTIONS = [
    (paged_cases, {"layout": "int8"}, "layout must be one of"),
    (paged_cases, {"heads": (7,)}, "heads must be one of"),
    (paged_cases, {"heads": ()}, "heads must name at least one"),
    (paged_cases, {"data": ("gaussian",)}, "data must be one of"),
    (paged_cases, {"max_rows": 0}, "max_rows must be at least"),
    (paged_cases, {"max_pages": 0}, "max_pages must be an integer from 1"),
    (paged_cases, {"min_rows": 99}, "max_rows must be at least"),
    (paged_cases, {"min_length": 999}, "min_length must fit"),
    (paged_cases, {"strides": ("pool",)}, "strides must be one of"),
    (paged_cases, {"clean": ()}, "clean must name"),
    (topk_cases, {"ks": ()}, "ks must name integers"),
    (topk_cases, {"ks": (0,)}, "ks must name integers"),
    (topk_cases, {"data": ("exact",)}, "data must be one of"),
    (topk_cases, {"strides": ("q",)}, "strides must be one of"),
]


@pytest.mark.parametrize(("strategy", "options", "message"), BAD_OPTIONS)
def test_options_are_checked_before_anything_is_drawn(strategy, options, message):
    with pytest.raises(ValueError, match=message):
        strategy(**options)

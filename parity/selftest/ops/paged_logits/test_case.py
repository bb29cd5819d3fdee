"""Case strings: they come back, print short, and refuse what they do not know in one sentence."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.domain.notation import causal_lengths, format_ids, format_lengths, parse_ids, parse_lengths
from parity.ops.paged_logits.case import Case
from parity.ops.topk.strategies import topk_cases
from parity.run.operation import parse_case
from parity.selftest.case_reading import any_paged_case

RUNS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 9), max_size=4).map(tuple),
        st.tuples(st.integers(0, 40), st.integers(0, 30)).map(lambda run: causal_lengths(*run)),
        st.tuples(st.integers(0, 5), st.integers(0, 9)).map(lambda run: (run[0],) * run[1]),
        st.tuples(st.integers(0, 5), st.integers(0, 9)).map(lambda run: tuple(range(run[0], sum(run)))),
    ),
    max_size=4,
).map(lambda parts: tuple(n for part in parts for n in part))


@given(RUNS)
def test_number_lists_come_back(numbers):
    assert parse_lengths(format_lengths(numbers)) == numbers
    assert parse_ids(format_ids(numbers)) == numbers


@settings(max_examples=300, deadline=None)
@given(st.one_of(any_paged_case(), topk_cases()))
def test_cases_come_back(case):
    assert parse_case(str(case)) == case
    assert hash(parse_case(str(case))) == hash(case)


@pytest.mark.parametrize("start", range(9))
def test_causal_rows_print_as_one_item(start):
    text = f"p{start}+4096"
    assert format_lengths(parse_lengths(text)) == text
    case = Case(lengths=(causal_lengths(start, 4096),))
    assert str(case) == f"v1 lens={text} next_n=4096"


def test_default_values_are_left_out():
    assert str(Case(lengths=((300,),))) == "v1 lens=300"
    assert str(Case(lengths=((1,), (2,)), layout="fp8", strides=("q", "table"))) == (
        "v1 lens=1,2 layout=fp8 strides=q+table"
    )
    expanded = Case(
        lengths=tuple((n,) for n in causal_lengths(0, 4096)), request_ids=(0,) * 4096, row_ids=tuple(range(4096))
    )
    assert str(expanded) == "v1 lens=p0+4096 request_ids=0x4096 row_ids=0..4095"


def test_every_field_has_its_place_in_the_string():
    case = Case(
        lengths=((70, 71), (3, 4)),
        layout="fp4",
        heads=8,
        data="octaves",
        seed=9,
        k=3,
        perm=5,
        alias="copied",
        prefix=1,
        spare=7,
        gap=32,
        width=4,
        max_len=99,
        tail="canary",
        poison="huge",
        strides=("lens", "q"),
        clean=False,
        request_ids=(4, 1),
        row_ids=(0, 1, 5, 2),
        page_ids=(2, 0),
        only_heads=(),
        only_keys=(1, 2, 3, 9),
    )
    for name in Case.__dataclass_fields__:
        if name not in ("lengths", "stage"):
            default = Case.__dataclass_fields__[name].default
            assert getattr(case, name) != default
    assert parse_case(str(case)) == case


REFUSED = {
    "": "must begin with v1",
    "v2 lens=1": "must begin with v1",
    "lens=1": "must begin with v1",
    "v1": "must say the context lengths",
    "v1 lens=1 colour=red": "unknown name",
    "v1 lens=1 lens=2": "stands twice",
    "v1 lens=1 data": "name=value",
    "v1 lens=": "name=value",
    "v1 lens=-1": "length must be written",
    "v1 lens=1,,2": "length must be written",
    "v1 lens=３": "length must be written",
    "v1 lens=３x2": "length must be written",
    "v1 lens=p３+8": "length must be written",
    "v1 lens=1 row_ids=１..２": "identifier must be written",
    "v1 lens=1 seed=３": "seed must be a non-negative integer",
    "v1 stage=store ids=３": "identifier must be written",
    "v1 stage=store ids=3 pages=２": "pages must be a non-negative integer",
    "v1 stage=compressor calls=0:３": "calls must look like",
    "v1 stage=compressor calls=0:+3": "calls must look like",
    "v1 stage=compressor calls=0:3 seed=３": "non-negative integer",
    "v1 lens=1x4194304,1": "a list for 4194304 at most",
    "v1 lens=5x0": "must stand for",
    "v1 lens=5x99999999999": "must stand for",
    "v1 lens=p0+99999999999": "must stand for",
    "v1 lens=99999999999": "lengths must be an integer",
    "v1 lens=1,2,3 next_n=2": "next_n must be at least 1 and divide",
    "v1 lens=1 next_n=0": "next_n must be at least 1",
    "v1 lens=1 next_n=two": "next_n must be a non-negative integer",
    "v1 lens=1 heads=7": "heads must be one of",
    "v1 lens=1 data=gaussian": "data must be one of",
    "v1 lens=1 stage=topk data=exact": "data must be one of",
    "v1 lens=1 stage=scores": "stage must be one of",
    "v1 lens=1 stage=store": "unknown name",
    "v1 stage=store": "must name its tokens",
    "v1 lens=1 stage=compressor": "got 'lens=1'",
    "v1 lens=1 layout=int8": "layout must be one of",
    "v1 lens=1 tail=zero": "tail must be one of",
    "v1 lens=1 poison=zero": "poison must be one of",
    "v1 lens=1 alias=maybe": "alias must be one of",
    "v1 lens=1 clean=true": "clean must be yes or no",
    "v1 lens=1 gap=24": "multiple of 16",
    "v1 lens=1 tail=canary spare=0": "needs spare >= 1",
    "v1 lens=65 width=1": "width must hold the 2 pages",
    "v1 lens=65 max_len=64": "max_len must hold the longest row",
    "v1 lens=1 strides=q+keys": "strides must be one of",
    "v1 lens=1 strides=table+q": "strides must be sorted",
    "v1 lens=1 stage=topk data=few k=0": "k must be an integer from 1",
    "v1 lens=1,2 request_ids=1": "request_ids must have 2 entries",
    "v1 lens=1,2 row_ids=9..7": "must ascend",
    "v1 lens=1,2 row_ids=a": "identifier must be written",
    "v1 lens=65 page_ids=0": "page_ids must have 2 entries or more",
    "v1 lens=1 heads=8 only_heads=8": "only_heads must be an integer from 0 to 7",
    "v1 lens=1 only_keys=3,1": "only_keys must ascend",
}


@pytest.mark.parametrize("text", REFUSED)
def test_refuses_in_one_sentence(text):
    with pytest.raises(ValueError) as caught:
        parse_case(text)
    message = str(caught.value)
    assert REFUSED[text] in message
    assert "\n" not in message and len(message) < 200


def test_constructor_refuses_what_is_no_case():
    with pytest.raises(ValueError, match="same number of rows"):
        Case(lengths=((1, 2), (3,)))
    with pytest.raises(ValueError, match="at least one row"):
        Case(lengths=((), ()))
    with pytest.raises(ValueError, match="tuple of tuples"):
        Case(lengths=([1, 2],))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="lengths must be an integer"):
        Case(lengths=((True,),))
    with pytest.raises(ValueError, match="clean must be True or False"):
        replace(Case(lengths=((1,),)), clean=1)  # type: ignore[arg-type]


def test_empty_batch_is_a_case():
    case = parse_case("v1 lens=none")
    assert (case.requests, case.rows, case.pages, case.table_width, case.max_context_len) == (0, 0, 0, 1, 1)
    assert str(case) == "v1 lens=none"

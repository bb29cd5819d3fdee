"""Case strings: they come back, print short, and refuse what they do not know in one sentence."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.domain.fields import defaults
from parity.domain.notation import causal_lengths, format_ids, format_lengths, parse_ids, parse_lengths
from parity.ops.paged_logits.case import Case
from parity.ops.topk.strategies import topk_cases
from parity.run.operation import parse_case
from parity.selftest.case_reading import any_paged_case, bad_strings
from parity.selftest.helpers import refusals

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
    assert str(case) == f"v2 op=paged_logits lens={text} next_n=4096"


def test_default_values_are_left_out():
    assert str(Case(lengths=((300,),))) == "v2 op=paged_logits lens=300"
    assert str(Case(lengths=((1,), (2,)), layout="fp8", strides=("q", "table"))) == (
        "v2 op=paged_logits lens=1,2 layout=fp8 strides=q+table"
    )
    expanded = Case(
        lengths=tuple((n,) for n in causal_lengths(0, 4096)), request_ids=(0,) * 4096, row_ids=tuple(range(4096))
    )
    assert str(expanded) == "v2 op=paged_logits lens=p0+4096 request_ids=0x4096 row_ids=0..4095"


def test_every_field_has_its_place_in_the_string():
    case = Case(
        lengths=((70, 71), (3, 4)),
        layout="fp4",
        heads=8,
        data="octaves",
        seed=9,
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
        period=2,
        base=3,
        offsets=("pool", "q"),
        singletons=True,
    )
    assert all(getattr(case, name) != default for name, default in defaults(Case).items())
    assert parse_case(str(case)) == case


def test_strings_of_version_1_are_read():
    """It called the operation a stage, left it out for logits, and gave top-k fields that decide nothing there."""
    assert parse_case("v1 lens=65 heads=8") == parse_case("v1 lens=65 stage=logits heads=8")
    assert str(parse_case("v1 lens=65 heads=8")) == "v2 op=paged_logits lens=65 heads=8"
    old = "v1 lens=65 layout=fp8 heads=8 stage=topk data=few k=3 gap=16"
    assert str(parse_case(old)) == "v2 op=topk lens=65 data=few k=3"


test_a_bad_string_is_refused_in_one_sentence = bad_strings(
    {
        "": "must begin with v2 or v1",
        "v3 lens=1": "must begin with v2 or v1",
        "lens=1": "must begin with v2 or v1",
        "v2 lens=1": "must say op=, one of paged_logits, topk",
        "v2 op=scores lens=1": "op: expected one of paged_logits, topk",
        "v2 op=paged_logits stage=logits lens=1": "unknown name",
        "v2 op=topk lens=1 layout=fp8": "unknown name",
        "v1": "must say the context lengths",
        "v1 lens=1 colour=red": "unknown name",
        "v1 lens=1 lens=2": "stands twice",
        "v1 lens=1 data": "name=value",
        "v1 lens=": "name=value",
        "v1 lens=-1": "length must be written",
        "v1 lens=\uff11": "length must be written",
        "v1 lens=1 heads=\uff18": "heads must be a non-negative integer",
        "v1 lens=1 row_ids=\uff11": "identifier must be written",
        "v1 lens=\uff13x2": "length must be written",
        "v1 lens=p\uff13+8": "length must be written",
        "v1 lens=1 row_ids=\uff11..2": "identifier must be written",
        "v1 lens=1x4194304,1": "a list for 4194304 at most",
        "v1 lens=1,,2": "length must be written",
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
        "v1 lens=1 stage=scores": "op: expected one of",
        "v1 lens=1 stage=store": "unknown name",
        "v1 stage=store": "must say the names of the tokens",
        "v1 lens=1 stage=compressor": "expected calls, data, seed, poison, perm, got 'lens'",
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
)

test_constructor_refuses_what_is_no_case = refusals(
    {
        "same number of rows": lambda: Case(lengths=((1, 2), (3,))),
        "at least one row": lambda: Case(lengths=((), ())),
        "tuple of tuples": lambda: Case(lengths=([1, 2],)),  # type: ignore[arg-type]
        "lengths must be an integer": lambda: Case(lengths=((True,),)),
        "clean must be True or False": lambda: replace(Case(lengths=((1,),)), clean=1),  # type: ignore[arg-type]
    }
)


def test_empty_batch_is_a_case():
    case = parse_case("v1 lens=none")
    assert (case.requests, case.rows, case.pages, case.table_width, case.max_context_len) == (0, 0, 0, 1, 1)
    assert str(case) == "v2 op=paged_logits lens=none"

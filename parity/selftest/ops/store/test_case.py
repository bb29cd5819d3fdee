"""Store cases: strings, strategies, reduction, and values that are the same everywhere."""

from dataclasses import replace

import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from parity.ops.store.case import StoreCase
from parity.ops.store.digests import digest_of
from parity.ops.store.operands import build_store, named_bytes, slots_of
from parity.ops.store.reduce import reduce
from parity.ops.store.strategies import store_cases
from parity.ops.store.values import draw_bytes, draw_norm_weight, draw_pooled
from parity.run.operation import parse_case
from parity.selftest.case_reading import LAYOUTS, bad_strings
from parity.selftest.helpers import CPU, bits, refuses

ANY = st.sampled_from(LAYOUTS)
QUICK = settings(max_examples=60, deadline=None, database=None, derandomize=True)


@QUICK
@given(ANY.flatmap(lambda layout: store_cases(layout=layout)))
def test_a_case_prints_as_it_is_read(case):
    assert parse_case(str(case)) == case


@QUICK
@given(ANY.flatmap(lambda layout: store_cases(layout=layout, max_tokens=80)))
def test_slots_are_distinct_and_own_their_bytes(case):
    slots = slots_of(case)
    kept = slots[slots >= 0]
    assert len(slots) == case.tokens and len(kept.unique()) == len(kept)
    assert not len(kept) or int(kept.max()) < case.pages * 64
    payload, scale = named_bytes(case, slots)
    named = torch.cat((payload.reshape(-1), scale.reshape(-1)))
    assert len(named.unique()) == len(named) == len(kept) * {"bf16": 256, "fp8": 132, "fp4": 68}[case.layout]
    assert not len(named) or int(named.max()) < case.pages * case.page_stride


def test_the_strategy_draws_what_it_promises():
    seen = [
        lambda case: case.tokens == 0,
        lambda case: case.tokens > 128,
        lambda case: bool((slots_of(case) == -1).any()) and bool((slots_of(case) >= 0).any()),
        lambda case: bool((slots_of(case) // 64 == case.pages - 1).any()),
        lambda case: case.positions == "far" and case.pooled == "bf16" and case.weight == "f32",
        lambda case: case.gap > 0 and case.data == "onehot" and case.weights == "ties",
    ]
    for feature in seen:
        find(store_cases(layout="fp8"), feature, settings=settings(max_examples=2000, database=None))
    big = find(store_cases(layout="fp8", big=True, min_tokens=1), lambda case: True, settings=QUICK)
    assert (big.pages - 1) * big.page_stride > 1 << 31


test_a_bad_string_is_one_sentence = bad_strings(
    {
        "v2 stage=store ids=0": "must say op=",
        "v1 ids=0": "expected lens, ",  # without a name it is a case of paged logits
        "v2 op=store": "must say the names of the tokens in batch order",
        "v2 op=store ids=0 ids=1": "stands twice",
        "v2 op=store ids=0 colour=red": "unknown name",
        "v2 op=store ids=0 pages=two": "non-negative integer",
        "v2 op=store ids=0,0": "distinct",
        "v2 op=store ids=0..99 pages=1": "pages must hold 100 tokens",
        "v2 op=store ids=0 gap=8": "multiple of 16",
        "v2 op=store ids=0 layout=fp6": "layout must be one of",
        "v2 op=store ids=0 skip": "name=value",
    }
)


def test_the_reducer_keeps_what_matters():
    case = StoreCase(ids=tuple(range(100)), layout="fp8", data="octaves", pages=9, gap=48, skip=5, perm=3, seed=77)
    small = reduce(case, lambda found: 37 in found.ids and found.gap >= 16, 400)
    assert small == StoreCase(ids=(37,), layout="fp8", data="onehot", pages=1, gap=16, place="order", weights="one")
    assert reduce(case, lambda found: False, 10) == case
    refuses(ValueError, "budget", reduce, case, lambda found: True, 0)


def test_values_belong_to_names_and_are_fixed():
    case = StoreCase(ids=tuple(range(64)), seed=3)
    names = torch.tensor(case.ids)
    whole = draw_pooled(case, names)
    assert torch.equal(whole[[5, 60]], draw_pooled(case, torch.tensor([5, 60])))
    assert digest_of(bits(whole)) == "822da2baf53de1ec1980229bad11a40e"
    assert digest_of(bits(draw_norm_weight(case, CPU))) == "3f9a4546c2458f21b45df5254608bd9c"
    assert torch.equal(draw_bytes(1, 0, 40000, CPU)[16000:], draw_bytes(1, 16000, 24000, CPU))
    assert bool((whole.to(torch.bfloat16) != whole).any())  # more than 8 significant bits
    assert torch.equal(draw_pooled(replace(case, pooled="bf16"), names), whole.to(torch.bfloat16))


def test_far_pools_and_tables_are_mapped_lazily():
    case = find(store_cases(layout="bf16", big=True, positions=("far",), min_tokens=9), lambda _: True, settings=QUICK)
    operands = build_store(case)
    assert operands.pool.numel() > 1 << 31 and operands.rope_table.shape == (1 << 20, 64)
    assert operands.before.numel() < 1 << 20
    operands.restore()
    assert torch.equal(operands.contents(), operands.before)

"""Operands: what may be read holds the drawn values, and everything else is poison, in values, scales, gaps, tables."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.operands import build_logits
from parity.ops.shared import operands as building
from parity.ops.topk.operands import build_topk
from parity.ops.topk.strategies import topk_cases
from parity.pages import pools, values
from parity.pages.layout import POISON
from parity.pages.placement import HUGE_PAGE, SHARED, place
from parity.run.operation import find, parse_case
from parity.selftest.case_reading import (
    LAYOUTS,
    PAYLOAD,
    any_paged_case,
    read_row,
    same_row,
    slot_bytes_of,
    slots_of,
)
from parity.selftest.helpers import CPU, bits
from reference.pages import read_keys


def _expected_row(case: Case, row: int) -> values.Keys:
    """Keys of a row, drawn page by page from the documented coordinates, with none of the placement code."""
    request, inner = divmod(row, case.next_n)
    name = request if case.request_ids is None else case.request_ids[request]
    length = case.lengths[request][inner]
    payload, scales = [], []
    for page in range(-(-length // 64)):
        content = page if case.page_ids is None else case.page_ids[page]
        owner = SHARED if content < case.prefix else name
        keys = values.draw_keys(case.data, case.layout, case.seed, torch.tensor([owner]), torch.tensor([content]))
        payload.append(keys.payload[0])
        scales.append(keys.scales[0] if keys.scales is not None else None)
    if not payload:
        return values.Keys(torch.zeros(0), None)
    return values.Keys(
        torch.cat(payload)[:length],
        torch.cat([s for s in scales if s is not None])[:length] if scales[0] is not None else None,
    )


@settings(max_examples=150, deadline=None)
@given(any_paged_case())
def test_rows_find_their_keys_through_the_table(case):
    built = build_logits(case)
    slots = slot_bytes_of(built)
    assert built.q.shape == (case.requests, case.next_n, case.heads, 128)
    assert built.weights.shape == (case.rows, case.heads)
    assert built.context_lens.tolist() == [list(row) for row in case.lengths]
    assert built.block_table.shape == (case.requests, case.table_width)
    for row in range(case.rows):
        want = _expected_row(case, row)
        if len(want.payload):
            got = slots[slots_of(built, row)]
            parts = [bits(want.payload)] + ([] if want.scales is None else [bits(want.scales).view(len(got), -1)])
            assert torch.equal(got, torch.cat([p.view(len(got), -1) for p in parts], 1))


@settings(max_examples=150, deadline=None)
@given(any_paged_case())
def test_everything_unreadable_is_poison(case):
    built = build_logits(case)
    plan = place(case)
    readable = {slot for row in range(case.rows) for slot in slots_of(built, row).tolist()}
    pages = zip(plan.physical, plan.visible, strict=False)
    assert readable == {64 * int(page) + offset for page, visible in pages for offset in range(int(visible))}
    hidden = sorted(set(range(plan.pool_pages * 64)) - readable)
    slots = slot_bytes_of(built)
    if case.tail == "canary":
        hidden = [slot for slot in hidden if slot // 64 != plan.canary_page]
    if case.poison == "canary":
        keys = slots[hidden] if hidden else slots[:0]
        assert len(keys.unique(dim=0)) == len(keys)  # valid-looking keys, each its own
    elif not (case.layout == "fp4" and case.poison == "huge"):
        assert bool((slots[hidden] == POISON[case.poison]).all())
    assert bool((built.pool[:, case.page_bytes :] == POISON[case.poison]).all())
    tail = {"minus1": -1, "huge": HUGE_PAGE, "canary": plan.canary_page}[case.tail]
    for request, row in enumerate(built.block_table.tolist()):
        needed = -(-max(case.lengths[request]) // 64)
        assert all(0 <= page < plan.pool_pages for page in row[:needed])
        assert all(page == tail for page in row[needed:])
        assert plan.canary_page not in row[:needed]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_poison_of_each_kind_shows(layout):
    """NaN poison reads as NaN, huge poison is finite and beyond any drawn value, canaries are finite and larger."""
    for poison in POISON:
        built = build_logits(Case(lengths=((1,),), layout=layout, poison=poison, data="octaves"))
        keys, scales = read_keys(built.kv_cache, layout, torch.arange(1, 128))
        size = keys.to(torch.float64).abs() * (1.0 if scales is None else scales.to(torch.float64)[:, None])
        if poison == "nan":
            assert bool(size.isnan().all()) and (scales is None or bool(scales.isnan().all()))
        elif poison == "huge":
            assert bool(size.isfinite().all()) and float(size.min()) > 1e37
        else:
            real, real_scales = read_keys(built.kv_cache, layout, torch.arange(1))
            assert bool(size.isfinite().all()) and float(size.max()) < 1e4
            assert float(size.mean()) > 0.5
            assert not torch.equal(keys[:1].to(torch.float32), real.to(torch.float32)), real_scales


def test_canary_tail_names_a_valid_looking_page_under_every_poison():
    for poison in POISON:
        built = build_logits(parse_case(f"v1 lens=10 width=3 tail=canary poison={poison} perm=4 spare=3"))
        page = int(built.block_table[0, 1])
        assert page == place(built.case).canary_page
        keys = built.kv_cache[page].float()
        assert bool(keys.isfinite().all()) and 0 < float(keys.abs().max()) < 1e4


def test_strides_leave_poisoned_gaps_and_the_same_values():
    plain = parse_case("v1 lens=70,71,3,4 next_n=2 heads=8 layout=fp8 width=4")
    gaps = parse_case(f"{plain} strides=lens+q+table+weights")
    a, b = build_logits(plain), build_logits(gaps)
    assert all(same_row(read_row(a, row), read_row(b, row)) for row in range(4))
    assert torch.equal(a.block_table, b.block_table) and torch.equal(a.context_lens, b.context_lens)
    for name in ("q", "weights", "context_lens", "block_table"):
        view = getattr(b, name)
        assert not view.is_contiguous() and view.stride(-1) == 1
        assert view.data_ptr() == b.storages[name].data_ptr()
    assert bool(b.storages["q"][:, 2:].float().isnan().all())
    assert bool(b.storages["q"][..., 128:].float().isnan().all())
    assert bool(b.storages["weights"][:, 8:].isnan().all())
    assert bool((b.storages["block_table"][:, 4:] == building.HUGE_ID).all())
    assert b.storages["context_lens"][:, 2:].unique().tolist() == [256]
    assert a.q.is_contiguous() and a.kv_cache.is_contiguous()


def test_page_stride_carries_the_gap():
    for layout, itemsize in (("bf16", 2), ("fp8", 1), ("fp4", 1)):
        built = build_logits(Case(lengths=((70,),), layout=layout, gap=48))
        assert built.kv_cache.stride(0) * itemsize == built.case.page_bytes + 48
        assert built.kv_cache.data_ptr() == built.pool.data_ptr()


def test_every_write_to_an_input_is_seen():
    built = build_logits(parse_case("v1 lens=70,3 layout=fp8 gap=16 strides=lens+q+table+weights spare=2"))
    before = built.snapshot()
    assert built.unchanged(before) and built.changed(before) == ()
    for name, storage in built.storages.items():
        flat = storage.view(torch.uint8).view(-1)
        for place_ in (0, len(flat) // 2, len(flat) - 1):
            kept = int(flat[place_])
            flat[place_] = kept ^ 1
            assert built.changed(before) == (name,)
            flat[place_] = kept
    assert built.unchanged(before)


def test_large_storages_are_watched_by_a_digest(monkeypatch):
    monkeypatch.setattr(building, "DIGEST_BYTES", 1 << 12)
    built = build_logits(parse_case("v1 lens=70,3 heads=8 layout=fp8"))
    before = built.snapshot()
    assert built.unchanged(before)
    flat = built.pool.view(-1)
    flat[100], flat[5000] = int(flat[100]) ^ 1, int(flat[5000]) ^ 1
    assert built.changed(before) == ("pool",)
    flat[100] ^= 1
    assert built.changed(before) == ("pool",)
    flat[5000] ^= 1
    assert built.unchanged(before)


@pytest.mark.parametrize(
    "text", ["v1 lens=130,65 perm=5 spare=3 gap=671088640", "v1 lens=130,65 perm=5 spare=327680 tail=canary"]
)
@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_pools_past_two_gigabytes_are_mapped_lazily(text, layout):
    case = parse_case(f"{text} layout={layout} heads=8")
    built = build_logits(case)
    assert built.pool.numel() > 1 << 31 and built.windows is not None
    assert sum(stop - start for start, stop in built.windows) < 1 << 23
    slots = np.concatenate([slots_of(built, row).numpy() for row in range(2)])
    assert (slots // 64 * case.page_stride >= 1 << 31).any() or "spare=3 " not in str(case)
    small = build_logits(parse_case(f"v1 lens=130,65 layout={layout} heads=8"))
    assert all(same_row(read_row(built, row), read_row(small, row)) for row in range(2))
    before = built.snapshot()
    page = int(built.block_table[0, 0])
    for offset in (0, case.page_bytes, -1):  # in the page, in the gap behind it or the next page, just before it
        at = page * case.page_stride + offset
        if at >= 0:
            built.pool.view(-1)[at] ^= 1
            assert built.changed(before) == ("pool",)
            built.pool.view(-1)[at] ^= 1
    unread = page * case.page_stride + case.page_bytes
    assert int(built.pool.view(-1)[unread]) == POISON["nan"]


def test_chunked_drawing_equals_drawing_at_once(monkeypatch):
    case = parse_case("v1 lens=300,299,70,71,1,2 next_n=2 layout=fp8 data=octaves perm=3 poison=canary prefix=1")
    whole = build_logits(case)
    top = parse_case("v1 stage=topk data=random lens=300,299,70 clean=no poison=canary")
    whole_top = build_topk(top)
    monkeypatch.setattr(pools, "CHUNK_ELEMENTS", 1)
    assert torch.equal(whole.pool, build_logits(case).pool)
    assert torch.equal(whole.q.view(torch.uint8), build_logits(case).q.view(torch.uint8))
    assert torch.equal(whole_top.logits, build_topk(top).logits)


def test_dropped_heads_and_keys_are_zero_and_the_rest_is_kept():
    for layout in LAYOUTS:
        whole = build_logits(Case(lengths=((130,),), layout=layout, data="nonfinite", heads=8))
        few = build_logits(
            Case(lengths=((130,),), layout=layout, data="nonfinite", heads=8, only_heads=(3,), only_keys=(5, 100))
        )
        assert few.weights[0].nonzero().flatten().tolist() == [3]
        assert few.weights[0, 3] == whole.weights[0, 3]
        a, b = slot_bytes_of(whole)[:130], slot_bytes_of(few)[:130]
        kept = torch.zeros(130, dtype=torch.bool)
        kept[[5, 100]] = True
        assert torch.equal(a[kept], b[kept])
        assert bool((b[~kept, : PAYLOAD[layout]] == 0).all())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("v1 lens=3", "q kv_cache weights context_lens block_table max_context_len clean_logits"),
        ("v1 stage=topk data=few lens=3", "logits context_lens block_table k"),
        ("v1 stage=store ids=0", "pooled norm_weight eps positions rope_table out_loc kv_cache"),
    ],
)
def test_keyword_arguments_are_those_of_the_calling_conventions(text, names):
    case = parse_case(text)
    assert sorted(find(case.op).build(case, CPU).kwargs()) == sorted(names.split())


@settings(max_examples=60, deadline=None)
@given(topk_cases(max_length=600, ks=(1, 64)))
def test_topk_tails_hold_what_the_case_says(case):
    built = build_topk(case)
    assert built.logits.shape == (case.rows, case.max_context_len)
    assert built.logits.stride(-1) == 1
    for row in range(case.rows):
        request, inner = divmod(row, case.next_n)
        tail = built.logits[row, case.lengths[request][inner] :]
        inside = built.logits[row, : case.lengths[request][inner]]
        if case.clean:
            assert bool((tail == -torch.inf).all())
        elif case.poison == "nan":
            assert bool(tail.isnan().all())
        else:
            assert bool(tail.isfinite().all())
            if inside.numel() and tail.numel():
                assert float(tail.min()) > float(inside.nan_to_num(nan=0.0, posinf=0.0).max())


def test_topk_scores_follow_the_logical_key():
    """Dropping a logical page keeps the scores of the others, as it keeps their keys."""
    whole = build_topk(parse_case("v1 stage=topk data=random lens=192 seed=4")).logits
    fewer = build_topk(parse_case("v1 stage=topk data=random lens=128 seed=4 page_ids=0,2")).logits
    assert torch.equal(fewer[:, :64], whole[:, :64]) and torch.equal(fewer[:, 64:], whole[:, 128:])

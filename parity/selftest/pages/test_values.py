"""Data classes: the same numbers everywhere, exact where they promise it, and with the property each is named for."""

import hashlib

import numpy as np
import pytest
import torch

from parity.ops.paged_logits.case import DATA, HEADS, Case
from parity.ops.paged_logits.operands import build_logits
from parity.ops.topk.case import DATA as TOPK_DATA
from parity.ops.topk.case import TopkCase
from parity.ops.topk.operands import build_topk
from parity.pages import counter, tables
from parity.pages.elements import BF16, E2M1, E4M3
from parity.pages.keys import CLASSES
from parity.pages.values import draw_keys, draw_queries, draw_weights
from parity.run.operation import find, parse_case
from parity.selftest.case_reading import LAYOUTS, read_row, slots_of
from parity.selftest.helpers import CPU, bits
from reference.exact import dots, logits
from reference.formats import e4m3_encode
from reference.pages import read_keys

LENGTHS = ((130, 131), (64, 1), (300, 7))


def _digest(*tensors: torch.Tensor) -> str:
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(bits(x).numpy().tobytes())
    return sha.hexdigest()[:16]


# Values are part of the meaning of a case string: a change here needs a new version in the string.
FIXED = {
    "v1 lens=130,65,1 seed=7 perm=3": "3f40f6e5a8067201",
    "v1 lens=130,65,1 data=octaves seed=7 perm=3": "2b525f1fde8a24fa",
    "v1 lens=130,65,1 layout=fp8 seed=7 perm=3": "ff6005a3e47c5ec2",
    "v1 lens=130,65,1 layout=fp8 data=octaves seed=7 perm=3": "9942ced2a9b0d5b2",
    "v1 lens=130,65,1 layout=fp4 seed=7 perm=3": "c050214c6ca7389a",
    "v1 lens=130,65,1 layout=fp4 data=octaves seed=7 perm=3": "7090c7266314ce4b",
    (
        "v1 lens=130,131,65,66 next_n=2 layout=fp8 heads=8 data=near_ties seed=4611686018427387904 perm=9 alias=copied"
        " prefix=1 spare=3 gap=32 width=7 max_len=200 tail=canary poison=canary page_ids=4,2x2"
    ): "aa1032f9dab72655",
    "v1 lens=300 data=saturating seed=1": "68e883342ed8ff84",
    "v1 lens=300 data=subnormal seed=1": "e6b2514342795b2c",
    "v1 lens=300 data=outliers seed=1": "41e0986642375682",
    "v1 lens=300 data=fp4_grid seed=1": "d5d374f4a1d926d2",
    "v1 lens=300 layout=fp8 data=needle seed=1": "9ad75a9b1fad1e40",
    "v1 lens=300 layout=fp8 data=zeros seed=1": "b3c2e4dba0541eca",
    "v1 lens=300 layout=fp8 data=nonfinite seed=1": "d97d9bfa7427c00a",
    "v1 lens=300 layout=fp4 data=negative seed=1": "c7c62729b8b7b116",
    "v1 lens=300 layout=fp4 data=outliers seed=1": "182abead19d1e19f",
    "v1 lens=700,20 stage=topk data=random seed=2": "f2cfb498577179a5",
    "v1 lens=700,20 stage=topk data=nan seed=2": "00e02378c7ec71d0",
    "v1 lens=700,20 stage=topk data=zeros seed=2": "41de335959a0ac04",
    "v1 lens=700,20 stage=topk data=large seed=2": "544c1712c5a9725a",
    "v1 lens=700,20 stage=topk data=few seed=2": "b1f86bb62f57a981",
}


@pytest.mark.parametrize("text", FIXED)
def test_a_case_string_means_the_same_bits_everywhere(text):
    case = parse_case(text)
    built = find(case.op).build(case, CPU)
    names = "logits context_lens block_table" if case.op == "topk" else "q weights context_lens block_table pool"
    assert _digest(*(getattr(built, name) for name in names.split())) == FIXED[text]


def test_counter_words_equal_plain_integer_arithmetic():
    """The torch mixers against Python integers: masked shifts and wrapping products are what they claim to be."""
    coordinates = [(0, 0, 0), (1, 2, 3), (1 << 20, (1 << 24) - 1, 63)]
    columns = [torch.tensor(column) for column in zip(*coordinates, strict=True)]
    keys = counter.row_keys(12345, 7, columns)
    words = counter.row_words(keys, counter.counting(5, CPU))
    for i, coordinate in enumerate(coordinates):
        base = counter.mix_int(12345 * counter._SEED + 7 * counter._STREAM + counter._COORDINATES[0])
        key = counter.mix_int(base + sum(c * m for c, m in zip(coordinate, counter._COORDINATES, strict=True)))
        assert int(keys[i]) % (1 << 64) == key
        for n in range(5):
            word = ((key & 0xFFFFFFFF) + n * 0x9E3779B9) & 0xFFFFFFFF
            word = ((word ^ (word >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
            word ^= key >> 32
            word = ((word ^ (word >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
            assert int(words[i, n]) % (1 << 32) == word ^ (word >> 16)


def test_tables_hold_what_the_formats_can():
    for name in ("int4", "one_two", "bell", "positive", "grid", "top", "tiny"):
        wide = tables.codes(name, BF16, CPU).view(torch.bfloat16).to(torch.float64)
        want = torch.from_numpy(tables.distribution(name, BF16))
        assert torch.equal(wide, want.to(torch.float32).to(torch.bfloat16).to(torch.float64)), name
        narrow = tables.codes(name, E4M3, CPU).view(torch.float8_e4m3fn).to(torch.float64)
        want = torch.from_numpy(tables.distribution(name, E4M3))
        assert torch.isfinite(narrow).all()
        if name != "bell":
            nearest = e4m3_encode(want.to(torch.float32)).view(torch.float8_e4m3fn).to(torch.float64)
            assert ((narrow - want).abs() <= (nearest - want).abs()).all(), name
    spread = tables.distribution("bell", BF16)
    assert abs(spread.mean()) < 1e-6 and abs(spread.std() - np.sqrt(4 / 3)) < 1e-3
    assert tables.distribution("positive", E2M1).min() >= 0.5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("data", ["exact", "exact_wide"])
def test_exact_classes_keep_their_promise_on_drawn_data(layout, heads, data):
    case = Case(lengths=((300, 128), (64, 1)), layout=layout, heads=heads, data=data, seed=5)
    peak = CLASSES[data].peak
    assert peak is not None
    most = 128 * peak[0] * peak[1]  # of sum_d |q||k|
    most_total = most * peak[2] * heads
    operands = build_logits(case)
    assert most <= 2**14 and most_total <= 2**24
    seen = 0.0
    for row in range(case.rows):
        request, inner = divmod(row, case.next_n)
        q = operands.q[request, inner][None].to(torch.float64)
        w = operands.weights[row][None].to(torch.float64)
        keys, scales = _stored(operands, row)
        assert torch.equal(q, q.round()) and torch.equal(w, w.round()) and torch.equal(keys, keys.round())
        _, absdot = dots(q, keys)
        assert float(absdot.max()) <= most
        total = (w.abs()[:, :, None] * absdot).sum(1)
        assert float(total.max()) <= most_total
        seen = max(seen, float(total.max()) / most_total)
        if scales is not None:
            mantissa, _ = torch.frexp(scales)
            assert (mantissa == 0.5).all()
            for page in scales.split(64):
                assert len(torch.unique(page)) == len(page)
    assert seen > 0.05  # the promise is not idle


def _stored(operands, row):
    """Keys as integers, their power-of-two scales apart, for every layout."""
    layout = operands.case.layout
    values, scales = read_keys(operands.kv_cache, layout, slots_of(operands, row))
    values = values.to(torch.float64)
    if layout == "fp4":  # the reader multiplies scales in; integers up to 4 leave the power of two recoverable
        slots = slots_of(operands, row)
        raw = operands.pool[slots // 64, 64 * 64 + 4 * (slots % 64)]
        scales = torch.ldexp(torch.ones(len(slots), dtype=torch.float64), raw.to(torch.int64) - 127)
        values = values / scales[:, None]
    return values, scales


def test_exact_wide_sees_a_bf16_dot_and_a_bf16_weight():
    case = Case(lengths=((300,),), data="exact_wide", seed=2)
    operands = build_logits(case)
    keys, _ = _stored(operands, 0)
    dot, _ = dots(operands.q[0].to(torch.float64), keys)
    assert float((dot.to(torch.bfloat16).to(torch.float64) != dot).double().mean()) > 0.2
    weights = operands.weights
    assert bool((weights.to(torch.bfloat16).to(torch.float32) != weights).any())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("data", DATA)
def test_values_do_not_depend_on_company(layout, data):
    """Rows, heads and pages drawn alone equal the same ones drawn in a larger batch: dropping rows keeps the rest."""
    requests, rows = torch.tensor([3, 1, 7]), torch.tensor([0, 5, 2])
    many = draw_queries(data, layout, 11, requests, rows, 64).view(torch.uint8)
    few = draw_queries(data, layout, 11, requests[1:2], rows[1:2], 8).view(torch.uint8)
    assert torch.equal(many[1:2, :8], few)
    weights = draw_weights(data, 11, requests, rows, 64)
    assert torch.equal(weights[1:2, :8], draw_weights(data, 11, requests[1:2], rows[1:2], 8))
    assert len({_digest(row) for row in weights}) == 3
    keys = draw_keys(data, layout, 11, requests, rows)
    alone = draw_keys(data, layout, 11, requests[2:], rows[2:])
    for all_pages, one in zip(keys, alone, strict=True):
        assert (all_pages is None) == (one is None)
        if all_pages is not None and one is not None:
            assert torch.equal(bits(all_pages[2:]), bits(one))
    assert len({_digest(page) for page in keys.payload}) == 3
    other_seed = draw_keys(data, layout, 12, requests, rows)
    assert not torch.equal(keys.payload, other_seed.payload)


def _exact_logits(operands, row):
    request, inner = divmod(row, operands.case.next_n)
    keys, scales = read_keys(operands.kv_cache, operands.case.layout, slots_of(operands, row))
    return logits(operands.q[request, inner][None], keys, operands.weights[row][None], scales)[0]


def _drawn(data, layout, length=400, **fields):
    return build_logits(Case(lengths=((length,),), layout=layout, data=data, seed=1, **fields))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_classes_have_the_property_they_are_named_for(layout):
    negative = _exact_logits(_drawn("negative", layout, heads=8), 0)
    assert bool((negative < 0).all())

    needle = _exact_logits(_drawn("needle", layout), 0)
    ordered = needle.sort(descending=True).values
    assert float(ordered[0]) > 1.5 * float(ordered[1]) and int(needle.argmax()) < 64

    finite = [_exact_logits(_drawn(data, layout), 0).isfinite() for data in DATA if data != "nonfinite"]
    assert all(bool(row.all()) for row in finite)
    odd = ~_exact_logits(_drawn("nonfinite", layout), 0).isfinite()
    assert 5 <= int(odd.sum()) <= 40

    zeros = _drawn("zeros", layout)
    keys, _ = read_keys(zeros.kv_cache, layout, torch.arange(400))
    counts = (keys.to(torch.float32) != 0).sum(1)
    assert int((counts == 0).sum()) > 50 and int((counts == 1).sum()) > 30 and int((counts > 20).sum()) > 100
    assert bool((zeros.weights == 0).any()) and bool((zeros.q[0, 0].to(torch.float32) == 0).all(-1).any())

    ties = read_row(_drawn("near_ties", layout), 0).keys.view(400, -1)
    differing = (ties[1:] != ties[:1]).sum(1)
    assert 0 < int(differing.max()) < 40  # bytes

    both = _drawn("octaves", layout)
    dot, _ = dots(both.q[0], read_keys(both.kv_cache, layout, torch.arange(400))[0])
    assert float(dot.abs().max()) > 256 and bool((dot > 0).any()) and bool((dot < 0).any())
    assert bool((both.weights < 0).any()) and bool((both.weights.to(torch.bfloat16).float() != both.weights).any())


def test_saturating_and_subnormal_payloads():
    codes = draw_keys("saturating", "fp8", 0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert set(codes.payload.unique().tolist()) == {0x7E, 0xFE}
    tiny = _drawn("subnormal", "bf16")
    keys, _ = read_keys(tiny.kv_cache, "bf16", torch.arange(400))
    assert 0 < float(keys.to(torch.float64).abs().max()) < 2.0**-126
    tiny8 = draw_keys("subnormal", "fp8", 0, torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert int((tiny8.payload & 0x7F).max()) == 7


@pytest.mark.parametrize("data", [name for name in DATA if CLASSES[name].scale == "real"])
def test_fp8_scales_are_positive_and_use_their_significand(data):
    keys = draw_keys(data, "fp8", 3, torch.arange(4), torch.arange(4))
    assert keys.scales is not None
    scales = keys.scales[torch.isfinite(keys.scales)]
    assert bool((scales > 0).all())
    assert bool((scales.view(torch.int32) & 0xFF != 0).any())


def test_topk_classes_have_the_property_they_are_named_for():
    def drawn(data, length=6000):
        case = TopkCase(lengths=((length, length),) * 4, data=data, seed=3)
        return build_topk(case).logits

    assert bool((drawn("equal") == drawn("equal")[:, :1]).all())
    assert bool((drawn("negative") < 0).all())
    assert 0.2 < float(drawn("neginf").isinf().double().mean()) < 0.3
    narrow = drawn("narrow")
    assert narrow.to(torch.float16).unique().numel() <= 2 and narrow[0].unique().numel() > 3000
    ulps = drawn("ulps")
    assert ulps.unique().numel() == 8 and float(ulps.max() - ulps.min()) == 7 * 2.0**-22
    assert bool((drawn("large").abs() > 65504).all()) and bool((drawn("large") < 0).any())
    nan = drawn("nan").isnan().double().mean(1)
    assert bool((nan == 1).any()) or bool((nan > 0.05).any())
    assert drawn("few").unique().numel() == 5
    zeros = drawn("zeros")
    assert bool((torch.signbit(zeros) & (zeros == 0)).any()) and bool((~torch.signbit(zeros) & (zeros == 0)).any())
    assert drawn("random").unique().numel() > 40000
    inf = drawn("inf")
    assert bool((inf == torch.inf).any()) and bool((inf == -torch.inf).any()) and not bool(inf.isnan().any())
    top = drawn("top")
    assert float(top.abs().min()) >= 2.0**123 and float(top.abs().max()) < 2.0**127 and bool((top < 0).any())
    tiny = drawn("tiny")
    assert float(tiny.abs().max()) < 2.0**-28 and bool((tiny.abs() < 2.0**-126).any())
    assert len(TOPK_DATA) == 13

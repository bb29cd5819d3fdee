"""Layouts: sizes, places and bytes as `reference.pages` has them, and one more from outside with no change here.

A new layout is one value, `parity.pages.layout.Layout`: for logits functions the sizes of payload and scale per slot,
the element formats of keys and queries, `finish` (drawn codes to stored keys) and `read` (a cache back to values and
scales); for stores `encode` and `allowed` too. `TOY` below is all that such a package holds.
"""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity.domain.contract import Contract
from parity.numerics.bounds import expected
from parity.ops.paged_logits.judge import compare_bounded
from parity.ops.paged_logits.operands import build_logits
from parity.pages import intervals, layout
from parity.pages.layout import DIM, PAGE, POISON, Layout, find, names, register
from parity.run.operation import parse_case
from parity.selftest.case_reading import slots_of
from parity.vocabulary import Status
from reference import pages

ROOT = Path(__file__).resolve().parents[3]
OURS = ("bf16", "fp8", "fp4")
TOY = '''
"""int8 numbers and one bf16 scale per key: what a layout has to provide for logits functions."""

import numpy as np
import torch

from parity.pages.elements import BF16, Element
from parity.pages.keys import Keys, power_of_two
from parity.pages.layout import Layout

SHIFT = 4


def with_signs(codes, minus):
    size = codes.view(torch.int8).abs()
    return torch.where(minus, -size, size).view(torch.uint8)


def finish(drawn):
    exponents = drawn.scale_exponents() - SHIFT
    scales = power_of_two(exponents).to(torch.bfloat16)
    return Keys(drawn.codes, scales if drawn.spoiled is None else scales.masked_fill(drawn.spoiled, torch.nan))


def read(kv_cache, slots):
    page = kv_cache.flatten(1)[slots // 64]
    place = (slots % 64)[:, None]
    values = page.gather(1, place * 128 + torch.arange(128)).view(torch.int8).to(torch.bfloat16)
    scales = page.gather(1, 64 * 128 + place * 2 + torch.arange(2)).view(torch.bfloat16)
    return values, scales[:, 0].float()


INT8 = Layout(
    name="int8",
    about="128 int8 numbers and a bf16 scale, 130 bytes per slot",
    element=Element(
        name="int8",
        encode=lambda values: np.clip(np.rint(values), -127, 127).astype(np.int8).view(np.uint8),
        shift=SHIFT,
        least=2.0**-SHIFT,
        top=(127.0,),
        tiny=(0, 8),
        needle=127,
        with_signs=with_signs,
        outliers=lambda codes, large: torch.where(large, codes, (codes.view(torch.int8) // 16).view(torch.uint8)),
    ),
    query=BF16,
    payload=128,
    scale=2,
    poison_scale={"huge": 0x7D},
    finish=finish,
    read=read,
)


def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    out = q.new_full((context_lens.numel(), max_context_len), -torch.inf, dtype=torch.float32)
    for row, length in enumerate(context_lens.flatten().tolist()):
        request, draft = divmod(row, context_lens.shape[1])
        key = torch.arange(length)
        values, scales = read(kv_cache, block_table[request].long()[key // 64] * 64 + key % 64)
        dots = torch.relu(q[request, draft].float() @ values.float().T)
        out[row, :length] = (weights[row] @ dots) * scales
    return out


def shifted(q, kv_cache, **named):
    return logits(q, kv_cache.roll(1, 1), **named)
'''


@pytest.mark.parametrize("name", OURS)
def test_sizes_and_views_are_those_of_the_reference(name):
    form = find(name)
    assert form.slot_bytes == pages.slot_bytes(name) and form.page_bytes == pages.page_bytes(name)
    pool = torch.arange(3 * (form.page_bytes + 32)).to(torch.uint8).view(3, -1)
    view = form.cache_view(pool)
    assert torch.equal(pages.byte_pages(view, name), pool[:, : form.page_bytes])
    assert view.data_ptr() == pool.data_ptr() and view.dtype == form.cache_dtype
    assert form.empty_cache(2).shape == (2, *view.shape[1:]) and not form.empty_cache(2).any()


@pytest.mark.parametrize("name", OURS)
def test_every_byte_of_a_page_belongs_to_one_part_of_one_slot(name):
    form, stride = find(name), find(name).page_bytes + 48
    payload, scale = form.addresses(torch.arange(PAGE, 2 * PAGE), stride)
    assert torch.equal(torch.cat((payload, scale), 1).flatten().sort().values, stride + torch.arange(form.page_bytes))
    owner = form.slot_of_byte()
    for part, addresses in (("payload", payload), ("scale", scale)):
        for slot, inside in ((0, addresses[0] - stride), (37, addresses[37] - stride)):
            assert (owner[inside] == slot).all()
            assert all(form.place_of_byte(int(byte)) == (slot, part) for byte in inside)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("fake", [False, True])
def test_keys_survive_being_stored_and_read(name, fake):
    """Encoded keys stand where the reference reads them, one rounding away from what they were; any other value does
    not pass for them."""
    form = find(name)
    if fake and not form.fake_fp4:
        with pytest.raises(ValueError, match="must be false for fp4 pages"):
            Contract(op="store", layout=name, fake_fp4=True)
        return
    z = torch.randn(90, DIM, generator=torch.Generator().manual_seed(5)) * 2.0 ** torch.arange(-45, 45)[:, None]
    slots = torch.randperm(3 * PAGE, generator=torch.Generator().manual_seed(6))[:90]
    for rule in form.scale_rules or ("amax",):
        payload, scales = form.encode(z, rule, fake)
        cache = form.empty_cache(3)
        where, where_scale = form.addresses(slots, form.page_bytes)
        flat = pages.byte_pages(cache, name).view(-1)
        flat[where] = payload
        if scales is not None:
            flat[where_scale] = scales
        values, factor = form.read(cache, slots)
        again, _ = pages.read_keys(cache, name, slots)
        assert torch.equal(values.float(), again.float())
        got = values.double() * (1.0 if factor is None else factor.double()[:, None])
        top = z.abs().amax(1, keepdim=True).clamp_min(1e-4).double()
        error = ((got - z.double()).abs() / top).max()
        # Of the largest magnitude: half a last place of it, where scales may be twice as large as they need to be.
        assert error <= {"bf16": 2.0**-8, "fp8": 1 / 14, "fp4": 1 / 3}[name] + fake / 3

        given = (z.double(), z.double(), rule, fake)
        stored = torch.empty(90, 0, dtype=torch.uint8) if scales is None else scales
        found = form.allowed(payload, stored, *given)
        assert not found.bad.any() and not found.bad_scale.any()
        found = form.allowed(payload ^ 0x11, stored, *given)
        assert (found.bad.any(1) | (payload ^ 0x11 == 0).all(1)).all() and not found.bad_scale.any()
        if scales is not None:
            assert form.allowed(payload, stored ^ 0x40, *given).bad_scale.any(1).all()


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("kind", POISON)
def test_poison_reads_as_what_it_is(name, kind):
    form = find(name)
    cache = form.cache_view(form.poison_page(kind)[None])
    values, scales = form.read(cache, torch.arange(PAGE))
    product = values.float() * (1.0 if scales is None else scales[:, None])
    if kind == "nan":
        assert product.isnan().all()
    elif kind == "huge":  # in float32, or infinite there
        assert (product.abs() > 2.0**100).all()
    else:
        assert product.isfinite().all() and (product != 0).all()


def test_a_name_is_known_once_and_a_page_has_64_slots(monkeypatch):
    monkeypatch.setattr(layout, "_LAYOUTS", dict(layout._LAYOUTS))
    with pytest.raises(ValueError, match="layout must be one of bf16, fp8, fp4.*, got 'int4'"):
        find("int4")
    fields = {name: getattr(find("fp8"), name) for name in Layout.__dataclass_fields__}
    with pytest.raises(ValueError, match="'fp8' is registered twice"):
        register(Layout(**fields))
    with pytest.raises(ValueError, match="must have 64 slots of 128 channels, got 32 of 128"):
        register(Layout(**fields | {"name": "half", "slots": 32}))
    assert register(find("fp8")) is find("fp8") and names()[:3] == OURS


@pytest.fixture
def outside(tmp_path):
    """A folder in which another package with a layout of its own is installed."""
    (tmp_path / "toy_layout.py").write_text(TOY)
    info = tmp_path / "toy_layout-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-layout\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{layout.GROUP}]\nint8 = toy_layout:INT8\n")
    return tmp_path


@pytest.fixture
def toy(outside, monkeypatch):
    """The layout of that package, found through its entry point; forgotten after the test."""
    monkeypatch.setattr(layout, "_LAYOUTS", dict(layout._LAYOUTS))
    monkeypatch.syspath_prepend(str(outside))
    layout._load_entry_points.cache_clear()
    yield find("int8")
    layout._load_entry_points.cache_clear()
    del sys.modules["toy_layout"]


def test_a_layout_from_another_package_is_drawn_poisoned_and_judged(toy):
    toy_layout = importlib.import_module("toy_layout")
    assert names() == (*OURS, "int8") and toy.slot_bytes == 130
    texts = [
        f"v2 op=paged_logits layout=int8 heads=8 data={data} seed=4 lens=130,70 perm=3 spare=2 gap=16 {more}"
        for data, more in (
            ("exact", "poison=nan"),
            ("octaves", "poison=huge tail=huge"),
            ("near_ties", "poison=canary tail=canary"),
            ("needle", "only_keys=1,64"),
            ("outliers", ""),
            ("zeros", ""),
            ("nonfinite", ""),
        )
    ]
    for text in texts:
        case = parse_case(text)
        assert parse_case(str(case)) == case
        built = build_logits(case)
        assert built.kv_cache.shape[1:] == (PAGE, 1, 130) and built.q.dtype == torch.bfloat16
        slots = torch.arange(built.pool.shape[0] * PAGE)
        bytes_ = built.pool.view(-1)[torch.cat(toy.addresses(slots, case.page_stride), 1)]
        readable = torch.cat([slots_of(built, row) for row in range(case.rows)])
        hidden = torch.ones(len(bytes_), dtype=torch.bool)
        hidden[readable] = False
        if case.poison != "canary":
            assert (bytes_[hidden, :128] == POISON[case.poison]).all()
            assert (bytes_[hidden, 128:] == {"huge": 0x7D}.get(case.poison, POISON[case.poison])).all()
        assert (built.pool[:, toy.page_bytes :] == POISON[case.poison]).all()
        if case.only_keys is not None:
            dropped = bytes_[slots_of(built, 0)][2:64]
            assert (dropped[:, :128] == 0).all() and (dropped[:, 128:].view(torch.bfloat16) == 1).all()
        contract = Contract.default("int8", "cpu")
        wanted = expected(built, contract)
        for function, status in ((toy_layout.logits, Status.PASSED), (toy_layout.shifted, Status.FAILED)):
            verdict = compare_bounded(function(**built.kwargs()), wanted, built, contract=contract)
            assert verdict.status is status, (text, verdict.message)
    with pytest.raises(ValueError, match="does not say how a store is judged"):
        toy.encode(torch.zeros(1, DIM), "amax", False)


def test_a_function_of_such_a_layout_goes_through_the_command_line(outside):
    command = [sys.executable, "-m", "parity", "run", "--impl", f"{outside / 'toy_layout.py'}:logits"]
    case = "v2 op=paged_logits layout=int8 heads=8 lens=70,3 data=exact poison=huge"
    done = subprocess.run(
        [*command, "--case", case, "--device", "cpu"],
        env={"PYTHONPATH": f"{outside}:{ROOT}", "PATH": "", "OMP_NUM_THREADS": "1"},
        cwd=outside,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "passed" in done.stdout


def test_an_entry_point_that_is_no_layout_is_named(outside, monkeypatch):
    monkeypatch.setattr(layout, "_LAYOUTS", dict(layout._LAYOUTS))
    monkeypatch.syspath_prepend(str(outside))
    points = outside / "toy_layout-1.0.dist-info" / "entry_points.txt"
    for value, message in (("toy_layout:logits", "is no Layout"), ("toy_layout:gone", "cannot be loaded")):
        points.write_text(f"[{layout.GROUP}]\nint8 = {value}\n")
        with pytest.raises(ValueError, match=message):
            layout._load_entry_points.__wrapped__()


def test_an_interval_rounds_like_its_ends():
    low, high = torch.tensor([[-1.0, 0.5, -3.0]]), torch.tensor([[2.0, 0.75, -2.0]])
    assert [x.tolist() for x in intervals.amax(low.double(), high.double())] == [[2.0], [3.0]]

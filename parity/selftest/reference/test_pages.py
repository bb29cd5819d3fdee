"""Page reader and writer: round trips at any stride, byte for byte, touching nothing but the slots asked for."""

import mmap
import os
import struct
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.selftest.helpers import refuses, seeded
from reference import formats, pages

LAYOUTS = ("bf16", "fp8", "fp4")
WIDTH = {"bf16": 128, "fp8": 132, "fp4": 68}
SLOT = torch.tensor([1])


def poisoned(layout: str, count: int, gap: int = 0, lead: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool of NaN bytes with `gap` bytes between pages, `lead` before them; and the raw bytes that it views."""
    size = pages.page_bytes(layout) + gap
    raw = torch.full((lead + count * size,), 0xFF, dtype=torch.uint8)
    base, unit = (raw.view(torch.bfloat16), 2) if layout == "bf16" else (raw, 1)
    width = WIDTH[layout]
    cache = base.as_strided((count, 64, 1, width), (size // unit, width, width, 1), lead // unit)
    return cache, raw


def keys(layout: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = torch.randn(count, 128, generator=seeded(seed)).to(torch.bfloat16)
    if layout == "bf16":
        return x, None
    if layout == "fp8":
        scale = formats.fp8_amax_scale(x)
        return formats.fp8_quantise(x, scale).view(torch.float8_e4m3fn), scale
    return formats.fp4_quantise(x)[0].float(), None


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_round_trip_touches_only_its_slots(layout: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    gap, lead = 16 * data.draw(st.integers(0, 3)), 16 * data.draw(st.integers(0, 2))
    slots = torch.tensor(data.draw(st.lists(st.integers(0, count * 64 - 1), max_size=9, unique=True))).long()
    cache, raw = poisoned(layout, count, gap, lead)
    values, scales = keys(layout, slots.numel(), data.draw(st.integers(0, 99)))
    pages.write_keys(cache, layout, slots, values, scales)
    got, got_scales = pages.read_keys(cache, layout, slots)
    assert got.dtype == values.dtype and torch.equal(got.float(), values.float())
    if layout == "fp8":
        assert got_scales is not None and scales is not None and torch.equal(got_scales, scales)
    touched = torch.zeros_like(raw, dtype=torch.bool)
    size, width = pages.page_bytes(layout) + gap, {"bf16": 256, "fp8": 128, "fp4": 64}[layout]
    for slot in slots.tolist():
        page = lead + slot // 64 * size
        touched[page + slot % 64 * width :][:width] = True
        tail = WIDTH[layout] - width if layout != "bf16" else 0
        touched[page + 64 * width + slot % 64 * tail :][:tail] = True
    assert bool((raw[~touched] == 0xFF).all())


def test_fp8_bytes_by_hand() -> None:
    raw = bytearray(2 * (64 * 132 + 16))
    page = 64 * 132 + 16
    raw[page + 5 * 128 + 3] = 0x38  # 1.0
    struct.pack_into("<f", raw, page + 64 * 128 + 4 * 5, 0.75)
    cache = torch.frombuffer(raw, dtype=torch.uint8).as_strided((2, 64, 1, 132), (page, 132, 132, 1))
    values, scales = pages.read_keys(cache, "fp8", torch.tensor([64 + 5]))
    assert scales is not None and scales.tolist() == [0.75]
    assert values.float()[0, 3] == 1.0 and int(values.view(torch.uint8).sum()) == 0x38


def test_fp4_bytes_by_hand() -> None:
    raw = bytearray(64 * 68)
    raw[2 * 64 + 16] = 0xA3  # channel 32: code 3 = 1.5, channel 33: code 10 = -1
    raw[64 * 64 + 2 * 4 + 1] = 129  # block 1: 2**2
    cache = torch.frombuffer(raw, dtype=torch.uint8).view(1, 64, 1, 68)
    values, scales = pages.read_keys(cache, "fp4", torch.tensor([2]))
    assert scales is None and values[0, 32] == 6.0 and values[0, 33] == -4.0


def test_bf16_flat_view() -> None:
    cache, raw = poisoned("bf16", 2)
    values, _ = keys("bf16", 1, 0)
    pages.write_keys(raw.view(2, -1), "bf16", torch.tensor([70]), values)
    assert torch.equal(pages.read_keys(cache, "bf16", torch.tensor([70]))[0], values)


def test_fp4_explicit_exponents() -> None:
    cache, _ = poisoned("fp4", 1)
    assert bool(torch.isnan(pages.read_keys(cache, "fp4", SLOT)[0]).all())  # poison reads as NaN
    tiny = torch.zeros(1, 64, dtype=torch.uint8)
    tiny[0, 0] = 1
    pages.write_keys(cache, "fp4", SLOT, tiny, torch.zeros(1, 4, dtype=torch.uint8))
    assert pages.read_keys(cache, "fp4", SLOT)[0][0, 0] == 2.0**-128
    values = torch.zeros(1, 128)
    values[0, 0] = 3.0
    for power in (-1, 0, 1):
        pages.write_keys(cache, "fp4", SLOT, values, torch.full((1, 4), power))
        assert torch.equal(pages.read_keys(cache, "fp4", SLOT)[0], values)
    powers = torch.full((1, 4), -2)
    refuses(ValueError, "must lie on the e2m1 grid", pages.write_keys, cache, "fp4", SLOT, values, powers)


@pytest.mark.skipif(sys.platform != "linux", reason="counts resident pages in /proc")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lazily_mapped_pool_stays_unmapped(layout: str) -> None:
    no_reserve = 0x4000  # Linux's MAP_NORESERVE, which older Pythons do not name
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve
    size = (1 << 32) // pages.page_bytes(layout) * pages.page_bytes(layout)
    pool = torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8).view(-1, pages.page_bytes(layout))
    slots = torch.tensor([0, (pool.shape[0] - 1) * 64 + 63])
    values, scales = keys(layout, 2, 3)

    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    pages.write_keys(pool, layout, slots, values, scales)
    assert torch.equal(pages.read_keys(pool, layout, slots)[0].float(), values.float())
    assert resident() - before < 64 << 20


CACHE, RAW = poisoned("fp8", 2)
MISTAKES = {
    "layout must be one of bf16, fp8, fp4, got 'int8'": lambda: pages.slot_bytes("int8"),
    "the fp8 layout wants torch.uint8": lambda: pages.read_keys(CACHE[:, :32], "fp8", SLOT),
    "the bf16 layout wants torch.bfloat16": lambda: pages.read_keys(CACHE, "bf16", SLOT),
    r"expected values in \[0, 128\), got 128": lambda: pages.read_keys(CACHE, "fp8", SLOT + 127),
    r"expected values in \[0, 128\), got -1": lambda: pages.read_keys(CACHE, "fp8", SLOT - 2),
    "slots: expected int64": lambda: pages.read_keys(CACHE, "fp8", SLOT.int()),
    "distinct slots": lambda: pages.write_keys(CACHE, "fp8", SLOT.expand(2), *keys("fp8", 2, 0)),
    "scales: .* got None": lambda: pages.write_keys(CACHE, "fp8", SLOT, keys("fp8", 1, 0)[0]),
    r"values: expected .*\[1, 128\]": lambda: pages.write_keys(CACHE, "fp8", SLOT, *keys("fp8", 2, 0)),
}


@pytest.mark.parametrize("sentence", MISTAKES)
def test_errors_write_nothing(sentence: str) -> None:
    refuses(ValueError, sentence, MISTAKES[sentence])
    assert bool((RAW == 0xFF).all())

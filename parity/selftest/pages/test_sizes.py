"""Sizes that are counted before anything is built: pages, bytes of pool and operands, and the refusal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.cli.main import main
from parity.ops.compressor.operands import operand_bytes as compressor_bytes
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.operands import operand_bytes
from parity.ops.store.operands import operand_bytes as store_bytes
from parity.ops.topk.operands import operand_bytes as topk_operand_bytes
from parity.ops.topk.strategies import topk_cases
from parity.pages import pools
from parity.pages.placement import count_pages, place
from parity.pages.pools import lazy_buffer, pool_bytes
from parity.run import memory
from parity.run.operation import find, parse_case
from parity.selftest.case_reading import any_paged_case
from parity.vocabulary import TooLarge

CPU = torch.device("cpu")


def build(case: Any) -> Any:
    return find(case.op).build(case, CPU)


@settings(max_examples=120, deadline=None)
@given(st.one_of(any_paged_case(), topk_cases(max_length=700, ks=(1,))))
def test_pages_are_counted_without_placing_them(case: Case) -> None:
    plan = place(case)
    assert count_pages(case) == (len(plan.ref_used), plan.used)


@pytest.mark.parametrize("text", ["v1 lens=0 next_n=1", "v1 lens=none", "v1 lens=65x3 request_ids=1x3 prefix=1"])
def test_pages_of_empty_and_repeated_requests(text: str) -> None:
    case = parse_case(text)
    assert count_pages(case)[1] == place(case).used


@pytest.mark.parametrize(
    "text",
    [
        "v1 lens=130x3 spare=40000",
        "v1 lens=130x3 spare=40000 perm=3 gap=16",
        "v1 lens=130x3 spare=400 perm=3 gap=8388608 layout=fp8",
        "v1 lens=64x40 spare=3 perm=9 gap=8388608 layout=fp4",
        "v1 lens=64x40 spare=0 perm=9",
    ],
)
def test_pool_bytes_cover_what_is_written(text: str) -> None:
    case = parse_case(text)
    operands = build(case)
    assert isinstance(operands.windows, tuple) or "spare=0" in text
    written = sum(stop - start for start, stop in operands.windows) if operands.windows else operands.pool.nbytes
    assert written <= pool_bytes(case, count_pages(case)[1], CPU) <= 8 * written


ESTIMATES: dict[str, Callable[[Any], int]] = {
    "v1 lens=4096x4 heads=64": operand_bytes,
    "v1 stage=topk lens=65536x4 data=random": topk_operand_bytes,
    "v1 stage=store ids=0..4095 pages=128": store_bytes,
    "v1 stage=compressor calls=0:4000+1:500/0:500": compressor_bytes,
}


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value if isinstance(value, tuple) else vars(value).values() if hasattr(value, "__dict__") else ()
    return [tensor for part in parts for tensor in tensors(part)]


@pytest.mark.parametrize("text", ESTIMATES)
def test_an_estimate_is_no_less_than_the_operands_and_not_far_more(text: str) -> None:
    case = parse_case(text)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors(build(case))}
    held = sum(storages.values())
    assert held <= ESTIMATES[text](case) <= 20 * held


LARGE = (
    "v1 lens=16777216x4096",
    "v1 lens=3 spare=16777216 gap=1073741824",
    "v1 stage=store ids=3 pages=1048576 gap=1073741824",
    "v1 lens=3x4096 max_len=16777216",
    "v1 stage=topk data=random lens=16777216x4096",
    "v1 stage=topk data=random lens=3x100000 k=16777216",
    "v1 stage=store ids=0..524287 pages=1048576 gap=1048576",
    "v1 stage=compressor calls=0:999999999",
)


@pytest.mark.parametrize("text", LARGE)
def test_a_case_that_cannot_fit_is_refused_with_the_figure(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 16 << 30)
    with memory.PeakBytes() as tensors, pytest.raises(TooLarge, match=r"take about [\d,.]+ GB, .* has 17\.2 GB free$"):
        build(parse_case(text))
    assert tensors.peak == 0


def test_the_command_line_says_so_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for case in ("v1 lens=16777216x4096", "v1 lens=3 spare=16777216 gap=1073741824"):
        assert main(["run", "--impl", "torch-bf16", "--case", case]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("parity run: the operands and the result of this case take about 18,0")


def test_a_pool_without_addresses_is_refused() -> None:
    with pytest.raises(TooLarge, match="cannot be mapped"):
        lazy_buffer(1 << 70)


def test_on_a_gpu_the_whole_pool_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = parse_case("v1 lens=3 spare=1000 gap=1048576")
    assert pool_bytes(case, 1, torch.device("cuda")) == 1001 * case.page_stride
    assert pool_bytes(case, 1, CPU) < 40 * case.page_bytes
    monkeypatch.setattr(pools, "LAZY_BYTES", 1 << 40)
    assert pool_bytes(case, 1, CPU) == 1001 * case.page_stride


def test_small_cases_do_not_ask_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    memory.require(memory.ALWAYS_FREE, CPU)
    with pytest.raises(TooLarge):
        memory.require(memory.ALWAYS_FREE + 1, CPU)
    monkeypatch.setattr(memory, "free_bytes", lambda device: None)
    memory.require(1 << 60, CPU)


def test_free_memory_is_read_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    found = memory.free_bytes(CPU)
    assert found is not None and 1 << 26 < found < 1 << 50

    def absent(self: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(memory.Path, "read_text", absent)
    assert (memory.free_bytes(CPU) or 0) >= found
    monkeypatch.setattr(memory.os, "sysconf_names", {}, raising=False)
    assert memory.free_bytes(CPU) is None

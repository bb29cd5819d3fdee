"""Operands moved to another device keep every byte, gap and stride, and share no memory with what they were."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from parity.ops.paged_logits.case import STRIDES
from parity.ops.paged_logits.strategies import paged_cases
from parity.ops.store.strategies import store_cases
from parity.ops.topk.strategies import topk_cases
from parity.run.device import to_device
from parity.run.operation import find, parse_case
from parity.selftest.helpers import CPU, bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = st.one_of(
    *[paged_cases(layout=layout, strides=STRIDES, max_rows=4, max_pages=3) for layout in ("bf16", "fp8")],
    topk_cases(max_length=300, ks=(1, 64)),
)


def both(case) -> tuple[Any, Any]:
    here = find(case.op).build(case, CPU)
    return here, to_device(here, DEVICE)


def tensors(operands):
    named = {field.name: getattr(operands, field.name) for field in dataclasses.fields(operands)}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(CASES)
def test_moved_operands_are_the_same(case):
    here, there = both(case)
    for name, value in tensors(here).items():
        other = tensors(there)[name]
        assert other.stride() == value.stride() and other.dtype == value.dtype and other.device.type == DEVICE
        assert value.numel() == 0 or other.data_ptr() != value.data_ptr()
        assert value.numel() == 0 or torch.equal(other.cpu().view(torch.uint8), bits(value))
    before = {name: tuple(part.cpu() for part in parts) for name, parts in there.snapshot().items()}
    assert here.unchanged(before)
    assert there.case == here.case


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(store_cases(layout="fp8"))
def test_moved_operands_of_a_store_are_the_same(case):
    here, there = both(case)
    assert all(
        torch.equal(there.kwargs()[n].cpu().view(torch.uint8), bits(t))
        for n, t in here.kwargs().items()
        if isinstance(t, torch.Tensor) and t.numel()
    )
    assert there.kv_cache.stride() == here.kv_cache.stride() and torch.equal(there.contents().cpu(), here.contents())
    there.kv_cache.view(torch.uint8).fill_(7)
    there.restore()
    assert torch.equal(there.contents().cpu(), here.contents())


@pytest.mark.parametrize(
    "text, expected",
    [
        ("v1 lens=70,128", True),
        ("v1 lens=0", True),
        ("v1 lens=262144", False),
        ("v1 lens=p0+4096", False),
        ("v1 lens=64 spare=8192", False),
        ("v1 stage=topk lens=300 k=64 data=equal", True),
        ("v1 stage=topk lens=300000 k=64 data=equal", False),
    ],
)
def test_small_cases_are_light(text, expected):
    case = parse_case(text)
    assert find(case.op).light(case) is expected

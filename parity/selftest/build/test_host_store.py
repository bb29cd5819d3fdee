"""The host execution of the store: sanitizers, lanes of a token, argument checks, and what it says where it cannot."""

from typing import Any

import pytest
import torch

from impl import fused_store, store_modes
from impl.checks import Unsupported
from impl.store_modes import MODES, Mode
from parity.build import host_store
from parity.ops.store import builtin as store_builtin
from parity.ops.store import digests
from parity.ops.store.case import StoreCase
from parity.ops.store.operands import build_store
from parity.run.registry import builtin

CPU = torch.device("cpu")
executed = pytest.mark.skipif(host_store.missing() is not None, reason=f"not executed: {host_store.missing()}")
FP8 = Mode("fp8", "fused")


def case(layout: str, **fields) -> StoreCase:
    return StoreCase(ids=tuple(range(70)), layout=layout, pages=3, gap=48, perm=5, skip=4, weight="bf16", **fields)


@executed
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_sanitizers_find_nothing_and_change_nothing(mode):
    plain, watched = (build_store(case(mode.layout, pooled="bf16", data="octaves")) for _ in range(2))
    host_store.store(mode, **plain.kwargs())
    host_store.store_sanitised(mode, **watched.kwargs())
    assert torch.equal(plain.pool, watched.pool)
    assert not torch.equal(plain.contents(), plain.before)


@executed
@pytest.mark.parametrize("mode", [FP8, Mode("fp4", "published")], ids=lambda mode: mode.name)
def test_bytes_do_not_depend_on_the_lanes_of_a_token(mode):
    built = host_store.build(mode=mode, lanes=0)
    pools = []
    for lanes in (8, 16, 32):
        operands = build_store(case(mode.layout))
        host_store.store(mode, **operands.kwargs(), built=built, lanes=lanes)
        pools.append(operands.pool)
    assert torch.equal(pools[0], pools[1]) and torch.equal(pools[0], pools[2])


@executed
def test_bytes_are_those_recorded():
    found = digests.compute(CPU)
    assert found == digests.known_digests()
    assert sum(map(len, found.values())) == len(MODES) * 7


def test_modes_are_functions_with_contracts():
    assert len(MODES) == 14 == len({mode.name for mode in MODES}) == len({mode.index for mode in MODES})
    for mode in MODES:
        function = getattr(fused_store, mode.name)
        assert function.__name__ == mode.name
        assert function.parity_contract["schedule"] == mode.schedule
        assert function.parity_contract["layout"] == mode.layout
    with pytest.raises(ValueError, match="fake_fp4 must be off"):
        Mode("fp4", "fused", True)
    for bad in ({"format": "fp6", "schedule": "fused"}, {"format": "fp8", "schedule": "loose"}):
        with pytest.raises(ValueError, match="must be one of"):
            Mode(**bad)  # type: ignore[arg-type]


def good() -> dict:
    return build_store(StoreCase(ids=(0, 1, 2), layout="fp8")).kwargs()


BAD = {
    "pooled of half precision": ({"pooled": torch.zeros(3, 128, dtype=torch.float16)}, "pooled must be float32 or bf"),
    "pooled too narrow": ({"pooled": torch.zeros(3, 64)}, r"pooled must have shape \[tokens, 128\]"),
    "pooled strided": ({"pooled": torch.zeros(3, 256)[:, ::2]}, "pooled must be contiguous"),
    "pooled misaligned": ({"pooled": torch.zeros(385)[1:].view(3, 128)}, "pooled must start at a multiple of 16"),
    "pooled no tensor": ({"pooled": [1.0]}, "pooled must be a tensor, got list"),
    "weight too long": ({"norm_weight": torch.zeros(256)}, r"norm_weight must have shape \[128\]"),
    "weight of integers": ({"norm_weight": torch.zeros(128, dtype=torch.int32)}, "norm_weight must be float32 or"),
    "eps zero": ({"eps": 0.0}, "eps must be positive and finite"),
    "eps text": ({"eps": "1e-6"}, "eps must be a float"),
    "positions long": ({"positions": torch.zeros(3, dtype=torch.int64)}, "positions must be int32"),
    "positions short": ({"positions": torch.zeros(2, dtype=torch.int32)}, r"positions must have shape \[3\]"),
    "table narrow": ({"rope_table": torch.zeros(12, 32)}, r"rope_table must have shape \[max_position, 64\]"),
    "table double": ({"rope_table": torch.zeros(12, 64, dtype=torch.float64)}, "rope_table must be float32"),
    "slots int": ({"out_loc": torch.zeros(3, dtype=torch.int32)}, "out_loc must be int64"),
    "slot twice": ({"out_loc": torch.tensor([3, 4, 3])}, "out_loc must not name a slot twice, got slot 3"),
    "slot past the pool": ({"out_loc": torch.tensor([3, 4, 128])}, r"out_loc must be -1 or lie in \[0, 128\), got 128"),
    "slot negative": ({"out_loc": torch.tensor([-2, 4, 5])}, "out_loc must be -1 or lie in"),
    "position past the table": ({"positions": torch.tensor([0, 4, 99], dtype=torch.int32)}, "positions must lie in"),
    "other layout": ({"kv_cache": torch.zeros(2, 64, 1, 68, dtype=torch.uint8)}, "kv_cache must be laid out as fp8"),
    "page stride": (
        {"kv_cache": torch.zeros(2, 64 * 132 + 8, dtype=torch.uint8)[:, : 64 * 132].unflatten(1, (64, 1, 132))},
        "kv_cache must have a page stride",
    ),
    "meta": ({"rope_table": torch.zeros(12, 64, device="meta")}, "rope_table must be on pooled's device cpu"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_wrong_argument_is_one_sentence(name):
    changes: Any
    changes, wanted = BAD[name]
    with pytest.raises((TypeError, ValueError), match=wanted) as caught:
        store_modes.check_store("fp8", **{**good(), **changes}, validate=True)
    assert "\n" not in str(caught.value)


def test_tensors_on_the_cpu_are_refused_by_the_gpu_function():
    with pytest.raises(Unsupported, match="store_fp8_fused needs tensors on a CUDA device"):
        fused_store.store_fp8_fused(**good())


@executed
def test_a_slot_or_position_out_of_range_is_left_out_without_validation():
    operands = build_store(StoreCase(ids=(0, 1, 2), layout="fp8"))
    given = operands.kwargs() | {"out_loc": torch.tensor([1 << 40, 5, 6]), "positions": torch.tensor([0, -1, 1 << 30])}
    given["positions"] = given["positions"].to(torch.int32)
    host_store.store(FP8, **given)
    assert torch.equal(operands.contents(), operands.before)


@pytest.fixture
def without(monkeypatch):
    """Replaces what host_store finds on the machine, and has it look again."""

    def replace(**found):
        for name, value in found.items():
            monkeypatch.setattr(host_store, name, lambda value=value: value)

    host_store.missing.cache_clear()
    yield replace
    host_store.missing.cache_clear()


def test_without_a_compiler_or_headers_the_store_is_not_executed_by_name(without):
    without(compiler=None)
    assert "no C++ compiler" in (host_store.missing() or "")
    found = store_builtin.implementations(CPU)
    assert all("no C++ compiler" in (impl.absent or "") for impl in found.values())
    with pytest.raises(host_store.HostStoreError, match="cannot run on this CPU: no C\\+\\+ compiler"):
        host_store.build()
    host_store.missing.cache_clear()
    without(compiler="/usr/bin/c++", headers=None)
    assert "cuda-toolkit" in (host_store.missing() or "")


@executed
def test_a_source_that_does_not_compile_says_what_the_compiler_said(tmp_path):
    path = tmp_path / "broken.cu"
    path.write_text("this is no kernel\n")
    with pytest.raises(host_store.HostStoreError, match=r"refused broken\.cu: .*error"):
        host_store.build(path)


def test_all_modes_are_built_in():
    found = builtin(CPU)
    assert [name for name, impl in found.items() if impl.op == "store"] == list(store_builtin.NAMES)

"""The dispatch flag: both routes, values it refuses, fallback with one warning a reason, strict mode, late reading."""

import sys
import warnings

import pytest
import torch
from triton.runtime.errors import OutOfResources

from impl import dispatch, launch
from impl.checks import Unsupported
from impl.dispatch import Route, flag, last_route, paged_mqa_logits
from parity.run import interpreter
from parity.selftest.impl_operands import LAYOUTS, operands, ratio

DEVICE = torch.device("cpu" if interpreter.interpreting() else "cuda")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for name in (dispatch.FLAG, dispatch.STRICT_FLAG):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dispatch, "_warned", set())
    monkeypatch.setattr(dispatch, "_last", None)


def given(layout="bf16", heads=8):
    named = operands(layout, [[70]], heads)
    return {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in named.items()}


class Broken:
    """Stands for a kernel that cannot be launched."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, grid):
        raise self.error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_flag_chooses_at_every_call(monkeypatch, layout):
    named = given(layout)
    assert last_route() is None
    for value, route in (("1", "triton"), ("0", "torch"), ("", "torch"), ("1", "triton")):
        monkeypatch.setenv(dispatch.FLAG, value)
        assert ratio(layout, named, paged_mqa_logits(**named, validate=True)) <= 1
        last = last_route()
        assert last is not None and last.name == route
        assert last.kernel == (f"{layout}_paged_mqa_logits" if value == "1" else f"torch_{layout}_paged_mqa_logits")
        assert bool(last.config) == (value == "1")
    monkeypatch.delenv(dispatch.FLAG)
    paged_mqa_logits(**named)
    assert last_route() == Route("torch", f"torch_{layout}_paged_mqa_logits", "TRITON_INDEXER is not 1")


@pytest.mark.parametrize("name", [dispatch.FLAG, dispatch.STRICT_FLAG])
@pytest.mark.parametrize("value", ["2", "yes", "true", " 1"])
def test_unknown_flag_values_are_refused(monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{name} must be 0, 1 or unset, got {value!r}$"):
        paged_mqa_logits(**given())


def test_flag_reads_now(monkeypatch):
    monkeypatch.setenv(dispatch.FLAG, "1")
    assert flag(dispatch.FLAG)
    monkeypatch.setenv(dispatch.FLAG, "0")
    assert not flag(dispatch.FLAG)


FAILURES = [
    (OutOfResources(200000, 101376, "shared memory"), r"kernel decode-bf16-h8-\S+ failed: OutOfResources: .*"),
    (RuntimeError("PassManager::run failed"), r"kernel decode-bf16-h8-\S+ failed to compile: PassManager::run failed"),
]


@pytest.mark.parametrize(("error", "reason"), FAILURES)
def test_a_kernel_that_fails_falls_back_with_one_warning(monkeypatch, error, reason):
    monkeypatch.setenv(dispatch.FLAG, "1")
    monkeypatch.setattr(launch.kernels, "decode", Broken(error))
    named = given()
    with pytest.warns(RuntimeWarning, match=f"^Triton indexer falls back to PyTorch: {reason}$"):
        result = paged_mqa_logits(**named)
    assert ratio("bf16", named, result) <= 1
    route = last_route()
    assert route is not None and route.name == "torch" and route.kernel == "torch_bf16_paged_mqa_logits"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged_mqa_logits(**named)
    monkeypatch.setenv(dispatch.STRICT_FLAG, "1")
    with pytest.raises(Unsupported, match=f"^TRITON_INDEXER_STRICT=1 and the Triton kernel cannot run: {reason}$"):
        paged_mqa_logits(**named)


def test_an_unsupported_shape_falls_back(monkeypatch):
    monkeypatch.setenv(dispatch.FLAG, "1")
    named = given(heads=24)
    with pytest.warns(
        RuntimeWarning, match="falls back to PyTorch: the Triton kernels take 8, 16, 32 or 64 heads, got 24"
    ):
        assert ratio("bf16", named, paged_mqa_logits(**named)) <= 1


def test_no_triton_falls_back(monkeypatch):
    monkeypatch.setenv(dispatch.FLAG, "1")
    monkeypatch.setitem(sys.modules, "impl.launch", None)
    with pytest.warns(RuntimeWarning, match="falls back to PyTorch: triton cannot be imported: .*"):
        paged_mqa_logits(**given())


def test_device_errors_and_mistakes_do_not_fall_back(monkeypatch):
    monkeypatch.setenv(dispatch.FLAG, "1")
    with pytest.raises(TypeError, match="^weights must be float32"):
        paged_mqa_logits(**given() | {"weights": torch.zeros(1, 8, dtype=torch.bfloat16, device=DEVICE)})
    monkeypatch.setattr(launch.kernels, "decode", Broken(RuntimeError("Triton Error [CUDA]: an illegal memory access")))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        paged_mqa_logits(**given())
    assert last_route() is None


def test_fp4_pages_are_refused():
    named = given() | {"kv_cache": torch.zeros(2, 64, 1, 68, dtype=torch.uint8)}
    with pytest.raises(ValueError, match="^kv_cache must be laid out as bf16 or fp8 pages, got fp4$"):
        paged_mqa_logits(**named)

"""The dispatch flag: both routes, values it refuses, fallback with one warning per reason, strict mode."""

import sys
import warnings

import pytest
import torch
from triton.runtime.errors import OutOfResources

from impl import dispatch, launch
from impl.checks import Unsupported
from impl.dispatch import Route, last_route, paged_mqa_logits
from parity.run import interpreter
from parity.selftest.helpers import refuses
from parity.selftest.operands import LAYOUTS, operands, ratio

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
    refuses(ValueError, f"^{name} must be 0, 1 or unset, got {value!r}$", paged_mqa_logits, **given())


@pytest.mark.parametrize(
    ("error", "heads", "reason"),
    [
        (OutOfResources(200000, 101376, "shared memory"), 8, r"kernel decode-bf16-h8-\S+ failed: OutOfResources: .*"),
        (RuntimeError("PassManager::run failed"), 8, r"kernel \S+ failed to compile: PassManager::run failed"),
        (None, 24, "the Triton kernels take 8, 16, 32 or 64 heads, got 24"),
        (ImportError, 8, "triton cannot be imported: .*"),
    ],
    ids=["resources", "compiler", "shape", "no triton"],
)
def test_a_kernel_that_fails_falls_back_with_one_warning(monkeypatch, error, heads, reason):
    monkeypatch.setenv(dispatch.FLAG, "1")
    if error is ImportError:
        monkeypatch.setitem(sys.modules, "impl.launch", None)
    elif error:
        monkeypatch.setattr(launch.kernels, "decode", Broken(error))
    named = given(heads=heads)
    with pytest.warns(RuntimeWarning, match=f"^Triton indexer falls back to PyTorch: {reason}$"):
        result = paged_mqa_logits(**named)
    assert ratio("bf16", named, result) <= 1
    route = last_route()
    assert route is not None and route.name == "torch" and route.kernel == "torch_bf16_paged_mqa_logits"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paged_mqa_logits(**named)
    monkeypatch.setenv(dispatch.STRICT_FLAG, "1")
    sentence = f"^TRITON_INDEXER_STRICT=1 and the Triton kernel cannot run: {reason}$"
    refuses(Unsupported, sentence, paged_mqa_logits, **named)


def test_device_errors_and_mistakes_do_not_fall_back(monkeypatch):
    monkeypatch.setenv(dispatch.FLAG, "1")
    wrong = {"weights": torch.zeros(1, 8, dtype=torch.bfloat16, device=DEVICE)}
    refuses(TypeError, "^weights must be float32", paged_mqa_logits, **given() | wrong)
    monkeypatch.setattr(launch.kernels, "decode", Broken(RuntimeError("Triton Error [CUDA]: an illegal memory access")))
    refuses(RuntimeError, "illegal memory access", paged_mqa_logits, **given())
    assert last_route() is None


def test_fp4_pages_are_refused():
    fp4 = {"kv_cache": torch.zeros(2, 64, 1, 68, dtype=torch.uint8)}
    sentence = "^kv_cache must be laid out as bf16 or fp8 pages, got fp4$"
    refuses(ValueError, sentence, paged_mqa_logits, **given() | fp4)

"""Corrections of Triton's interpreter, address checks and dry launches, on small kernels."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
import torch

from parity.run import interpreter
from parity.selftest.helpers import seeded

pytest.importorskip("triton")
import triton
import triton.language as tl

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")


@triton.jit
def _dot(a, b, out, N: tl.constexpr):
    i, j = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    tl.store(out + i * N + j, tl.dot(tl.load(a + i * N + j), tl.load(b + i * N + j)))


@triton.jit
def _add(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i) + tl.load(b + i))


@triton.jit
def _cast(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i).to(out.dtype.element_ty))


@triton.jit
def _less(a, b, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.where(tl.load(a + i) < tl.load(b + i), 1.0, 0.0))


@triton.jit
def _read(a, out, offset, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i + tl.program_id(0) * 0, tl.load(a + i + offset))


@triton.jit
def _masked(a, out, size, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i * 1000, mask=i < size, other=0.0), mask=i < size)


@triton.jit
def _times(a, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(a + i) * 65536)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


def run(kernel, *operands, dtype=torch.float32):
    """The result of a kernel on operands of one shape, by the corrected interpreter."""
    out = torch.empty(operands[0].shape, dtype=dtype)
    with interpreter.corrected():
        kernel[(1,)](*operands, out, len(out))
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_dots_of_small_formats_are_correct_when_corrected(dtype):
    a, b = drawn(16, 16).to(dtype), drawn(16, 16, seed=1).to(dtype)
    torch.testing.assert_close(run(_dot, a, b), a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_the_defect_is_there_without_the_correction():
    """The correction is dead weight once triton multiplies bf16 values itself: this test then says so."""
    a = drawn(16, 16).bfloat16()
    out = torch.empty(16, 16)
    _dot[(1,)](a, a, out, 16)
    assert not torch.allclose(out, a.float() @ a.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("depth", [16, 32, 128, 576])
def test_the_order_of_a_dot_does_not_depend_on_its_tile(depth):
    """numpy.matmul fails here at the first column that is computed alone."""
    rng = np.random.default_rng(depth)
    a, b = (rng.standard_normal((count, depth)).astype(np.float32) for count in (128, 96))
    whole = interpreter.ordered_product(a, b.T, np.float32)
    assert np.allclose(whole, a.astype(np.float64) @ b.T.astype(np.float64), rtol=1e-4, atol=1e-4)
    for rows, columns in itertools.product((1, 2, 3, 16, 33, 64, 128), (1, 2, 7, 8, 24, 96)):
        for first in (0, 5, 96 - columns):
            part = interpreter.ordered_product(a[:rows], b[first : first + columns].T, np.float32)
            assert np.array_equal(part, whole[:rows, first : first + columns]), (rows, columns, first)
    stacked = interpreter.ordered_product(np.stack([a, a[::-1]]), np.stack([b.T, b.T]), np.float32)
    assert np.array_equal(stacked[0], whole) and np.array_equal(stacked[1], whole[::-1])


def test_bf16_sums_round_to_nearest_and_comparisons_see_values():
    a, b = drawn(64).bfloat16(), drawn(64, seed=1).bfloat16()
    assert torch.equal(run(_add, a, b, dtype=torch.bfloat16), a + b)
    assert torch.equal(run(_less, a, b), (a < b).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_narrowing_is_to_nearest_and_saturates(dtype):
    top = torch.finfo(dtype).max if dtype != torch.bfloat16 else 3e38
    a = torch.cat([drawn(60) * 100, torch.tensor([0.0, -0.0, 1e-9, 0.4])]).clamp(-top, top)
    assert torch.equal(run(_cast, a, dtype=dtype).float(), a.to(dtype).float())


@pytest.mark.parametrize(
    "bits, dtype",
    [(torch.arange(-(2**15), 2**15).to(torch.int16), torch.bfloat16), (torch.arange(256).byte(), torch.float8_e4m3fn)],
    ids=["bf16", "e4m3"],
)
def test_widening_is_exact_for_every_pattern(bits, dtype):
    a = bits.view(dtype)
    torch.testing.assert_close(run(_cast, a), a.float(), rtol=0, atol=0, equal_nan=True)


def test_round_bf16_keeps_nan_and_infinity():
    given = np.array([np.nan, np.inf, -np.inf, 3.4e38, 1.0], dtype=np.float32)
    wanted = torch.from_numpy(given).bfloat16().view(torch.int16).numpy().view(np.uint16)
    got = interpreter.round_bf16(given)
    assert np.isnan(interpreter.widen_bf16(got)[0]) and (got[1:] == wanted[1:]).all()


def test_corrections_end_with_the_block():
    from triton.runtime import interpreter as module

    builder = type(module.interpreter_builder)
    before = builder.create_dot, builder.cast_impl, builder.create_masked_load, module._patch_lang
    with interpreter.corrected(), interpreter.watched():
        assert builder.create_dot is not before[0]
    assert before == (builder.create_dot, builder.cast_impl, builder.create_masked_load, module._patch_lang)


@pytest.mark.parametrize("offset", [1, -1, 1 << 20, -(1 << 20)])
def test_an_address_outside_every_tensor_is_refused(offset):
    a, out = drawn(16), torch.empty(16)
    with pytest.raises(Exception, match="outside every tensor") as caught, interpreter.watched():
        _read[(1,)](a, out, offset, 16)
    assert isinstance(interpreter.cause(caught.value), interpreter.OutOfBounds)


def test_masked_addresses_may_be_anywhere():
    a, out = drawn(1), torch.zeros(16)
    with interpreter.watched() as watch:
        _masked[(1,)](a, out, 1, 16)
    assert out[0] == a[0] and (watch.loads, watch.stores) == (1, 1)


def test_a_view_may_be_read_within_its_storage():
    a, out = drawn(64), torch.empty(16)
    with interpreter.watched():
        _read[(1,)](a[16:32], out, 16, 16)
    assert torch.equal(out, a[32:48])


def test_a_dry_launch_writes_nothing_and_shows_its_grid():
    a, out = drawn(16), torch.full((16,), 5.0)
    with interpreter.watched(dry=True) as watch:
        _read[(3, 70_000)](a, out, 0, 16)
    assert bool((out == 5).all())
    assert watch.launches[0].grid == (3, 70_000, 1)
    assert "grid y is 70000" in (watch.launches[0].excess() or "")
    with interpreter.watched() as watch:
        _read[(2,)](a, out, 0, 16)
    assert watch.launches[0].excess() is None and torch.equal(out, a)


@pytest.mark.parametrize("debug", [False, True])
def test_integers_wrap_as_on_a_gpu_unless_debugging_asserts(debug, monkeypatch):
    """What is left out while watching is only the check, and only where nothing would have come of it."""
    module = interpreter._interpreter()
    options = dataclasses.replace(module.interpreter_builder.options, debug=debug)
    monkeypatch.setattr(module.interpreter_builder, "options", options)
    a, out = torch.full((4,), 65536 + 3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    expected = pytest.raises(module.InterpreterError) if debug else contextlib.nullcontext()
    with interpreter.watched(), expected:
        _times[(1,)](a, out, 4)
    assert out.tolist() == ([0] * 4 if debug else [3 * 65536] * 4)
    assert module.interpreter_builder.options is options


@pytest.mark.parametrize("kind", ["int1", "int8", "uint8", "int64", "bfloat16", "float8e4nv", "float32", "float64"])
def test_dtypes_of_numpy_are_the_interpreters_own(kind):
    module, scalar = interpreter._interpreter(), getattr(tl, kind)
    kinds = [scalar, tl.pointer_type(scalar), tl.block_type(scalar, [4]), tl.block_type(tl.pointer_type(scalar), [4])]
    before = [module._get_np_dtype(each) for each in kinds]
    with interpreter.watched():
        assert [module._get_np_dtype(each) for each in kinds] == before


def test_prepare_respects_the_environment(monkeypatch):
    for value, interprets in (("0", False), ("1", True)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert interpreter.prepare("cpu") is interprets

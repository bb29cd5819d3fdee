"""The dot arithmetics: recorded tensor-core dots to the bit, and bounds that no order of summation passes."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file

from parity.numerics import arithmetic
from parity.numerics.arithmetic import IEEE, Grouped, named_model, stored_models
from parity.selftest.helpers import ROOT, refuses, seeded

RECORDED = ROOT / "fixtures" / "recorded_dots"
E4M3 = torch.float8_e4m3fn
SERIES = [("bf16", "o", "sm_90 bf16"), ("fp8", "o-1", "sm_90 e4m3"), ("fp8", "o32", "sm_90 e4m3 imprecise 32")]
MODELS = [named_model(name).arithmetic for _, _, name in SERIES]


def recorded(operand: str, series: str) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(q, k, o) of every distribution."""
    tensors = load_file(RECORDED / f"h200_{operand}_dots.safetensors")
    names = sorted({key.split(".")[0] for key in tensors})
    return [(tensors[f"{n}.q"], tensors[f"{n}.k"], tensors[f"{n}.{series}"]) for n in names]


def dtype_of(model: Grouped) -> torch.dtype:
    return E4M3 if model.kept == 13 else torch.bfloat16


def vectors(*terms: tuple[int, float, float], dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k, [1, 128], with the terms (dim, q, k) and zeros elsewhere."""
    pair = torch.zeros(2, 1, 128)
    for dim, *values in terms:
        pair[:, 0, dim] = torch.tensor(values)
    q, k = pair.to(dtype)
    return q, k


def differing(model: Grouped, operand: str, series: str) -> int:
    return sum(int((model.exact_dot(q, k) != o).sum()) for q, k, o in recorded(operand, series))


def exact_sums(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k = q.float().double(), k.float().double()
    return q @ k.mT, q.abs() @ k.abs().mT


def within_bounds(model: Grouped, got: torch.Tensor, q: torch.Tensor, k: torch.Tensor, known: bool = True) -> bool:
    """Whether the dots `got` of q and k lie inside the model's bound, of its order of summation or of any order."""
    dot, absdot = exact_sums(q, k)
    bound = dataclasses.replace(model, known_order=known).dot_bound(q, k, dot, absdot)
    return bool(((got.double() - dot).abs() <= bound).all())


def draw(kind: str, dtype: torch.dtype, g: torch.Generator, shape: tuple[int, ...]) -> torch.Tensor:
    """Operands of one dtype; "edges" mixes magnitudes just above and below powers of two with large leaders."""
    x = torch.randn(shape, generator=g)
    if kind == "octaves":
        x = x * torch.exp2(torch.randint(-6, 7, shape, generator=g).float())
    if kind == "positive":
        x = x.abs()
    if kind == "edges":
        significand = torch.tensor([1.0, 1.125, 1.25, 1.5, 1.75, 1.875])[torch.randint(0, 6, shape, generator=g)]
        x = significand * torch.exp2(torch.randint(-6, 1, shape, generator=g).float()) * x.sign()
        x[..., :3] *= 32
    if kind == "sparse":
        x = x * (torch.rand(shape, generator=g) < 0.1)
    return x.clamp(-448, 448).to(dtype)


def test_fixture_is_what_its_index_says():
    index = json.loads((RECORDED / "index.json").read_text(encoding="utf-8"))
    for name, entry in index["files"].items():
        assert hashlib.sha256((RECORDED / name).read_bytes()).hexdigest() == entry["sha256"]
    assert sum(entry["dots"] for entry in index["files"].values()) == 106_496
    assert sum((RECORDED / name).stat().st_size for name in index["files"]) < 2_000_000


@pytest.mark.parametrize("operand, series, name", SERIES)
def test_stored_model_reproduces_the_recorded_dots(operand, series, name):
    assert differing(named_model(name).arithmetic, operand, series) == 0


@pytest.mark.parametrize("operand, series, name", SERIES)
@pytest.mark.parametrize(
    "key, value",
    [
        *((name, step) for name in ("group", "kept", "final") for step in (-1, 1)),
        *(("running", None), ("product_exponent", "product"), ("cut", "down"), ("rounding", "down")),
        ("rounding", "nearest"),
    ],
)
def test_every_parameter_moved_is_caught(operand, series, name, key, value):
    model = named_model(name).arithmetic
    old = getattr(model, key)
    new = not old if value is None else old + value if type(value) is int else value
    moved = dataclasses.replace(model, **{key: new})  # type: ignore[arg-type]
    assert differing(moved, operand, series) > 1000


@pytest.mark.parametrize("operand, series, name", SERIES)
def test_recorded_dots_stay_inside_the_bounds(operand, series, name):
    model = named_model(name).arithmetic
    for q, k, o in recorded(operand, series):
        assert within_bounds(model, o, q, k) and within_bounds(model, o, q, k, known=False)


def slow_dot(model: Grouped, q: list[Fraction], k: list[Fraction], smallest: int) -> Fraction:
    """The rule once more, in rational arithmetic and plain loops, for one dot; operands are normal from 2**smallest."""

    def exponent(x: Fraction) -> int:
        e = 0
        while abs(x) >= Fraction(2) ** (e + 1):
            e += 1
        while abs(x) < Fraction(2) ** e:
            e -= 1
        return e

    def cut(x: Fraction, unit: Fraction, how: str) -> Fraction:
        if how == "nearest":
            return round(x / unit) * unit
        whole = math.floor(x / unit) if how == "down" or x > 0 else math.ceil(x / unit)
        return whole * unit

    total = Fraction(0)
    for start in range(0, len(q), model.group):
        group = slice(start, start + model.group)
        pairs = [(a, b) for a, b in zip(q[group], k[group], strict=True) if a * b]
        if model.product_exponent == "operands":
            exponents = [max(smallest, exponent(a)) + max(smallest, exponent(b)) for a, b in pairs]
        else:
            exponents = [exponent(a * b) for a, b in pairs]
        addends = [a * b for a, b in pairs]
        if model.running and total:
            exponents.append(exponent(total))
            addends.append(total)
        if not addends:
            continue
        unit = Fraction(2) ** (max(exponents) - model.kept)
        group_sum = sum((cut(x, unit, model.cut) for x in addends), Fraction(0))
        if group_sum:
            group_sum = cut(group_sum, Fraction(2) ** (exponent(group_sum) - model.final), model.rounding)
        if model.running:
            total = group_sum
        else:
            total = Fraction(float(torch.tensor(float(total)) + torch.tensor(float(group_sum))))
    return total


@pytest.mark.parametrize(
    "model",
    [
        Grouped(32, 13, 13),
        Grouped(16, 25, 23),
        Grouped(32, 13, 13, running=False),
        Grouped(8, 24, 23, cut="down", rounding="nearest"),
        Grouped(4, 10, 12, product_exponent="product", rounding="down"),
        Grouped(5, 3, 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gauss", "octaves", "edges", "sparse"])
def test_vectorised_model_equals_rational_arithmetic(model, kind):
    g, dtype = seeded(3), dtype_of(model)
    q, k = draw(kind, dtype, g, (4, 37)), draw(kind, dtype, g, (6, 37))
    got = model.exact_dot(q, k)
    rows, columns = ([[Fraction(v) for v in row] for row in x.float().tolist()] for x in (q, k))
    for i, j in itertools.product(range(4), range(6)):
        assert Fraction(float(got[i, j])) == slow_dot(model, rows[i], columns[j], -6 if dtype == E4M3 else -126)


@pytest.mark.parametrize("kind", ["gauss", "octaves", "positive", "edges", "sparse"])
@pytest.mark.parametrize(
    "model",
    [
        *MODELS,
        Grouped(8, 12, 12, cut="down", rounding="down"),
        Grouped(16, 9, 7, rounding="nearest"),
        Grouped(4, 24, 23),
    ],
    ids=str,
)
def test_grouped_bounds_hold(model, kind):
    g, dtype = seeded(17), torch.bfloat16 if model.kept >= 24 else E4M3
    q, k = draw(kind, dtype, g, (3, 32, 128)), draw(kind, dtype, g, (3, 48, 128))
    assert within_bounds(model, model.exact_dot(q, k), q, k)
    # The order-free bound must hold for any assignment of terms to groups.
    for _ in range(4):
        order = torch.randperm(128, generator=g)
        assert within_bounds(model, model.exact_dot(q[..., order], k[..., order]), q, k, known=False)


def test_known_order_bound_is_nearly_attained():
    """One large term first and equal small ones that lose all they can: the error is most of the bound."""
    model = Grouped(32, 13, 13)
    q, k = torch.full((1, 128), 1.875 * 2.0**-3), torch.full((1, 128), 1.875 * 2.0**-4)
    q[0, 0], k[0, 0] = 256.0, 1.0  # addends are cut below 2**(8 - 13); the others are 0.88 of that
    q, k = q.to(E4M3), k.to(E4M3)
    dot, absdot = exact_sums(q, k)
    ratio = (model.exact_dot(q, k).to(torch.float64) - dot).abs() / model.dot_bound(q, k, dot, absdot)
    assert 0.5 < float(ratio) <= 1.0


@pytest.mark.parametrize("model", [IEEE, *MODELS], ids=str)
def test_sums_within_bits_are_exact_and_one_more_bit_is_not(model):
    g, dtype = seeded(5), torch.float32 if model is IEEE else dtype_of(model)
    for _ in range(20):
        q, k = (torch.randint(-2, 3, (16, 128), generator=g).float() for _ in range(2))
        q[:, 7] = k[:, 7] = 2.0 ** ((model.bits() - 2) // 2)
        q[:, 8] = 0
        dot, absdot = exact_sums(q, k)
        assert float(absdot.max()) <= 2.0 ** model.bits()
        if isinstance(model, Grouped):
            assert torch.equal(model.exact_dot(q.to(dtype), k.to(dtype)).double(), dot)
    # 2**bits + 1, the leader before the one: the one is lost.
    half = model.bits() // 2
    if isinstance(model, Grouped):
        q, k = vectors((0, 2.0**half, 2.0 ** (model.bits() - half)), (1, 1.0, 1.0), dtype=dtype)
        assert float(model.exact_dot(q, k)) == 2.0 ** model.bits()


@pytest.mark.parametrize("how", ["minimum", "normalised", "minimum, zeros too"])
def test_bounds_hold_where_subnormals_lead_a_group(how):
    g = seeded(8)
    q, k = torch.zeros(64, 128), torch.zeros(64, 128)
    q[:, ::3] = 2.0**-9 * torch.randint(-7, 8, (64, 43), generator=g)  # subnormal e4m3
    k[:, ::3] = 2.0**-1 * torch.randint(-15, 16, (64, 43), generator=g)
    q[:, 1::3] = 2.0**-6 * torch.randint(-15, 16, (64, 43), generator=g) / 8
    k[:, 1::3] = 2.0**-5 * torch.randint(-15, 16, (64, 43), generator=g) / 8
    k[:, 2::3] = 448.0  # times zero
    q, k = q.to(E4M3), k.to(E4M3)
    for running, known in itertools.product((True, False), repeat=2):
        model = Grouped(32, 7, 7, subnormals=how, running=running)
        assert within_bounds(model, model.exact_dot(q, k), q, k, known)


def test_tiny_operands_and_zeros():
    model = Grouped(16, 25, 23)
    tiny = torch.full((1, 128), 2.0**-133, dtype=torch.bfloat16)  # smallest bf16 subnormal
    one = torch.ones(1, 128, dtype=torch.bfloat16)
    assert float(model.exact_dot(tiny, one)) == 128 * 2.0**-133
    assert float(model.exact_dot(tiny, tiny)) == 0.0
    zero = model.exact_dot(torch.zeros(1, 128, dtype=torch.bfloat16), -one)
    assert float(zero) == 0.0 and math.copysign(1.0, float(zero)) == 1.0


def test_subnormal_exponents_can_be_distinguished():
    """A subnormal times a large factor leads a group: the three readings cut the small terms differently."""
    small = [(dim, 2.0**-9 * 7, 2.0**-6 * 1.125) for dim in (1, 2)]
    # e4m3's smallest subnormal: product 0.5, exponents -9 + 8 or -6 + 8; or zero in its place.
    for leader, readings in ((2.0**-9, ("normalised", "minimum")), (0.0, ("minimum", "minimum, zeros too"))):
        q, k = vectors((0, leader, 256.0), *small)
        assert len({float(Grouped(32, 13, 13, subnormals=how).exact_dot(q, k)) for how in readings}) == 2


@pytest.mark.parametrize("model", [Grouped(16, 25, 23), Grouped(16, 25, 23, running=False)], ids=str)
def test_nonfinite_operands_end_as_ieee_addition_does(model):
    inf, nan = math.inf, math.nan
    rows = [
        ([inf, 1.0], [1.0, 1.0], inf),
        ([inf, 1.0], [-1.0, 1.0], -inf),
        ([inf, -inf], [1.0, 1.0], nan),
        ([inf, 1.0], [0.0, 1.0], nan),
        ([nan, 1.0], [0.0, 1.0], nan),
        ([1.0, 1.0], [1.0, nan], nan),
        ([3.0, 1.0], [1.0, 2.0], 5.0),
    ]
    for q, k, wanted in rows:
        got = float(model.exact_dot(torch.tensor([q]).bfloat16(), torch.tensor([k]).bfloat16()))
        assert math.isnan(got) if math.isnan(wanted) else got == wanted
    both = torch.tensor([[inf, 0.0], [1.0, 2.0]], dtype=torch.float64)
    assert arithmetic.nonfinite_dot(both, torch.tensor([[1.0, 3.0]], dtype=torch.float64)).flatten().tolist() == [
        inf,
        0.0,
    ]


def test_overflow_becomes_infinite():
    big = torch.full((1, 128), 2.0**120, dtype=torch.bfloat16)
    assert float(Grouped(16, 25, 23).exact_dot(big, big)) == math.inf


def test_units():
    units = arithmetic.unit_roundoff(torch.bfloat16), arithmetic.unit_roundoff(torch.float16, "truncate")
    assert units == (2.0**-8, 2.0**-10)
    assert [arithmetic.underflow_unit(dtype) for dtype in (torch.bfloat16, torch.float16)] == [2.0**-134, 2.0**-25]


def test_mistakes_are_one_sentence():
    refuses(ValueError, "no bound exists for 300 roundings", arithmetic.gamma, 300, 2.0**-8)
    refuses(ValueError, "^group must be an integer from 1 to 1024, got 0$", Grouped, 0, 25, 23)
    refuses(ValueError, "^kept must be an integer from 1 to 40, got True$", Grouped, 16, True, 23)
    refuses(ValueError, "^cut must be one of zero, down, got 'up'$", Grouped, 16, 25, 23, cut="up")
    refuses(ValueError, "no arithmetic model is named 'sm_1'", named_model, "sm_1")


def test_stored_models_carry_provenance():
    assert [model.name for model in stored_models() if not model.hypothesis] == [
        *(name for _, _, name in SERIES),
        *("sm_90 fp16", "sm_90 tf32"),
    ]
    assert all(model.provenance for model in stored_models())


def test_the_documentation_has_a_worked_example_and_every_measured_model():
    """docs/arithmetic.md computes this dot by hand."""
    small = 2.0**-6
    q, k = vectors((0, 1.5, 1.5), (1, small, small * 1.25), (2, -small, small * 1.75), (32, 16.0, 2.0))
    assert float(exact_sums(q, k)[0]) == 34.2498779296875
    assert float(Grouped(32, 13, 13).exact_dot(q, k)) == 34.24609375
    text = (ROOT / "docs" / "arithmetic.md").read_text(encoding="utf-8")
    assert "34.2498779296875" in text and "34.24609375" in text and "2.249755859375" in text
    for found in (model.arithmetic for model in stored_models() if not model.hypothesis):
        assert f"grouped({found.group}, {found.kept}, {found.final})" in text

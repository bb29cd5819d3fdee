"""Head sums to the bit: the fused multiply-add, the trees, the record, and the order read off compiled kernels."""

import math
from fractions import Fraction

import pytest
import torch

from parity.numerics.headsum import HeadSum, fma, predicted_logits, recorded_order
from parity.selftest.helpers import python, refusals, refuses, seeded
from parity.selftest.operands import make_operands
from parity.selftest.simulated_gpu import RULE, order_for
from parity.tensorcore.headorder import read_order


def rounded(x: Fraction) -> float:
    """To float32, nearest even, by whole numbers only."""
    if x == 0:
        return 0.0
    size = abs(x)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** max(exponent - 23, -149)
    value = float(round(size / unit) * unit)  # round() of a Fraction goes to even
    return math.copysign(math.inf if value >= 2.0**128 else value, x)


def hard_triples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b, c whose a * b + c cancels, lies close to the middle of two floats, or is subnormal."""
    g = seeded(0)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=g).float()

    a, b = (1 + integers(0, 4096, 1500) * 2.0**-12 for _ in range(2))
    c = integers(-4, 5, 1500) * 2.0**-60  # the product of 24 bits or more decides, or these little ones at a tie
    x, y = torch.randn(1000, generator=g), torch.randn(1000, generator=g)
    z = (-(x.double() * y.double()) * (1 + torch.exp2(-integers(1, 60, 1000).double()))).float()
    tiny = torch.randn(500, generator=g) * 2.0**-70
    return torch.cat([a, x, tiny]), torch.cat([b, y, tiny.flip(0)]), torch.cat([c, z, integers(-9, 9, 500) * 2.0**-149])


def test_fma_rounds_once():
    a, b, c = hard_triples()
    triples = zip(*(map(Fraction, x.tolist()) for x in (a, b, c)), strict=True)
    wanted = torch.tensor([rounded(x * y + z) for x, y, z in triples])
    assert torch.equal(fma(a, b, c), wanted)
    # The nearest wrong answers: float64 rounded again to float32, and the product rounded first.
    assert 10 < int(((a.double() * b.double() + c.double()).float() != wanted).sum()) < 1000
    assert int((a * b + c != wanted).sum()) > 200


def test_fma_at_the_ends():
    inf, nan = math.inf, math.nan
    x = torch.tensor([inf, inf, nan, 0.0, -0.0, 3e38, 2.0])
    y = torch.tensor([1.0, 1.0, 0.0, inf, 1.0, 2.0, -1.0])
    z = torch.tensor([1.0, -inf, 1.0, 1.0, -0.0, 0.0, 2.0])
    assert [str(value) for value in fma(x, y, z).tolist()] == ["inf", "nan", "nan", "nan", "-0.0", "inf", "0.0"]


def test_a_tree_is_evaluated_as_it_reads():
    g = seeded(1)
    dot, w, s = torch.randn(3, 4, 200, generator=g), torch.randn(3, 4, generator=g), torch.rand(3, 200, generator=g)
    relu = dot.clamp_min(0.0)

    def product(h):
        return relu[:, h] * w[:, h, None]

    def onto(h, t):
        return fma(relu[:, h], w[:, h, None].expand_as(t), t)

    wanted = (onto(0, product(1)) + onto(2, product(3))) * s
    assert torch.equal(HeadSum("(1.0+3.2)").evaluate(dot, w, s), wanted)
    plain = (product(0) + product(1)) + (product(2) + product(3))
    assert torch.equal(HeadSum("((0+1)+(2+3))").evaluate(dot, w), plain)
    assert HeadSum("((0+1)+(2+3))").heads == 4 and HeadSum("3.1.0.2").order == (3, 1, 0, 2)


@pytest.mark.parametrize(
    ("other", "least"), [("((0.1+5.4)+(3.2+7.6))", 1), ("((1.0+3.2)+(5.4+7.6))", 20), ("1.0.3.2.5.4.7.6", 20)]
)
def test_another_order_has_other_bits(other, least):
    """The fused pair swapped, the lanes exchanged in the other sequence, one chain."""
    operands = make_operands("fp8", ((130,), (70,)), seed=3)
    right = predicted_logits(operands, "fp8", RULE, order_for(8)).logits
    wrong = predicted_logits(operands, "fp8", RULE, HeadSum(other)).logits
    differ = (right != wrong) & right.isfinite()
    assert least <= int(differ.sum()) < 200  # of 200 visible logits
    assert torch.allclose(right[differ], wrong[differ], rtol=1e-3, atol=1e-3)


test_nonsense_is_refused = refusals(
    {
        "head sum: every head must occur once, from 0 on, got '0.1.1'": lambda: HeadSum("0.1.1"),
        "head sum: every head must occur once, from 0 on, got '1.2'": lambda: HeadSum("1.2"),
        r"head sum: .*expected '\)'": lambda: HeadSum("(0+1"),
        r"head sum: .*expected '\+'": lambda: HeadSum("(0.1)"),
        "head sum: .*is left over": lambda: HeadSum("0+1"),
        "head sum: .*expected a head": lambda: HeadSum("x"),
        "dot: expected 2 heads, got 3": lambda: HeadSum("0.1").evaluate(torch.zeros(1, 3, 4), torch.zeros(1, 2)),
    }
)


def test_weights_are_float32():
    weights = torch.zeros(1, 2, dtype=torch.float64)
    refuses(TypeError, "weights: expected float32", HeadSum("0.1").evaluate, torch.zeros(1, 2, 4), weights)


DECODE, PREFILL = "decode-fp8-h64-b64-r1-w4-s2", "prefill-fp8-h64-b128-r1-w4-s3"


@pytest.mark.parametrize(
    "triton, fused, kernel, name",
    [
        *((triton, True, DECODE, "chain 64") for triton in ("3.6.0", "3.7.1", "3.6.0+git1")),
        ("3.9.0", True, DECODE, "pairs 64"),
        ("3.9.0", False, PREFILL, ""),
    ],
)
def test_the_record(triton, fused, kernel, name):
    found = recorded_order("sm_90", triton, fused, kernel, 64)
    assert not isinstance(found, str) and name in found.name and found.order.heads == 64


def test_what_is_not_on_record_says_why():
    sentence = f"triton 3.9.0 does not add all logits of {PREFILL} in one order"
    assert recorded_order("sm_90", "3.9.0", True, PREFILL, 64) == sentence
    sentence = "no order of the head sum is on record for sm_100, triton 3.6.0, 64 heads"
    assert recorded_order("sm_100", "3.6.0", True, "", 64) == sentence
    assert "triton 4.0.0 with fusion off" in str(recorded_order("sm_90", "4.0.0", False, "", 64))


PTX = """
 wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%d0,%d1,%d2,%d3}, %rd1, %rd2, 0, 1, 1;
 max.NaN.f32 %a0, %d0, 0f00000000;
 max.NaN.f32 %a1, %d1, 0f00000000;
 max.NaN.f32 %a2, %d2, 0f00000000;
 max.NaN.f32 %a3, %d3, 0f00000000;
 mul.f32 %p0, %a1, %w1;
 mul.f32 %p1, %a3, %w1;
 fma.rn.f32 %q0, %a0, %w0, %p0;
 fma.rn.f32 %q1, %w0, %a2, %p1;
 shfl.sync.bfly.b32 %x0, %q0, 2, 31, -1;
 add.f32 %s0, %q0, %x0;
 shfl.sync.bfly.b32 %y0, %s0, 1, 31, -1;
 add.f32 %t0, %s0, %y0;
 shfl.sync.bfly.b32 %x1, %q1, 2, 31, -1;
 add.f32 %s1, %q1, %x1;
 shfl.sync.bfly.b32 %y1, %s1, 1, 31, -1;
 add.f32 %t1, %s1, %y1;
 mul.f32 %u0, %t0, %k0;
 mul.f32 %u1, %k1, %t1;
 selp.b32 %v0, %u0, 0fFF800000, %c0;
 selp.b32 %v1, %u1, 0fFF800000, %c1;
"""


def test_the_order_is_read_off_ptx():
    assert str(read_order(PTX, 8)) == "((1.0+5.4)+(3.2+7.6))"
    # As a compiler without fusion writes it.
    plain = PTX.replace("fma.rn.f32 %q0, %a0, %w0, %p0", "mul.f32 %m0, %a0, %w0;\n add.f32 %q0, %m0, %p0")
    plain = plain.replace("fma.rn.f32 %q1, %w0, %a2, %p1", "mul.f32 %m1, %a2, %w0;\n add.f32 %q1, %m1, %p1")
    assert str(read_order(plain, 8)) == "(((0+1)+(4+5))+((2+3)+(6+7)))"
    lanes = PTX.replace(" 2, 31", " 9, 31").replace(" 1, 31", " 2, 31").replace(" 9, 31", " 1, 31")
    assert str(read_order(lanes, 8)) == "((1.0+3.2)+(5.4+7.6))"


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("%p1, %a3, %w1", "%p1, %a2, %w0", "head sum: every head must occur once"),
        ("fma.rn.f32 %q1, %w0, %a2, %p1", "fma.rn.f32 %q1, %a2, %w1, %p1", "multiplied by two weights"),
        ("fma.rn.f32 %q1, %w0, %a2, %p1", "fma.rn.f32 %q1, %a0, %w0, %p1", "adds heads of 2 logits"),
        ("shfl.sync.bfly.b32 %x0, %q0, 2", "shfl.sync.bfly.b32 %x0, %q0, 1", "head sum: every head must occur once"),
        ("wgmma", "mma", "no sum of wgmma accumulators"),
    ],
)
def test_a_wrong_sum_is_not_read_as_a_correct_one(old, new, sentence):
    assert old in PTX
    refuses(ValueError, sentence, read_order, PTX.replace(old, new), 8)


def test_two_orders_in_one_kernel_are_reported():
    mixed = PTX.replace("mul.f32 %p1, %a3, %w1", "mul.f32 %p1, %a2, %w0")
    mixed = mixed.replace("fma.rn.f32 %q1, %w0, %a2, %p1", "fma.rn.f32 %q1, %a3, %w1, %p1")
    refuses(ValueError, r"in 2 orders: 4 of \(\(1.0\+5.4\).*; 4 of \(\(0.1\+4.5\)", read_order, mixed, 8)


CHILD = """
import triton
from triton.backends.compiler import GPUTarget
from impl import configs
from parity.numerics.headsum import recorded_order
from parity.build.triton_child import source
from parity.tensorcore.headorder import compiler, read_order
for config in configs.configurations(90, "fp8", 16):
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": configs.fused()}
    built = triton.compile(source(config), target=GPUTarget("cuda", 90, 32), options=options)
    found = recorded_order("sm_90", *compiler(), str(config), 16)
    try:
        order = str(read_order(built.asm["ptx"], 16))
    except ValueError as error:
        order = str(error)
    print(config, "|", order, "|", found if isinstance(found, str) else found.order)
"""


def test_todays_compiler_follows_the_record():
    """Compiles three kernels for sm_90, no GPU needed."""
    pytest.importorskip("triton")
    lines = [line.split(" | ") for line in python(CHILD).splitlines() if " | " in line]
    assert len(lines) == 3
    for name, read, recorded in lines:
        if recorded.startswith("no order"):
            pytest.skip(recorded)
        # One order in every kernel: what makes a row's bits independent of its batch.
        assert read == recorded, name

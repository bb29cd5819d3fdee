"""The float64 evaluation against integers, rationals and the definitions, written out once more."""

from fractions import Fraction

import pytest
import torch
from torch import zeros

from parity.selftest.helpers import refusals, refuses, seeded
from reference import exact, formats, rope
from reference.config import TINY


def integers(*shape: int, seed: int, low: int = -8, high: int = 9) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=seeded(seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn])
def test_dots_and_logits_on_integers(dtype: torch.dtype) -> None:
    q, k, w = integers(3, 8, 128, seed=0), integers(5, 128, seed=1), integers(3, 8, seed=2)
    s = 2.0 ** integers(5, seed=3)
    stored = [formats.e4m3_encode(x.float()).view(dtype) if dtype.itemsize == 1 else x.to(dtype) for x in (q, k)]
    dot, absdot = exact.dots(*stored)
    assert dot.dtype == absdot.dtype == torch.float64
    assert torch.equal(dot.long(), torch.einsum("nhd,sd->nhs", q, k))
    assert torch.equal(absdot.long(), torch.einsum("nhd,sd->nhs", q.abs(), k.abs()))
    wanted = (torch.einsum("nhs,nh->ns", dot.clamp_min(0), w.double())) * s.double()
    assert torch.equal(exact.logits(stored[0], stored[1], w.float(), s.float()), wanted)
    assert torch.equal(exact.logits_from_dots(dot, w.float(), s.float()), wanted)
    assert torch.equal(exact.logits(stored[0], stored[1], w.float()), wanted / s)


def test_logits_of_random_values_by_rationals() -> None:
    generator = seeded(4)
    q, k = (torch.randn(*shape, generator=generator).to(torch.bfloat16) for shape in ((1, 2, 16), (3, 16)))
    w = torch.randn(1, 2, generator=generator)
    got = exact.logits(q, k, w)
    for key in range(3):
        total = Fraction(0)
        for head in range(2):
            dot = sum(Fraction(a.item()) * Fraction(b.item()) for a, b in zip(q[0, head], k[key], strict=True))
            total += Fraction(w[0, head].item()) * max(dot, Fraction(0))
        assert abs(Fraction(got[0, key].item()) - total) <= abs(total) * Fraction(1, 1 << 48)


def test_nan_and_infinity_reach_the_logit() -> None:
    q, k, w = torch.ones(1, 1, 4), torch.ones(3, 4), torch.ones(1, 1)
    k[0, 0], k[1, 0] = torch.nan, torch.inf
    assert [str(x) for x in exact.logits(q, k, w)[0].tolist()] == ["nan", "inf", "4.0"]
    assert torch.isnan(exact.logits(q, k, w, torch.tensor([1.0, 1.0, torch.nan]))[0]).tolist() == [True, False, True]


def test_empty_shapes() -> None:
    dot, absdot = exact.dots(zeros(0, 8, 128), zeros(5, 128))
    assert dot.shape == absdot.shape == (0, 8, 5)
    assert exact.logits(zeros(2, 8, 128), zeros(0, 128), zeros(2, 8)).shape == (2, 0)


def test_key_chain_by_the_definition() -> None:
    generator = seeded(5)
    pooled = torch.randn(4, 128, generator=generator).to(torch.bfloat16)
    weight = 1 + 0.1 * torch.randn(128, generator=generator)
    positions = torch.tensor([0, 4, 8, 400], dtype=torch.int32)
    table = rope.rope_table(TINY, 401)
    z, total = exact.key_chain(pooled, weight, 1e-6, positions, table)
    assert z.dtype == total.dtype == torch.float64 and z.shape == total.shape == (4, 128)
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(128)] for i in range(128)]).double()
    for row in range(4):
        a = pooled[row].double()
        y = a / (a.square().sum() / 128 + 1e-6) ** 0.5 * weight.double()
        terms = y.abs()
        for pair in range(32):
            i, (c, s) = 64 + 2 * pair, table[int(positions[row]), 2 * pair : 2 * pair + 2].double()
            re, im = y[i].clone(), y[i + 1].clone()
            y[i], y[i + 1] = re * c - im * s, re * s + im * c
            terms[i], terms[i + 1] = (re * c).abs() + (im * s).abs(), (re * s).abs() + (im * c).abs()
        assert torch.allclose(z[row], matrix @ y * 128**-0.5, rtol=1e-13, atol=1e-13)
        assert torch.allclose(total[row], terms.sum() * 128**-0.5, rtol=1e-13, atol=0)


test_wrong_shapes = refusals(
    {
        r"expected q \[n, H, D\]": lambda: exact.dots(zeros(2, 128), zeros(3, 128)),
        r"w \[n, H\]": lambda: exact.logits(zeros(1, 2, 8), zeros(3, 8), zeros(1, 3)),
        r"s \[3\]": lambda: exact.logits(zeros(1, 2, 8), zeros(3, 8), zeros(1, 2), zeros(2)),
        "norm_weight": lambda: exact.key_chain(zeros(1, 128), zeros(64), 1e-6, zeros(1), zeros(1, 64)),
        r"positions \[1\]": lambda: exact.key_chain(zeros(1, 128), zeros(128), 1e-6, zeros(2), zeros(1, 64)),
    }
)


def test_integers_are_refused() -> None:
    refuses(TypeError, "floating-point", exact.widen, zeros(1, dtype=torch.int32))

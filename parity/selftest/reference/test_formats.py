"""Number formats: exhaustive over codes and bf16, at every tie, and independent of torch's default dtype."""

import math
from fractions import Fraction

import torch

from parity.selftest.helpers import refusals, seeded
from reference import formats

ALL_BF16 = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
FINITE = ALL_BF16[torch.isfinite(ALL_BF16)]


def nearest_even(x: float, grid: list[float]) -> int:
    """Index of the grid value nearest to x >= 0, the even index on a tie; by exact rationals."""
    exact = Fraction(x)
    distances = [abs(exact - Fraction(value)) for value in grid]
    best = min(distances)
    winners = [i for i, distance in enumerate(distances) if distance == best]
    return winners[0] if len(winners) == 1 else next(i for i in winners if i % 2 == 0)


def test_e4m3_codes_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = formats.e4m3_decode(codes)
    assert values.dtype == torch.float32
    native = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(torch.isnan(values), torch.isnan(native))
    assert torch.isnan(values).nonzero().flatten().tolist() == [0x7F, 0xFF]
    assert torch.equal(values.nan_to_num(1e9), native.nan_to_num(1e9))
    assert torch.equal(torch.signbit(values[:127]), torch.signbit(native[:127]))
    assert torch.equal(formats.e4m3_decode(codes.view(torch.float8_e4m3fn)).nan_to_num(1e9), values.nan_to_num(1e9))
    assert torch.equal(formats.e4m3_encode(values), codes)


def test_e4m3_encode_rounds_to_nearest_even_everywhere() -> None:
    grid = formats.e4m3_decode(torch.arange(0x7F, dtype=torch.uint8)).to(torch.float64)
    middle = (grid[1:] + grid[:-1]) / 2
    around = torch.cat((middle, middle * (1 + 2.0**-50), middle * (1 - 2.0**-50), grid))
    wanted = torch.tensor([nearest_even(x, grid.tolist()) for x in around.tolist()], dtype=torch.uint8)
    assert torch.equal(formats.e4m3_encode(around), wanted)
    assert torch.equal(formats.e4m3_encode(-around), wanted + 0x80)


def test_e4m3_encode_saturates_and_keeps_nan_and_zeros() -> None:
    given = torch.tensor([448.0, 464.0, 465.0, 1e30, math.inf, -math.inf, math.nan, 0.0, -0.0])
    assert formats.e4m3_encode(given).tolist() == [*[0x7E] * 5, 0xFE, 0x7F, 0, 0x80]


def test_e2m1_codes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    values = formats.e2m1_decode(codes)
    assert values[:8].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert torch.equal(formats.e2m1_encode(values), codes)
    assert torch.equal(formats.e2m1_unpack(formats.e2m1_pack(codes)), codes)
    assert formats.e2m1_pack(torch.tensor([3, 12], dtype=torch.uint8)).tolist() == [0xC3]


def test_e2m1_encode_of_every_bf16() -> None:
    codes = formats.e2m1_encode(FINITE)
    assert torch.equal(codes >> 3, torch.signbit(FINITE).to(torch.uint8))
    magnitudes = FINITE.abs().float()
    band = (magnitudes >= 0.01) & (magnitudes <= 16)  # every tie among them
    assert (codes[band] & 7).tolist() == [nearest_even(x, list(formats.E2M1_GRID)) for x in magnitudes[band].tolist()]
    assert bool((codes[magnitudes < 0.01] & 7 == 0).all()) and bool((codes[magnitudes > 16] & 7 == 7).all())


def test_fp4_exponent_of_every_positive_bf16() -> None:
    positive = FINITE[FINITE > 0]
    assert positive.numel() == 32639
    mantissa, power = torch.frexp(positive.double())
    wanted = torch.where(mantissa * 2 <= 1.5, power - 1 - 2, power - 1 - 1).clamp_min(-126)
    assert torch.equal(formats.fp4_exponent(positive).int(), wanted.int())


def test_fp4_quantise_keeps_the_sign_of_zero_and_handles_zero_blocks() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    x[0], x[1] = 6.0, -0.1
    values, exponents = formats.fp4_quantise(x)
    assert exponents.tolist() == [0, -126]
    assert values[0] == 6 and values[1] == 0 and bool(torch.signbit(values[1]))


def test_fp4_quantise_is_idempotent_and_within_half_a_step() -> None:
    x = (torch.randn(256, 128, generator=seeded(0)) * 2.0 ** torch.randint(-40, 40, (256, 1))).to(torch.bfloat16)
    values, exponents = formats.fp4_quantise(x)
    again, again_exponents = formats.fp4_quantise(values)
    assert torch.equal(again, values) and bool((again_exponents <= exponents).all())
    scale = formats.pow2(exponents.int()).repeat_interleave(32, dim=1)
    assert bool(((x.double() - values.double()).abs() <= scale).all())


def test_fp8_power_of_two_exponent_of_every_bf16() -> None:
    positive = FINITE[FINITE.float() >= 1e-4]
    mantissa, power = torch.frexp(positive.double())
    wanted = torch.where(mantissa * 2 <= 1.75, power - 1 - 8, power - 1 - 7)
    assert torch.equal(formats.fp8_pow2_exponent(positive[:, None]), wanted.int())
    assert torch.equal(formats.fp8_pow2_scale(positive[:, None]).double(), formats.pow2(wanted))


def test_fp8_scales_of_a_known_row() -> None:
    row = torch.tensor([[6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5]])
    power = formats.fp8_pow2_scale(row)
    assert power.tolist() == [2.0**-6]
    back = formats.e4m3_decode(formats.fp8_quantise(row, power)) * power[:, None]
    assert torch.equal(back, row)
    scale = formats.fp8_amax_scale(row)
    assert scale.dtype == torch.float32 and scale[0] == torch.tensor(6.0) / 448
    lossy = formats.e4m3_decode(formats.fp8_quantise(row, scale)) * scale[:, None]
    assert [round(v, 3) for v in lossy[0].tolist()] == [6.0, 3.857, 3.0, 1.929, 1.5, 0.964, 0.482]
    assert formats.fp8_amax_scale(torch.zeros(1, 8)).tolist() == [(torch.tensor(1e-4) / 448).item()]


def test_ue8m0_codes() -> None:
    exponents = torch.arange(-127, 128)
    codes = formats.ue8m0_encode(exponents)
    assert codes.tolist() == list(range(255))
    assert torch.equal(formats.ue8m0_decode(codes).double(), formats.pow2(exponents))
    assert math.isnan(formats.ue8m0_decode(torch.tensor([255], dtype=torch.uint8)).item())


def test_round_to_bfloat16_rounds_once() -> None:
    low = FINITE[(FINITE > 1e-30) & (FINITE.float() < 1e30)].double()
    place = formats.pow2(torch.frexp(low)[1] - 8)
    tie = low + place / 2
    up = (low + place).to(torch.bfloat16)
    even = torch.where(low.to(torch.bfloat16).view(torch.int16) % 2 == 0, low.to(torch.bfloat16), up)
    assert torch.equal(formats.round_to(tie, torch.bfloat16), even)
    # A float32 intermediate would round these onto the tie first.
    assert torch.equal(formats.round_to(tie + place * 2.0**-30, torch.bfloat16), up)
    assert torch.equal(formats.round_to(tie - place * 2.0**-30, torch.bfloat16), low.to(torch.bfloat16))
    special = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e300, -1e300], dtype=torch.float64)
    assert torch.equal(formats.round_to(special, torch.bfloat16), special.to(torch.bfloat16))
    assert math.isnan(formats.round_to(torch.tensor([math.nan], dtype=torch.float64), torch.bfloat16).item())


def test_default_dtype_is_irrelevant() -> None:
    x = torch.randn(8, 128, dtype=torch.float32, generator=seeded(1)).to(torch.bfloat16)
    wanted = *formats.fp4_quantise(x), formats.fp8_amax_scale(x), formats.fp8_pow2_scale(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = *formats.fp4_quantise(x), formats.fp8_amax_scale(x), formats.fp8_pow2_scale(x)
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


test_wrong_values = refusals(
    {
        "must be finite": lambda: formats.fp4_quantise(torch.full((32,), math.nan)),
        "multiple of 32": lambda: formats.fp4_quantise(torch.zeros(33)),
        r"\[-127, 127\]": lambda: formats.ue8m0_encode(torch.tensor([128])),
    }
)
test_wrong_dtypes = refusals(
    {
        "got torch.float16": lambda: formats.fp4_quantise(torch.zeros(32, dtype=torch.float16)),
        "must be uint8": lambda: formats.e4m3_decode(torch.zeros(1)),
        "must be integers": lambda: formats.ue8m0_encode(torch.tensor([1.0])),
        "must be float64": lambda: formats.round_to(torch.zeros(1), torch.bfloat16),
        "must be float32": lambda: formats.fp8_quantise(torch.zeros(1, 4), torch.zeros(1).double()),
    },
    TypeError,
)

"""The judgement of stores: correct float32 chains in other orders pass, the nearest wrong ones do not."""

from dataclasses import replace

import pytest
import torch

from impl.store_modes import Mode
from parity.domain.contract import Contract
from parity.numerics import intervals, published
from parity.ops.store.case import StoreCase
from parity.ops.store.judge import judge_store
from parity.ops.store.operands import build_store, named_bytes
from parity.pages.intervals import to_bf16
from parity.pages.layout import find
from parity.results import Labels, Status
from reference import compressor, exact, formats
from reference.formats import round_to

MODES = [Mode("fp8", "fused"), Mode("fp8_pow2", "fused"), Mode("bf16", "fused"), Mode("fp4", "fused")]
PUBLISHED = [Mode("fp8", "published"), Mode("bf16", "published", True), Mode("fp4", "published")]
CASES = [
    StoreCase(ids=tuple(range(40)), data=data, pooled=pooled, seed=seed, weights=weights)
    for seed, (data, pooled, weights) in enumerate(
        [("bell", "f32", "real"), ("octaves", "bf16", "real"), ("pairs", "f32", "ties"), ("zeros", "bf16", "one")]
    )
]


def chain(operands, order: str, rounded=lambda x: x) -> torch.Tensor:
    """Keys in float32, the sums in some order, `rounded` after norm, rotary and Hadamard."""
    a = rounded(operands.pooled.to(torch.float32))
    squares = a * a
    if order == "reversed":
        total = torch.zeros(len(a))
        for channel in reversed(range(128)):
            total = total + squares[:, channel]
    else:
        total = squares.sum(1)
    root = published.inverse_root(total * (1.0 / 128), operands.eps)[:, None]
    y = rounded(a * root * operands.norm_weight.to(torch.float32))
    rows = operands.rope_table[operands.positions.long()]
    re, im, cos, sin = y[:, 64::2], y[:, 65::2], rows[:, 0::2], rows[:, 1::2]
    turned = torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(1)
    y = torch.cat((y[:, :64], rounded(turned)), 1)
    strides = [1, 2, 4, 8, 16, 32, 64]
    for stride in reversed(strides) if order == "reversed" else strides:
        u, v = y.unflatten(1, (-1, 2, stride)).unbind(2)
        y = torch.stack((u + v, u - v), 2).flatten(1)
    return rounded(y * torch.tensor(128**-0.5, dtype=torch.float32))


def store_into(operands, mode: Mode, z: torch.Tensor) -> torch.Tensor:
    """The contents after z has been stored as the mode does."""
    scale = "pow2" if mode.format == "fp8_pow2" else "amax"
    payload, scales = find(mode.layout).encode(z, scale, mode.fake_fp4)
    where, where_scale = named_bytes(operands.case, operands.out_loc)
    operands.pool[where] = payload
    if scales is not None:
        operands.pool[where_scale] = scales
    return operands.contents()


def judged(case, mode, z_of, **changes):
    operands = build_store(replace(case, layout=mode.layout))
    contract = Contract.from_dict({**mode.contract, **changes})
    return judge_store(store_into(operands, mode, z_of(operands)), operands, contract, Labels())


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.data)
@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_float32_in_any_order_passes_the_fused_intervals(mode, case, order):
    verdict = judged(case, mode, lambda operands: chain(operands, order))
    assert verdict.passed, verdict.message
    assert verdict.cells >= 40 * 128


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_a_bf16_rounding_inside_does_not(mode):
    verdict = judged(CASES[0], mode, lambda operands: chain(operands, "forward", bf16))
    assert verdict.status is Status.FAILED


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_one_value_two_bounds_away_does_not(mode):
    def moved(operands):
        given = (operands.pooled, operands.norm_weight, operands.eps, operands.positions, operands.rope_table)
        z = exact.key_chain(*given)[0]
        z[3, 17] += 2 * float(z.abs().amax(1)[3]) / 16  # past the spacing of every format
        return z.to(torch.float32)

    assert judged(CASES[0], mode, moved).status is Status.FAILED


def test_the_bound_is_kept_and_not_idle():
    worst = 0.0
    for case in CASES:
        operands = build_store(case)
        given = (operands.pooled, operands.norm_weight, operands.eps, operands.positions, operands.rope_table)
        z, terms = exact.key_chain(*given)
        for order in ("forward", "reversed"):
            error = (chain(operands, order).to(torch.float64) - z).abs()
            worst = max(worst, float((error / intervals.bound(z, terms, False)).max()))
    assert 0.005 < worst < 1.0


@pytest.mark.parametrize("mode", PUBLISHED, ids=lambda mode: mode.name)
@pytest.mark.parametrize("order", ["forward", "reversed"])
def test_published_rounding_passes_in_any_order_of_the_mean(mode, order):
    verdict = judged(CASES[0], mode, lambda operands: chain(operands, order, bf16), mean_order="any")
    assert verdict.passed, verdict.message


@pytest.mark.parametrize("mode", PUBLISHED, ids=lambda mode: mode.name)
def test_published_without_roundings_does_not(mode):
    for order in ("any", "halving"):
        verdict = judged(CASES[0], mode, lambda operands: chain(operands, "forward"), mean_order=order)
        assert verdict.status is Status.FAILED


def test_published_rows_mirror_the_reference():
    """The transcription agrees with the reference's own steps on bf16 keys."""
    operands = build_store(CASES[1])
    given = (operands.norm_weight, operands.eps, operands.positions, operands.rope_table)
    keys = compressor.finish(operands.pooled, *given)
    rows = published.rows(operands.pooled, *given)
    assert int((rows != keys.hadamard).any(1).sum()) <= 1  # the mean's order alone may tell them apart
    for layout in ("bf16", "fp4"):
        payload, scales = find(layout).encode(keys.hadamard, "amax", layout == "bf16")
        if layout == "bf16":
            assert torch.equal(payload.view(torch.bfloat16), keys.fp4)
        else:
            values = formats.e2m1_decode(formats.e2m1_unpack(payload))
            assert scales is not None
            scale = formats.ue8m0_decode(scales).repeat_interleave(32, 1)
            assert torch.equal(values * scale, keys.fp4.to(torch.float32))


def test_a_byte_that_no_slot_names_is_found_wherever_it_lies():
    case = replace(CASES[0], layout="fp8", gap=48, pages=3, skip=2)
    mode = MODES[0]
    named = torch.cat([part.reshape(-1) for part in named_bytes(case, build_store(case).out_loc)])
    places = [0, 8448 - 1, 8448 + 47, 8448, 2 * 8496 + 8191]
    for address in [place for place in places if place not in named]:
        operands = build_store(case)
        store_into(operands, mode, chain(operands, "forward")[operands.out_loc >= 0])
        operands.pool[address] ^= 1
        verdict = judge_store(operands.contents(), operands, Contract.from_dict(mode.contract), Labels())
        assert verdict.status is Status.FAILED
        assert f"byte {address}" in verdict.message and "out_loc does not name" in verdict.message


def test_rounding_to_bf16_is_one_rounding():
    x = torch.randn(20000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2.0**-130
    x = torch.cat((x, x * 2.0**250, torch.tensor([0.0, -0.0, 3.4e38, 1.0 + 2.0**-8 + 2.0**-40])))
    assert torch.equal(to_bf16(x), round_to(x, torch.bfloat16).to(torch.float64))


@pytest.mark.parametrize("spread, lossless", [(0, True), (2, True), (14, True), (15, False)])
def test_a_power_of_two_scale_holds_the_fp4_grid_while_exponents_are_close(spread, lossless):
    """e4m3 has quanta of 2^-9 of its scale, which lies 6 or 7 binades below the largest block's exponent."""
    block = torch.tensor([*formats.E2M1_GRID, *(-x for x in formats.E2M1_GRID)]).repeat(2)
    for top in (6.0, 4.0, 3.5):  # 3.5 quantises to 4: the least amax that a block's exponent can have is above 3
        first = torch.where(block.abs() > top, 0.0, block)
        z = torch.cat((first, block * 2.0**-spread, block * 2.0**-spread, first))[None].to(torch.bfloat16)
        fp4 = formats.fp4_quantise(z)[0]
        payload, scales = find("fp8").encode(fp4, "pow2", False)
        assert scales is not None
        decoded = formats.e4m3_decode(payload) * scales.view(torch.float32)
        same = torch.equal(decoded, fp4.to(torch.float32))
        assert same or not lossless
        if not lossless and top == 6.0:
            assert not same

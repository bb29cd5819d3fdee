"""The rules by which recorded tensors are judged, each by itself."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.recorded import rules
from parity.recorded.rules import Approximate
from parity.selftest.recorded.recordings import opened, shared_params
from reference import compressor, formats, rope
from reference.config import TINY
from reference.hadamard import hadamard


def test_bits_sees_signs_of_zero_and_pairs_nan() -> None:
    x = torch.tensor([0.0, torch.nan, 1.0])
    assert rules.bits(x, x.clone()) == rules.Judged(3, 0, 0)
    assert rules.bits(x, torch.tensor([-0.0, torch.nan, 1.0])).rejected == 1
    assert rules.bits(x, torch.tensor([0.0, 2.0, torch.nextafter(torch.tensor(1.0), x[0])])).rejected == 2
    with pytest.raises(ValueError, match="expected torch.float32 \\[2\\]"):
        rules.bits(x, x[:2])


def test_interval_allows_the_roundings_of_its_ends_only() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    place = 2.0**-7
    tie = Approximate(one + place / 2, one * 1e-9)
    for got, allowed in ((1.0, True), (1 + place, True), (1 - place / 2, False), (1 + 2 * place, False)):
        judged = rules.interval(torch.tensor([got]).to(torch.bfloat16), tie)
        assert (judged.rejected == 0) == allowed
    near = Approximate(one + place / 2 - 1e-6, one * 1e-9)
    assert rules.interval((one + place).to(torch.bfloat16), near).rejected == 1
    assert rules.interval(torch.tensor([torch.nan]).to(torch.bfloat16), near).rejected == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20), spread=st.sampled_from([0.1, 1.0, 10.0, 60.0]))
def test_pool_and_norm_errors_hold_and_are_not_loose(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(5, 8, 128, generator=generator)
    score = torch.randn(5, 8, 128, generator=generator) * spread
    score[0, :4] = -torch.inf
    kv[0, :4] = 0
    exactly = [Approximate(x.double(), torch.zeros_like(x, dtype=torch.float64)) for x in (kv, score)]
    result = rules.pool(*exactly)
    wrong = (compressor.pool(kv, score).double() - result.value).abs()
    assert bool((wrong <= result.error).all())
    assert float(result.error.max()) < 2.0**-14 * float(kv.abs().max())
    blurred = [
        Approximate(
            x.double() + e * torch.randn(x.shape, generator=generator).clamp(-1, 1), torch.full_like(x, e).double()
        )
        for x, e in ((kv, 1e-4), (score, 1e-3))
    ]
    wide = rules.pool(*blurred)
    assert bool(((compressor.pool(kv, score).double() - wide.value).abs() <= wide.error).all())
    pooled = compressor.pool(kv, score).to(torch.bfloat16)
    weight = 1 + torch.randn(128, generator=generator) * 0.1
    assert rules.interval(compressor.rms_norm(pooled, weight, 1e-6), rules.norm(pooled, weight, 1e-6)).rejected == 0


def brute_topk(row: list[int], scores: list[float], limit: int, k: int) -> bool:
    count = min(k, limit)
    picked = row[:count]
    if any(not 0 <= s < limit for s in picked) or len(set(picked)) < count or row[count:] != [-1] * (len(row) - count):
        return False
    values = [scores[s] for s in picked]
    return values == sorted(scores[:limit], reverse=True)[:count]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_topk_is_the_brute_force_rule(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 5))
    k, limit = data.draw(st.integers(1, 6)), data.draw(st.integers(0, total))
    scores = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=total, max_size=total))
    scores[limit:] = [-float("inf")] * (total - limit)
    masked = torch.tensor(scores).to(torch.bfloat16)
    row = data.draw(st.lists(st.integers(-1, total), min_size=min(k, total), max_size=min(k, total)))
    first = masked.topk(min(k, total)).indices
    usual: list[int] = torch.where(torch.arange(min(k, total)) < min(k, limit), first, -1).tolist()
    for selection in [row, usual, *map(list, itertools.islice(itertools.permutations(usual), 24))]:
        got = torch.tensor(selection, dtype=torch.int32)[None]
        judged = rules.topk(got, masked[None], torch.tensor([limit]), k)
        assert (judged.rejected == 0) == brute_topk(selection, scores, limit, k), (selection, scores, limit, k)


def test_keys_reach_one_other_rounding_but_no_other_key() -> None:
    recording = opened("prefill_0257_h8_b3")
    params = next(iter(shared_params(recording).values()))
    normed, pooled = recording.tensors["prefill.k.normed"][0, :8], recording.tensors["prefill.k.pooled"][0, :8]
    table = rope.rope_table(TINY, 64)
    positions = torch.arange(8) * 4
    chain = rules.KeyChain(params.norm, 1e-6, positions, table)
    other = pooled.clone()
    for row in range(8):  # a last place up where the normed key changes most
        channel = int(other[row].abs().argmax())
        other[row, channel] = torch.nextafter(other[row, channel], other[row, channel] * 2)
    keys = compressor.finish(other.float(), params.norm, 1e-6, positions, table)
    before = formats.fp4_quantise(hadamard(rope.apply_rope(normed, positions, table)))
    changed = (keys.fp4 != before[0]).any(-1) | (keys.exponents != before[1]).any(-1)
    assert bool(changed.any())
    known = Approximate(pooled.double(), torch.zeros_like(pooled, dtype=torch.float64))
    values, exponents = rules.keys(keys.fp4, keys.exponents, known, chain)
    assert values.rejected + exponents.rejected >= int(changed.sum())
    blurred = Approximate((pooled.double() + other.double()) / 2, (other.double() - pooled.double()).abs())
    values, exponents = rules.keys(keys.fp4, keys.exponents, blurred, chain)
    assert values.rejected == exponents.rejected == 0 and values.differing + exponents.differing > 0

"""The emulated indexer: equal to the reference bit for bit as published, and to the codecs at every format."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from parity.explain import draws, rounding, samples
from parity.explain.choices import CHOICES, NAMES, PRESETS, Configuration, differing, mixed, preset, settings
from parity.explain.explain import Settings
from parity.explain.needles import plant, ranks
from parity.explain.pipeline import Pipeline, select
from parity.selftest.explain.captured import write_captured
from parity.selftest.helpers import CPU, refuses
from reference import compressor, formats, indexer, linear, rope

# 16 heads: the constant 128^-0.5 * 16^-0.5 is no power of two, so the rounding of head weights shows.
TINY = Settings(heads=16, topk=16, tokens=515, rows=3, q_lora_rank=128)
SINGLES = [(choice.name, value) for choice in CHOICES for value in choice.values if value != choice.published]
# On the fp4 grid these formats hold every value exactly, so nothing can tell them from bf16.
SAME_ON_THE_GRID = {(name, form) for name in ("store", "query") for form in ("fp8-pow2", "fp4", "float32")}
PUBLISHED = preset("published")


def tiny(model: str = "gaussian", seed: int = 0, case: int = 0, **changes: Any) -> samples.Sample:
    options = dataclasses.replace(TINY, data=model, seed=seed, **changes)
    return samples.draw(options.weights(), case, options.tokens, options.rows)


@pytest.mark.parametrize("model", samples.MODELS)
def test_published_equals_the_reference_bit_for_bit(model: str) -> None:
    sample = tiny(model)
    pipeline, c = Pipeline(sample), PUBLISHED
    table = rope.rope_table(sample.config, TINY.tokens)
    first = torch.arange(sample.keys) * 4
    keys = compressor.finish(samples.pooled(sample), sample.norm, sample.config.norm_eps, first, table)
    assert torch.equal(pipeline.keys(c).payload, keys.fp4.float())
    assert sample.wq is not None and sample.qr is not None
    codes, exponents = sample.wq
    proj = linear.project_fp8(sample.qr, codes, exponents, "library").unflatten(-1, (16, 128))
    query = indexer.query(proj, sample.positions, table)
    assert torch.equal(pipeline.queries(c).payload, query.fp4.float())
    weight = indexer.head_weights(sample.gate, 16)
    masked = indexer.mask(indexer.scores(indexer.dots(query.fp4, keys.fp4), weight), sample.positions)
    assert torch.equal(pipeline.logits(c), masked.float())
    chosen = indexer.topk(masked, 16, sample.positions)
    for row, picked in enumerate(pipeline.select(c)):
        # Ties are free: compare the values picked, not the places.
        mine, theirs = (masked[row][each].sort(descending=True).values for each in (picked, chosen[row]))
        assert torch.equal(mine, theirs)


def test_pooling_equals_the_reference_however_the_windows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tiny()
    whole = samples.pooled(sample)
    assert sample.tokens is not None and sample.ape is not None
    kv, score = sample.tokens(0, sample.keys)
    score = compressor.add_ape(score, sample.ape, torch.arange(len(kv)))
    assert torch.equal(whole, compressor.pool(*compressor.CompressorState(sample.config).append(kv, score)))
    monkeypatch.setitem(samples.AT_ONCE, "cpu", 7)
    assert torch.equal(samples.pooled(sample), whole)


def test_a_longer_context_extends_a_shorter_one() -> None:
    short, long = tiny(tokens=259), tiny(tokens=515)
    assert torch.equal(samples.pooled(short), samples.pooled(long)[: short.keys])


def test_roundings_equal_the_codecs() -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = bits[torch.isfinite(bits)]
    blocks = torch.zeros((len(finite), 32), dtype=torch.bfloat16)
    blocks[:, 0], blocks[:, 1], blocks[:, 2] = finite, finite * 0.3, finite / 24
    assert torch.equal(rounding.fp4(blocks.float()), formats.fp4_quantise(blocks)[0].float())
    grid = torch.zeros((1, 32))
    grid[0, :9] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.75])
    assert rounding.fp4(grid)[0, :9].tolist() == [6, 0, 1, 1, 2, 2, 4, 4, -1]
    assert rounding.fp4(grid, "down")[0, :9].tolist() == [6, 0, 0.5, 1, 1.5, 2, 3, 4, -0.5]
    wide = torch.cat([torch.randn(20000) * 100, torch.tensor([464.0, 1e9, -1e9, 2.0**-10, 0.0])])
    assert torch.equal(rounding.e4m3(wide), formats.e4m3_decode(formats.e4m3_encode(wide)))
    rows = torch.randn(50, 128)
    for form, scale in (("fp8", formats.fp8_amax_scale(rows)), ("fp8-pow2", formats.fp8_pow2_scale(rows))):
        payload, found = rounding.STORED[form](rows)
        assert found is not None and torch.equal(found, scale)
        assert torch.equal(payload, formats.e4m3_decode(formats.fp8_quantise(rows, scale)))


def test_the_power_of_two_scale_is_exact_on_published_keys_and_the_amax_scale_is_not() -> None:
    pipeline = Pipeline(tiny())
    keys = pipeline.keys(PUBLISHED).values()
    for store, exact in (("fp8-pow2", True), ("fp4", True), ("fp8", False)):
        same = (pipeline.keys(PUBLISHED.having(store=store)).values() == keys).all(1)
        assert same.all() if exact else not same.any()


def test_ranks_add_rounded_partial_sums_in_order() -> None:
    pipeline, c, halves = Pipeline(tiny()), PUBLISHED, []
    for part in (slice(0, 8), slice(8, 16)):
        q, k = pipeline.queries(c).payload[:, part].to(torch.bfloat16), pipeline.keys(c).payload.to(torch.bfloat16)
        halves.append(indexer.scores(indexer.dots(q, k), pipeline.head_weights(c)[:, part].to(torch.bfloat16)))
    wanted = (halves[0] + halves[1]).float()
    assert torch.equal(pipeline.logits(c.having(tensor_parallel="2")), wanted)
    assert not torch.equal(wanted, pipeline.logits(c))


def test_every_value_of_every_choice_has_logits_of_its_own() -> None:
    """Or a difference between implementations could not be laid to one of them."""
    pipeline = Pipeline(tiny())
    found = {single: pipeline.logits(PUBLISHED.having(**dict([single]))) for single in SINGLES if single[0] != "topk"}
    found["published", ""] = pipeline.logits(PUBLISHED)
    for a, b in itertools.combinations(found, 2):
        assert torch.equal(found[a], found[b]) == ({a, b} <= SAME_ON_THE_GRID | {("published", "")}), (a, b)


def test_selection_is_a_topk_with_ties_to_the_lower_key() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, -torch.inf], [1.0, 2.0, *[-torch.inf] * 4]])
    assert select(scores, 3, torch.tensor([5, 2])).int().tolist() == [[1, 0, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]]


def test_needles_have_the_wanted_margin() -> None:
    pipeline, plain = Pipeline(tiny()), preset("unrounded")
    margins = (-0.5, 0.0, 0.1, 1.0)
    needles = plant(pipeline, margins, seed=1)
    logits = pipeline.logits(plain)
    cutoff = logits.topk(16, dim=1).values[:, -1:]
    got = (pipeline.scores_of(plain, needles.pooled, needles.windows) - cutoff) / logits.std(1, correction=0)[:, None]
    assert torch.allclose(got, torch.tensor(margins).expand_as(got), atol=1e-4)
    rank = ranks(pipeline, plain, needles)
    assert (rank[:, 0] > 16).all() and (rank[:, 3] <= 16).all()
    refuses(ValueError, "no key scores", plant, pipeline, (1e6,), seed=1)
    refuses(ValueError, "longer than the 16 keys", plant, Pipeline(tiny(tokens=40)), margins, seed=1)


def test_draws_are_standard_normal_and_depend_on_every_coordinate() -> None:
    row = torch.arange(4000)
    values = draws.gaussian(3, "kv", 0, row, 64)
    assert abs(float(values.mean())) < 0.01 and abs(float(values.std()) - 1) < 0.01
    assert abs(float((values**4).mean()) - 3) < 0.1
    for seed, stream, case in ((4, "kv", 0), (3, "score", 0), (3, "kv", 1)):
        assert abs(float((values * draws.gaussian(seed, stream, case, row, 64)).mean())) < 0.01
    assert torch.equal(draws.gaussian(3, "kv", 0, row[7:9], 64), values[7:9])


@pytest.mark.parametrize(
    "word, sentence",
    [
        ("fp4", "expected choice=value"),
        ("fp5_q=on", "choice: expected one of"),
        ("store=fp16", "store: expected one of bf16, fp8"),
        ("topk=0", "topk: expected one of published or a positive integer"),
    ],
)
def test_a_wrong_choice_is_one_sentence(word: str, sentence: str) -> None:
    refuses(ValueError, rf"^.*{sentence}.*\Z", settings, [word])


def test_configurations_mix_and_differ() -> None:
    start, end = PUBLISHED, preset("sglang-fp8")
    names = differing(start, end)
    assert set(names) == set(end.departures())
    assert mixed(start, end, names) == end and mixed(start, end, []) == start
    assert mixed(start, end, ["store"]).departures() == {"store": "fp8"}
    assert set(NAMES) == set(start)
    assert Configuration({"topk": "7"}).width(512) == 7 and start.width(512) == 512
    for name in PRESETS:
        assert set(differing(preset(name), start)) == set(preset(name).departures())
        assert (name == "published") == (not differing(start, preset(name)))
    refuses(ValueError, "preset: expected one of", preset, "nobody")


def test_captured_tensors_take_the_place_of_drawn_ones(tmp_path) -> None:
    sample, path = tiny(), tmp_path / "captured.safetensors"
    found = samples.captured(write_captured(path, sample), 16, CPU)
    for name in ("published", "sglang-fp8"):
        assert torch.equal(Pipeline(found).logits(preset(name)), Pipeline(sample).logits(preset(name)))
    refuses(ValueError, "pooled keys only", Pipeline(found).logits, PUBLISHED.having(pooling="bf16"))
    refuses(ValueError, "projected queries only", Pipeline(found).logits, PUBLISHED.having(projection_q="bf16"))
    for changes, sentence in (
        ({"norm": None}, r"tensor norm \[128\] is missing"),
        ({"gate": sample.gate[:, :5]}, r"q must be \[n, H, 128\]"),
    ):
        refuses(ValueError, sentence, samples.captured, write_captured(path, sample, **changes), 16, CPU)
    path.write_bytes(b"no tensors")
    refuses(ValueError, "cannot be read as safetensors", samples.captured, path, 16, CPU)


def test_a_data_model_or_length_that_is_unknown_is_refused() -> None:
    refuses(ValueError, "data: expected one of gaussian", tiny, "uniform")
    refuses(ValueError, "at least 4 tokens", tiny, tokens=3)

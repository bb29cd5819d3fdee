"""Sharing a loss among choices, metrics and intervals, and `parity explain` from preset to sentence at tiny shapes."""

import dataclasses
import itertools
import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from parity.cli.main import main
from parity.explain import advice, attribution, samples
from parity.explain.choices import CHOICES, PRESETS, Configuration, preset
from parity.explain.explain import Settings, explain
from parity.explain.measure import METRICS, Measure, interval, regret
from parity.explain.pipeline import Pipeline
from parity.explain.text import listing, table
from parity.selftest.explain.captured import write_captured
from parity.selftest.helpers import exit_code

TINY = Settings(heads=16, topk=32, tokens=1031, rows=4, cases=4, q_lora_rank=128, contexts=(131, 515))
LOSS, ERROR = METRICS.index("loss"), METRICS.index("error")


def game(weights: dict[str, float], bonus: dict[frozenset[str], float]):
    def value(held: frozenset[str]) -> np.ndarray:
        total = sum(weights[name] for name in held) + sum(v for some, v in bonus.items() if some <= held)
        return np.array([total, 2 * total])

    return value


def test_shares_of_a_game_whose_answer_is_known() -> None:
    names = list("abcde")
    value = game(dict(zip(names, (1.0, 2, 3, 0, -1), strict=True)), {frozenset("ab"): 6, frozenset("cde"): 3})
    found = attribution.exact(value, names)
    assert np.allclose(found[:, 0], [1 + 3, 2 + 3, 3 + 1, 1, -1 + 1])
    assert np.allclose(found[:, 1], 2 * found[:, 0])
    brute = np.mean([attribution._along(value, names, order) for order in itertools.permutations(names)], axis=0)
    assert np.allclose(found, brute)
    names = [f"p{i}" for i in range(attribution.EXACT_UP_TO)]
    value = game(dict.fromkeys(names, 1.0), {frozenset(names[:2]): 5.0})
    found, error = attribution.shares(value, names, 2, random.Random(0))
    assert np.allclose(found[:, 0], [3.5, 3.5, *[1.0] * 6]) and not error.any()


def test_drawn_orders_add_up_and_come_as_close_as_they_say() -> None:
    names = [f"p{i}" for i in range(10)]
    weights = {name: float(i) for i, name in enumerate(names)}
    bonus = {frozenset(names[i : i + 3]): 3.0 for i in range(8)}
    value = game(weights, bonus)
    right = attribution.exact(value, names)
    inside = 0
    for seed in range(40):
        found, error = attribution.shares(value, names, 6, random.Random(seed))
        assert np.allclose(found.sum(0), value(frozenset(names)))
        assert (error > 0).any()
        inside += int((np.abs(found - right) <= 3 * error + 1e-12)[:, 0].sum())
    assert inside > 0.9 * 400
    # An additive game is told exactly by any order.
    found, error = attribution.sampled(game(weights, {}), names, 2, random.Random(0))
    assert np.allclose(found[:, 0], list(weights.values())) and np.allclose(error, 0)
    with pytest.raises(ValueError, match="at least 2 pairs"):
        attribution.sampled(value, names, 1, random.Random(0))


def test_intervals_cover_the_mean_as_often_as_they_say() -> None:
    generator = np.random.default_rng(0)
    for count in (3, 10):
        covered = 0
        for _ in range(2000):
            mean, half = interval([np.array([x]) for x in generator.normal(5, 2, count)])
            covered += bool(abs(mean[0] - 5) <= half[0])
        assert 0.93 < covered / 2000 < 0.97
    assert math.isinf(interval([np.array([1.0])])[1][0])


def test_metrics_by_hand() -> None:
    scores = torch.tensor([[5.0, 4.0, 3.0, 3.0, 1.0]])
    wanted = torch.tensor([[True, True, True, False, False]])
    tied = torch.tensor([[True, True, False, True, False]])
    worse = torch.tensor([[True, True, False, False, True]])
    fewer = torch.tensor([[True, False, False, False, False]])
    wider = torch.ones((1, 5), dtype=torch.bool)
    got = [float(regret(wanted, chosen, scores, 3)[0]) for chosen in (wanted, tied, worse, fewer, wider)]
    assert got == pytest.approx([0, 0, 2 / 12, 7 / 12, 0])
    options = dataclasses.replace(TINY, topk=3)
    measure = Measure(Pipeline(samples.draw(options.weights(), 0, 24, 1)), preset("published"))
    measure.pipeline._kept[("select", preset("published"))] = torch.nn.functional.pad(wanted, (0, 1))
    measure.pipeline._kept[("logits", preset("published"))] = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf)
    other = torch.nn.functional.pad(scores, (0, 1), value=-torch.inf) + 1
    found = measure.judge(torch.nn.functional.pad(tied, (0, 1)), other, 3, torch.tensor([[2, 3, 9]]))
    assert found == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3, 3, math.sqrt(5 / 60)])
    assert measure.judge(torch.nn.functional.pad(worse, (0, 1)), other, 3, None)[:2] == pytest.approx([1 / 3, 0])


SINGLES = [
    (choice.name, value)
    for choice in CHOICES
    for value in choice.values
    if value != choice.published and not (choice.name in ("store", "query") and value != "fp8")
] + [("topk", "20")]


@pytest.mark.parametrize("name, value", SINGLES, ids=[f"{name}={value}" for name, value in SINGLES])
def test_a_single_difference_explains_everything(name: str, value: str) -> None:
    start = preset("published")
    options = dataclasses.replace(TINY, contexts=(), cases=2)
    report = explain(start, start.having(**{name: value}), options)
    (entry,) = report["choices"]
    assert entry["choice"] == name and report["exact"]
    for metric in METRICS:
        assert entry["share"][metric]["mean"] == pytest.approx(
            report["total"][metric]["mean"] - report["reference_needles"][metric]["mean"], nan_ok=True
        )
    assert name == "topk" or report["total"]["error"]["mean"] > 0


PAIRS = [
    {"fp4_k": "off", "head_weights": "float32"},
    {"rope_position": "last", "store": "fp8"},
    {"hadamard": "q", "fp4_q": "half-down"},
    {"relu": "off", "rope_table": "bf16"},
    {"projection_q": "bf16", "dot": "float32"},
    {"fp4_q": "off", "tensor_parallel": "8"},
]


@pytest.mark.parametrize("pair", PAIRS, ids=["+".join(pair) for pair in PAIRS])
def test_of_two_differences_the_larger_is_named_first(pair: dict[str, str]) -> None:
    start = preset("published")
    report = explain(start, start.having(**pair), dataclasses.replace(TINY, contexts=(), cases=2))
    assert report["choices"][0]["choice"] == next(iter(pair))  # PAIRS name the larger first
    assert report["sentence"].index(report["choices"][0]["phrase"]) > 0
    shares = [entry["share"]["loss"]["mean"] for entry in report["choices"]]
    assert sum(shares) == pytest.approx(report["total"]["loss"]["mean"])


@pytest.fixture(scope="module")
def two_seeds() -> list[dict]:
    return [
        explain(preset("published"), preset("seed-before"), dataclasses.replace(TINY, seed=seed)) for seed in (0, 1)
    ]


def assert_stable(reports: list[dict]) -> None:
    """The shares of two seeds differ by less than their intervals, and add up to the whole."""
    first, second = ({entry["choice"]: entry["share"]["loss"] for entry in report["choices"]} for report in reports)
    for name, a in first.items():
        b = second[name]
        assert abs(a["mean"] - b["mean"]) <= a["half"] + b["half"], name
    for report in reports:
        for metric in ("loss", "regret", "error"):
            total = sum(entry["share"][metric]["mean"] for entry in report["choices"])
            assert total == pytest.approx(report["total"][metric]["mean"])


def test_two_seeds_differ_by_less_than_their_intervals(two_seeds: list[dict]) -> None:
    assert_stable(two_seeds)
    assert {entry["choice"] for entry in two_seeds[0]["choices"][:2]} == {"fp4_q", "fp4_k"}


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "published"])
def test_presets_are_stable_at_a_real_shape_and_in_time(name: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--parity-profile", None) != "nightly":
        pytest.skip("two minutes per preset: runs under --parity-profile nightly")
    reports = [explain(preset("published"), preset(name), Settings(seed=seed)) for seed in (0, 1)]
    assert_stable(reports)
    assert all(report["seconds"] < 120 for report in reports)  # on two cores without a GPU


def test_the_report_adds_up_and_the_path_ends_at_the_target(two_seeds: list[dict]) -> None:
    report = two_seeds[0]
    total = report["total"]
    assert not report["exact"] and all(entry["order_error"]["loss"] > 0 for entry in report["choices"][:2])
    assert report["choices"][-1]["path"]["loss"]["mean"] == pytest.approx(total["loss"]["mean"])
    assert report["contexts"][0]["total"]["loss"]["mean"] == 0  # 32 keys of which 32 are selected
    assert report["contexts"][1]["total"]["loss"]["mean"] > 0
    missed = report["map"]["missed"]
    assert len(missed) == 4 and len(missed[0]) == 5 and 0 < sum(map(sum, missed)) < 4 * 32
    assert json.loads(json.dumps(report)) == report


def test_the_sentence_and_the_table_say_what_was_measured(two_seeds: list[dict]) -> None:
    report = two_seeds[0]
    text = report["sentence"]
    assert text.startswith(f"Of the {100 * report['total']['loss']['mean']:.1f} %")
    assert "the missing fp4 step on q" in text and "the missing fp4 step on k" in text
    restored = report["advice"]["restored"]
    assert restored["fp4_q"] == restored["fp4_k"] == "on"
    assert report["advice"]["loss"] <= advice.ENOUGH * report["total"]["loss"]["mean"] or len(restored) == 10
    assert report["advice"]["exact_stores"]["fp8-pow2"] == 1.0 and report["advice"]["exact_stores"]["fp8"] < 0.01
    assert "exactly at 132 bytes per slot" in text and "68 bytes per slot" in text
    lines = table(report, "seed-before", "published")
    assert sum(line.startswith(tuple(e["choice"] for e in report["choices"])) for line in lines) == 10


def test_a_difference_without_effect_says_so() -> None:
    report = explain(preset("published"), Configuration({"store": "fp8-pow2"}), dataclasses.replace(TINY, cases=2))
    assert report["sentence"].startswith("Nothing is lost")


def test_a_real_implementation_is_one_more_part(tmp_path: Path) -> None:
    """The torch path deviates from its emulation by float32 alone; a path that drops a head by a head."""
    from parity.run import registry

    device = torch.device("cpu")
    options = dataclasses.replace(TINY, cases=2, contexts=())
    for name, layout in (("seed-before", "fp8"), ("seed-after", "bf16")):
        impl = registry.builtin(device)[f"torch-{layout}"]
        report = explain(preset("published"), preset(name), options, impl=impl)
        assert abs(report["kernel"]["share"]["loss"]["mean"]) < 0.01
        assert report["kernel"]["share"]["error"]["mean"] < 1e-3
    with pytest.raises(ValueError, match="expected paged_logits of fp8 pages, got torch-bf16"):
        explain(preset("published"), preset("seed-before"), options, impl=registry.builtin(device)["torch-bf16"])
    source = tmp_path / "half.py"
    source.write_text(
        "from impl.torch_path import torch_bf16_paged_mqa_logits as whole\n"
        "def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):\n"
        "    weights = weights.clone(); weights[:, -1] = 0\n"
        "    return whole(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)\n"
    )
    out = tmp_path / "out.json"
    words = ["--impl", f"{source}:logits", "--layout", "bf16", "--tokens", "1031", "--heads", "16", "--topk", "32"]
    words += ["--contexts"]
    assert main(["explain", *words, "--cases", "2", "--rows", "4", "--json", str(out), "--device", "cpu"]) == 0
    report = json.loads(out.read_text())
    assert report["kernel"]["share"]["loss"]["mean"] > 0.01 and report["preset"] == "seed-after"
    assert f"{source}:logits itself against its emulation" in report["sentence"]


def test_captured_contexts_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sample = samples.draw(TINY.weights(), 0, TINY.tokens, TINY.rows)
    path = write_captured(tmp_path / "captured.safetensors", sample)
    words = ["explain", "--captured", str(path), "--topk", "32", "--device", "cpu", "--preset", "vllm-fp8"]
    assert main(words) == 0
    assert "fp4_k" in capsys.readouterr().out


def test_the_command_lists_choices_and_refuses_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--list"]) == 0
    text = capsys.readouterr().out
    assert all(choice.name in text for choice in CHOICES) and all(name in text for name in PRESETS)
    assert "\n".join(listing()) in text
    for words, part in (
        (["--preset", "nobody"], "preset: expected one of"),
        (["--set", "store=fp16"], "store: expected one of"),
        (["--against", "published+dot"], "expected choice=value"),
        (["--preset", "published"], "nothing to explain"),
        (["--preset", "seed-before", "--data", "real"], "data: expected one of"),
        (["--preset", "seed-before", "--cases", "0"], "--cases: must be 1 or more"),
        (["--preset", "seed-before", "--captured", "no.safetensors"], "cannot be read"),
        (["--impl", "nobody"], "impl: expected one of"),
        (["--impl", "torch-fp8", "--preset", "seed-after"], "expected paged_logits of bf16 pages, got torch-fp8"),
        (["--impl", "torch-fp8", "--set", "store=fp4"], "reads bf16 queries with bf16 keys"),
    ):
        small = ["--tokens", "1031", "--heads", "16", "--topk", "32", "--rows", "1", "--device", "cpu"]
        assert exit_code(["explain", *words, *small]) == 2, words
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert part in error and error.startswith("parity explain: "), error

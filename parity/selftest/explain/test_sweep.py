"""The sweeps: recall that falls with the context, needles by margin, and bytes by formula against measurement."""

import json
from pathlib import Path

import pytest
import torch

from parity.cli.main import main
from parity.explain import samples, sweep_memory, sweep_recall
from parity.explain.explain import Settings
from parity.explain.measure import Measure
from parity.explain.pipeline import Pipeline
from parity.selftest.helpers import exit_code

TINY = Settings(heads=16, topk=32, cases=2, rows=4, q_lora_rank=128, margins=(0.0, 0.1, 1.0))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def swept() -> dict:
    names = ("seed-before", "seed-after", "published+store=fp8-pow2")
    return sweep_recall.sweep((131, 515, 4099), names, ("gaussian", "topic-drift"), TINY)


def rows_of(report: dict, data: str, name: str) -> list[dict]:
    return [row for row in report["rows"] if row["data"] == data and row["configuration"] == name]


@pytest.mark.parametrize("data", ["gaussian", "topic-drift"])
def test_everything_is_selected_at_first_and_recall_falls_from_there(swept: dict, data: str) -> None:
    for name in ("seed-before", "seed-after"):
        losses = [row["metrics"]["loss"]["mean"] for row in rows_of(swept, data, name)]
        assert losses[0] == 0 < losses[1] < losses[2]
    assert all(row["metrics"]["loss"]["mean"] == 0 for row in rows_of(swept, data, "published+store=fp8-pow2"))


def test_needles_are_kept_by_their_margin(swept: dict) -> None:
    assert rows_of(swept, "gaussian", "seed-after")[0]["needles"] is None
    for row in rows_of(swept, "gaussian", "seed-after")[1:]:
        kept = [each["mean"] for each in row["needles"]]
        assert kept[0] < kept[1] == kept[2] == 1
    reference = rows_of(swept, "gaussian", "reference")
    assert reference[0]["metrics"] is None and len(reference[1]["needles"]) == 3
    assert json.loads(json.dumps(swept)) == swept


def test_a_row_is_what_measuring_the_context_gives(swept: dict) -> None:
    source = samples.weights(TINY.config(), "gaussian", TINY.seed, CPU)
    drawn = [samples.draw(source, 1000 + i, 515, TINY.rows) for i in range(2)]
    reference, target = (sweep_recall.configuration(name) for name in ("published", "seed-before"))
    losses = [Measure(Pipeline(sample), reference)(target)[0] for sample in drawn]
    assert rows_of(swept, "gaussian", "seed-before")[1]["metrics"]["loss"]["mean"] == pytest.approx(sum(losses) / 2)


def test_captured_contexts_take_the_place_of_drawn_ones() -> None:
    sample = samples.draw(TINY.weights(), 0, 515, 4)
    report = sweep_recall.sweep((9,), ("seed-after",), ("gaussian",), TINY, captured=[sample])
    assert {(row["data"], row["tokens"]) for row in report["rows"]} == {("captured", 515)} and not report["caveat"]


@pytest.mark.parametrize("rows, keys", [(64, 1127), (7, 130)])
def test_the_gather_takes_the_bytes_of_its_formula(rows: int, keys: int) -> None:
    found = sweep_memory.measured("gather-bf16", rows, keys, 64, CPU)
    assert found["workspace"] == pytest.approx(sweep_memory.predicted("gather-bf16", rows, keys).workspace, rel=0.05)


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_the_torch_path_stays_within_its_budget(layout: str) -> None:
    found = sweep_memory.measured(f"torch-{layout}", 64, 1127, 64, CPU)
    assert found["workspace"] <= sweep_memory.predicted(f"torch-{layout}", 64, 1127).workspace


def test_the_call_of_the_incident_and_the_gpus() -> None:
    """23.1 GB of keys, 11.5 GB of bf16 scores, 23.1 GB of float32 scores: the peak that an H200 showed was 57.7 GB."""
    guess = sweep_memory.predicted("gather-bf16", *sweep_memory.STORY)
    assert guess.workspace == 4096 * 344 * 64 * (256 + 64 * 6)
    assert guess.workspace / 1e9 == pytest.approx(57.7, abs=0.05)
    for gpu in sweep_memory.GPUS:
        for path in sweep_memory.PATHS:
            keys = sweep_memory.longest(path, 4096, gpu)
            assert sweep_memory.predicted(path, 4096, keys).total <= gpu * 10**9
            assert sweep_memory.predicted(path, 4096, keys + 64).total > gpu * 10**9
    assert sweep_memory.longest("gather-bf16", 4096, 24) < 22016 < sweep_memory.longest("triton-bf16", 4096, 16)
    assert sweep_memory.longest("torch-bf16", 4096, 0) == 0


def test_the_commands_write_json_and_refuse_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    assert main(["sweep", "memory", "--device", "cpu", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "57.71 GB" in text and "96 GB" in text
    report = json.loads(out.read_text())
    assert len(report["rows"]) == 5 * 4 * 5 and report["provenance"]["architecture"] == "cpu"
    assert all(row["not_measured"] == "measured on CUDA only" for row in report["rows"])
    out = tmp_path / "recall.json"
    words = ["sweep", "recall", "--tokens", "515", "--heads", "16", "--topk", "32", "--rows", "2", "--cases", "1"]
    words += ["--device", "cpu"]
    assert main([*words, "--data", "gaussian", "--config", "seed-before", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    assert "real keys and queries may behave differently" in text and "seed-before" in text
    assert json.loads(out.read_text())["kind"] == sweep_recall.KIND
    for more, part in (
        (["--data", "real"], "data: expected one of"),
        (["--config", "nobody"], "preset: expected one of"),
        (["--margins", "9999", "--data", "gaussian"], "no key scores"),
        (["--rows", "0"], "--rows: must be 1 or more"),
    ):
        assert exit_code([*words, *more]) == 2
        assert part in capsys.readouterr().err.splitlines()[-1]

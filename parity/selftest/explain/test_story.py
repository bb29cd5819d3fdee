"""The story: it is true at a small shape, and a step that is not true ends it with exit code 1."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity.cli.main import main
from parity.explain import story, story_paths
from parity.explain.choices import PRESETS, preset
from parity.explain.explain import Settings

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
# A quarter of the width and of the lengths of the real one; the asserted bands are the same.
SCENE = story.Scene(Settings(heads=16, topk=128, cases=4, rows=8, q_lora_rank=128), CPU, contexts=(1127, 2624, 5500))


def test_short_prompts_select_everything() -> None:
    result = story.short_prompts(SCENE)
    assert "515 tokens make 128 keys" in result.lines[0]


def test_recall_and_needles_are_as_told() -> None:
    result = story.recall_without_needles(SCENE)
    rows = result.figures["rows"]
    assert all(row["unrounded"]["before"] < row["unrounded"]["after"] for row in rows)
    result = story.needle_band(SCENE)
    assert len(result.figures["rows"]) == 3


def test_a_path_that_keeps_bf16_is_caught_telling_the_story_of_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "seed-before", ("bf16 in disguise", preset("seed-after")))
    for step in (story.recall_without_needles, story.needle_band):
        with pytest.raises(story.UntrueClaim):
            step(SCENE)


def test_the_paths_are_as_told() -> None:
    scene = dataclasses.replace(SCENE, contexts=(1127,))
    result = story_paths.gather(scene)
    assert "23.1 GB" in result.lines[0]
    real = story_paths.real_kernels(scene)
    assert real.figures["fp8"]["ratio"] < 1 and real.figures["bf16"]["ratio"] < 1
    for step in (story_paths.flag, story_paths.no_fallback):
        found = step(scene)
        assert found.lines or found.not_run


def test_a_dispatch_that_ignores_the_flag_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from impl import dispatch

    scene = dataclasses.replace(SCENE, contexts=(1127,))
    if story_paths.no_triton(scene):
        pytest.skip(f"needs Triton: {story_paths.no_triton(scene)}")
    monkeypatch.setattr(dispatch, "flag", lambda name: False)
    for step in (story_paths.flag, story_paths.no_fallback):
        with pytest.raises((story.UntrueClaim, story_paths._Ran)):
            step(scene)


def test_an_untrue_step_ends_the_story() -> None:
    def wrong(scene: story.Scene) -> story.StepResult:
        return story.StepResult("wrong", [story.check_claim(False, "two is three")])

    shown: list[str] = []
    report = story.tell(SCENE, (story.short_prompts, wrong, wrong), show=shown.append)
    assert not report["passed"] and report["untrue"] == "two is three" and len(report["steps"]) == 1
    assert "NOT TRUE: two is three" in shown[-1]


def test_the_command_gives_exit_codes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reports = [{"passed": True, "steps": []}, {"passed": False, "steps": []}]
    monkeypatch.setattr(story, "tell", lambda *arguments, **named: reports.pop(0))
    out = tmp_path / "story.json"
    assert main(["story", "--device", "cpu", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["passed"] is True
    assert main(["story", "--device", "cpu"]) == 1


@pytest.mark.slow
def test_the_whole_story_from_the_command_line() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "parity", "story", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "steps shown and true" in done.stdout

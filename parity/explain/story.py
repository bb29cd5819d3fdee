"""`parity story`: the memory incident step by step on drawn data; each step asserts what it says.

A server stored the indexer's keys in fp8 and lost facts placed far back in long prompts; bf16 keys cost 23 GB in a
gather, until a kernel read them on the fly. No datum is chosen to make a point: every figure is measured when the
story is told, and only what held for every seed tried is asserted.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from parity.explain import samples
from parity.explain.choices import preset
from parity.explain.explain import Settings
from parity.explain.measure import METRICS, Measure
from parity.explain.needles import kept, plant
from parity.explain.pipeline import Pipeline

KIND, FORMAT = "indexer-parity/story", 1
CONTEXTS = (4509, 10498, 22000)  # tokens at which the incident was seen
MARGINS = (0.0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5)
REPEATS = 4  # needles of each row at each margin
BAND = (0.005, 0.01, 0.02, 0.03)
SAFE = 0.5  # margin from which both paths keep every needle
_LOSS, _REGRET = METRICS.index("loss"), METRICS.index("regret")


class UntrueClaim(AssertionError):
    """A step's sentence that the measurement does not bear out."""


def check_claim(true: bool, sentence: str) -> str:
    """The sentence if it is true; UntrueClaim otherwise."""
    if not true:
        raise UntrueClaim(sentence)
    return sentence


@dataclasses.dataclass
class Scene:
    """What the steps share: the shape, the number of contexts and rows, where to run."""

    settings: Settings
    device: torch.device
    contexts: tuple[int, ...] = CONTEXTS
    _drawn: dict[int, list[Pipeline]] = dataclasses.field(default_factory=dict, repr=False)

    def pipelines(self, tokens: int) -> list[Pipeline]:
        """The drawn contexts of a length, each with what the steps before have evaluated on it."""
        if tokens not in self._drawn:
            settings = self.settings
            source = samples.weights(settings.config(), settings.data, settings.seed, self.device)
            drawn = (samples.draw(source, i, tokens, settings.rows) for i in range(settings.cases))
            self._drawn[tokens] = [Pipeline(sample) for sample in drawn]
        return self._drawn[tokens]


@dataclasses.dataclass
class StepResult:
    """The result of one step: its lines, the figures behind them, and the reason if it could not run here."""

    title: str
    lines: list[str]
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    not_run: str | None = None


def short_prompts(scene: Scene) -> StepResult:
    """Up to topk keys everything is selected, so recall is 1 whatever the arithmetic."""
    topk = scene.settings.topk
    tokens, lines = 4 * topk + 3, []
    measure = _measures(scene, tokens)[0]
    for name in ("seed-before", "seed-after"):
        chosen = measure.pipeline.select(preset(name))
        check_claim(bool(chosen.all()), f"{name} selects every one of {topk} keys")
    longer = _measures(scene, tokens + 1)[0]
    some = longer.pipeline.select(preset("seed-before"))
    lines.append(
        check_claim(
            int(some.sum(1).max()) == topk and some.shape[1] == topk + 1,
            f"{tokens:,} tokens make {topk} keys and all {topk} are selected: recall is 1, with fp8 as with bf16, and "
            f"says nothing. At {tokens + 1:,} tokens the first key is left out.",
        )
    )
    return StepResult("Short prompts cannot show it", lines, {"tokens": tokens, "keys": topk})


def recall_without_needles(scene: Scene) -> StepResult:
    """Recall without any needle, against the published reference and against no rounding at all."""
    lines = ["  tokens    keys   against the published fp4 arithmetic   against no rounding", ""]
    lines[1] = "                   fp8 (before)  bf16 (after)           fp8 (before)  bf16 (after)"
    figures, plain = [], []
    for tokens in scene.contexts:
        row: dict[str, Any] = {"tokens": tokens, "keys": tokens // 4}
        for against in ("published", "unrounded"):
            found = [_pair(measure) for measure in _measures(scene, tokens, against)]
            before, after = (float(np.mean([pair[i][_LOSS] for pair in found])) for i in (0, 1))
            row[against] = {"before": 1 - before, "after": 1 - after}
            if against == "unrounded":
                plain.append((before, after))
        published, free = row["published"], row["unrounded"]
        lines.append(
            f"{tokens:8,d} {tokens // 4:7,d}         {published['before']:.3f}         {published['after']:.3f}"
            f"                  {free['before']:.4f}        {free['after']:.4f}"
        )
        figures.append(row)
    lines.append(
        check_claim(
            all(before > 2 * after for before, after in plain),
            "Measured against no rounding, fp8 loses more than twice what bf16 loses at every length.",
        )
    )
    gaps = [abs(row["published"]["before"] - row["published"]["after"]) for row in figures]
    lost = [1 - row["published"]["after"] for row in figures]
    lines.append(
        check_claim(
            all(gap < 0.25 * loss for gap, loss in zip(gaps, lost, strict=True)),
            "Against the reference the two hardly differ: both leave out its fp4 step, which costs more than four "
            "times as much as fp8 does over bf16.",
        )
    )
    lines.append(
        check_claim(
            all(a["published"]["after"] > b["published"]["after"] for a, b in itertools.pairwise(figures)),
            "And recall falls as the context grows.",
        )
    )
    return StepResult("Recall, without any needle", lines, {"rows": figures})


def needle_band(scene: Scene) -> StepResult:
    """Which margins over the cutoff survive fp8, and which survive bf16."""
    head = "  tokens  path        " + "".join(f"{margin:>8.3f}" for margin in MARGINS) + "   (standard deviations)"
    lines, figures = [head], []
    for tokens in scene.contexts:
        found = retrieval(scene, tokens, ("seed-before", "seed-after", "published"))
        for name, label in (("seed-after", "bf16"), ("seed-before", "fp8"), ("published", "published")):
            cells = "".join(f"{100 * share:7.1f}%" for share in found[name])
            lines.append(f"{tokens:8,d}  {label:11s}{cells}")
        at = [MARGINS.index(margin) for margin in BAND]
        fp8, bf16 = (float(found[name][at].mean()) for name in ("seed-before", "seed-after"))
        check_claim(
            fp8 < bf16, f"in the band fp8 retrieves {fp8:.3f}, fewer than bf16's {bf16:.3f}, at {tokens:,} tokens"
        )
        safe = [i for i, margin in enumerate(MARGINS) if margin >= SAFE]
        for name in ("seed-before", "seed-after"):
            check_claim(bool((found[name][safe] == 1).all()), f"{name} keeps every needle from {SAFE} deviations on")
        crowd = float(np.mean([crowded(measure) for measure in _measures(scene, tokens)]))
        figures.append({"tokens": tokens, "crowd": crowd, **{name: share.tolist() for name, share in found.items()}})
    lines.append(
        f"Between {BAND[0]} and {BAND[-1]} deviations over the cutoff fp8 loses needles that bf16 keeps, at every "
        f"length; from {SAFE} on both keep all."
    )
    far = MARGINS.index(0.1)
    lines.append(
        check_claim(
            all(figure["published"][far] < figure["seed-before"][far] for figure in figures),
            "The published fp4 arithmetic, with which the model was trained, moves needles more than fp8 does.",
        )
    )
    crowds = [figure["crowd"] for figure in figures]
    lines.append(
        check_claim(
            all(a < b for a, b in itertools.pairwise(crowds)),
            f"A longer context puts more keys into the band: within {BAND[-1]} deviations of a row's cutoff lie "
            f"{', '.join(f'{crowd:.1f}' for crowd in crowds)} keys.",
        )
    )
    return StepResult("A needle, by its margin over the cutoff", lines, {"margins": list(MARGINS), "rows": figures})


def retrieval(scene: Scene, tokens: int, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Share of needles among the selected keys at each of MARGINS, over all contexts and rows, by configuration."""
    shares: dict[str, list[np.ndarray]] = {name: [] for name in names}
    for number, pipeline in enumerate(scene.pipelines(tokens)):
        needles = plant(pipeline, MARGINS * REPEATS, scene.settings.seed + number)
        for name in names:
            c = preset(name)
            found = kept(pipeline, c, needles).cpu().numpy()
            shares[name].append(found.reshape(REPEATS, len(MARGINS)).mean(0))
    return {name: np.mean(each, axis=0) for name, each in shares.items()}


def crowded(measure: Measure) -> float:
    """Keys within BAND[-1] standard deviations of the cutoff of the unrounded scores, the mean over rows."""
    logits = measure.pipeline.logits(preset("unrounded"))
    cutoff = logits.topk(measure.pipeline.sample.config.topk, dim=1).values[:, -1:]
    near = (logits - cutoff).abs() <= BAND[-1] * logits.std(1, keepdim=True, correction=0)
    return float(near.sum(1).double().mean())


def _pair(measure: Measure) -> tuple[np.ndarray, np.ndarray]:
    return measure(preset("seed-before")), measure(preset("seed-after"))


def _measures(scene: Scene, tokens: int, against: str = "published") -> list[Measure]:
    return [Measure(pipeline, preset(against)) for pipeline in scene.pipelines(tokens)]


def tell(
    scene: Scene,
    steps: Sequence[Callable[[Scene], StepResult]],
    *,
    show: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Run the steps in order and show each when it is done; stops at the first UntrueClaim. The report, JSON types."""
    done: list[dict[str, Any]] = []
    report: dict[str, Any] = {"kind": KIND, "format": FORMAT, "passed": True, "steps": done}
    for number, step in enumerate(steps, 1):
        started = time.perf_counter()
        try:
            result = step(scene)
        except UntrueClaim as error:
            show(f"\n{number}. {step.__name__.replace('_', ' ')}: NOT TRUE: {error}")
            report["passed"] = False
            report["untrue"] = str(error)
            break
        seconds = time.perf_counter() - started
        show(f"\n{number}. {result.title}" + (f" [not run: {result.not_run}]" if result.not_run else ""))
        for line in result.lines:
            show(f"   {line}")
        done.append({**dataclasses.asdict(result), "seconds": round(seconds, 2)})
    return report

"""`parity explain`: measures a configuration against a reference and shares the loss among the choices it makes."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from parity.explain import advice, attribution, live, samples
from parity.explain.choices import BY_NAME, Configuration, differing
from parity.explain.measure import METRICS, Measure, interval
from parity.explain.needles import plant
from parity.explain.pipeline import Pipeline, select
from parity.pages.layout import PAGE
from reference.config import IndexerConfig

KIND, FORMAT = "indexer-parity/explain", 1
MARGINS = (0.05, 0.2, 0.5)
CONTEXTS = (2044, 4509, 10498, 22000, 65536)
MAP_PAGES = 96  # columns of the disagreement map


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to measure on. `tokens` of context, `cases` contexts with `rows` queries each, `pairs` of drawn orders."""

    heads: int = 64
    topk: int = 512
    tokens: int = 22000
    cases: int = 10
    rows: int = 8
    pairs: int = 2
    data: str = "gaussian"
    seed: int = 0
    q_lora_rank: int = 1024
    margins: tuple[float, ...] = MARGINS
    contexts: tuple[int, ...] = CONTEXTS
    device: str = "cpu"

    def config(self) -> IndexerConfig:
        """The indexer's shape."""
        return IndexerConfig(dim=4096, q_lora_rank=self.q_lora_rank, n_heads=self.heads, topk=self.topk, wq_b="fp8")

    def weights(self) -> samples.Weights:
        """The model's part of the draw."""
        return samples.weights(self.config(), self.data, self.seed, torch.device(self.device))


def measures(settings: Settings, reference: Configuration, drawn: Iterable[samples.Sample]) -> Iterable[Measure]:
    """A Measure for each context, its needles planted unless the context selects everything."""
    for number, sample in enumerate(drawn):
        pipeline = Pipeline(sample)
        longer = int(sample.lens.min()) > sample.config.topk
        needles = plant(pipeline, settings.margins, settings.seed + 1000 * number) if longer else None
        yield Measure(pipeline, reference, needles)


def explain(
    reference: Configuration,
    target: Configuration,
    settings: Settings,
    *,
    captured: Sequence[samples.Sample] = (),
    impl: Any = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The whole report as JSON types: totals, every choice's share, alone, removed, the path, contexts, advice.

    `captured` replaces drawn contexts; `impl` adds a real implementation's deviation from the emulated scores.
    ValueError when the configurations are equal and there is no implementation.
    """
    players = differing(reference, target)
    if not players and impl is None:
        raise ValueError("preset: it equals the reference, so there is nothing to explain")
    started = time.perf_counter()
    source = None if captured else settings.weights()
    cases = len(captured) or settings.cases
    found: list[_Case] = []
    for number in range(cases):
        sample = captured[number] if source is None else samples.draw(source, number, settings.tokens, settings.rows)
        (measure,) = measures(settings, reference, [sample])
        found.append(_one(measure, target, players, settings, number, impl))
        say(f"parity explain: context {number + 1} of {cases}, {time.perf_counter() - started:.0f} s")
    order = _worst_first(players, found)
    report: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "reference": reference.departures(),
        "target": target.departures(),
        "settings": described(settings, found),
        "exact": len(players) <= attribution.EXACT_UP_TO,
        "total": _taking(players, found, target),
        "reference_needles": _taking((), found, target),
        "choices": [_choice(name, players.index(name), reference, target, found, order) for name in order],
        "map": _map(found[0], target),
    }
    if impl is not None:
        parts = numbers([case.kernel - case.measure(target) for case in found])
        report["kernel"] = {"implementation": impl.name, "share": parts}
        report["total_with_kernel"] = numbers([case.kernel for case in found])
    report["advice"] = advice.measured(report, [case.measure for case in found], target)
    if source is not None:
        report["contexts"] = [_context(source, settings, reference, target, tokens) for tokens in settings.contexts]
    report["keys"] = max(case.measure.pipeline.sample.keys for case in found)
    report["sentence"] = advice.sentence(report)
    report["seconds"] = round(time.perf_counter() - started, 1)
    return report


@dataclasses.dataclass
class _Case:
    """What one context gave: shares and the error of drawn orders, [players, metrics], and the kernel's own metrics."""

    measure: Measure
    shares: np.ndarray
    order_error: np.ndarray
    kernel: np.ndarray


def _one(
    measure: Measure, target: Configuration, players: Sequence[str], settings: Settings, number: int, impl: Any
) -> _Case:
    def value(taken: Iterable[str]) -> np.ndarray:
        return measure.mixture(target, taken)

    # Every context draws orders of its own, so the spread over contexts contains the drawing of orders.
    rng = random.Random(f"{settings.seed} {number}")
    blank = np.zeros((0, len(METRICS)))
    shares, error = attribution.shares(value, players, settings.pairs, rng) if players else (blank, blank)
    for name in players:  # the report asks for these: measured while the dots are still there, and kept
        value({name})
        value(set(players) - {name})
    kernel = measure(target)
    if impl is not None:
        pipeline = measure.pipeline
        own = live.logits(impl, pipeline, target, number)
        chosen = select(own, pipeline.width(target), pipeline.sample.lens)
        kernel = measure.judge(chosen, own, pipeline.width(target), None)
    measure.pipeline.forget("dots")
    return _Case(measure, shares, error, kernel)


def _worst_first(players: Sequence[str], found: Sequence[_Case]) -> list[str]:
    """Choices by their share of the loss, where that is level by their share of the logits' error."""
    shares = np.mean([case.shares for case in found], axis=0)[:, [METRICS.index("loss"), METRICS.index("error")]]
    return sorted(players, key=lambda name: tuple(-shares[players.index(name)]))


def _taking(taken: Iterable[str], found: Sequence[_Case], target: Configuration) -> dict[str, Any]:
    """Metrics of the reference with the target's values of the choices `taken`, over all contexts."""
    return numbers([case.measure.mixture(target, taken) for case in found])


def _choice(
    name: str,
    place: int,
    reference: Configuration,
    target: Configuration,
    found: Sequence[_Case],
    order: Sequence[str],
) -> dict[str, Any]:
    # The errors of different contexts' orders are independent.
    error = np.sqrt(np.mean([case.order_error[place] ** 2 for case in found], axis=0) / len(found))
    return {
        "choice": name,
        "from": reference[name],
        "to": target[name],
        "phrase": BY_NAME[name].phrase(target[name]),
        "share": numbers([case.shares[place] for case in found]),
        "order_error": {metric: float(1.96 * x) for metric, x in zip(METRICS, error, strict=True)},
        "alone": _taking({name}, found, target),
        "removed": _taking(set(order) - {name}, found, target),
        "path": _taking(order[: order.index(name) + 1], found, target),
    }


def known(value: float) -> float | None:
    """A number for JSON; None where there is none."""
    return float(value) if math.isfinite(value) else None


def numbers(values: Sequence[np.ndarray]) -> dict[str, dict[str, float | None]]:
    """{metric: {mean, half}} of one vector of METRICS per context: half the width of the 95 % interval of the mean.

    None where there is no needle or one context."""
    return {name: {"mean": known(m), "half": known(h)} for name, m, h in zip(METRICS, *interval(values), strict=True)}


def described(settings: Settings, found: Sequence[_Case]) -> dict[str, Any]:
    """The settings as JSON types, with what was really measured."""
    named = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    sample = found[0].measure.pipeline.sample
    return named | {
        "cases": len(found),
        "rows": sample.gate.shape[0],
        "keys": sample.keys,
        "heads": sample.config.n_heads,
        "sample": sample.name,
        "margins": list(settings.margins),
        "contexts": list(settings.contexts),
    }


def _context(
    source: samples.Weights, settings: Settings, reference: Configuration, target: Configuration, tokens: int
) -> dict[str, Any]:
    """Totals at another context length, from at most 3 contexts; where everything is selected there is no loss."""
    drawn = [samples.draw(source, 100 + i, tokens, settings.rows) for i in range(min(3, settings.cases))]
    found = [measure(target) for measure in measures(settings, reference, drawn)]
    return {"tokens": tokens, "keys": tokens // 4, "total": numbers(found)}


def _map(case: _Case, target: Configuration) -> dict[str, Any]:
    """Keys missed by row and by page (at most 96 groups of pages) on the first context."""
    pipeline = case.measure.pipeline
    missed = pipeline.select(case.measure.reference) & ~pipeline.select(target)
    pages = -(-missed.shape[1] // PAGE)
    group = -(-pages // MAP_PAGES)
    span = PAGE * group
    padded = torch.nn.functional.pad(missed.to(torch.int32), (0, -missed.shape[1] % span))
    counts = padded.unflatten(1, (-1, span)).sum(2)
    return {"pages_per_column": group, "missed": counts.tolist(), "selected": pipeline.width(target)}

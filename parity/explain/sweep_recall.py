"""`parity sweep recall`: recall, regret and needles against context length, per configuration and data model."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from parity.explain import samples
from parity.explain.choices import Configuration, preset, settings
from parity.explain.explain import Settings, known, numbers
from parity.explain.measure import Measure, interval
from parity.explain.needles import Needles, kept, plant
from parity.explain.pipeline import Pipeline
from parity.explain.rounding import SLOT_BYTES

KIND, FORMAT = "indexer-parity/sweep-recall", 1
# 1K to 1M tokens, among them the lengths at which the incident was seen.
TOKENS = (1024, 2048, 4096, 4509, 10498, 22000, 65536, 262144, 1048576)
CONFIGURATIONS = (
    "seed-before",
    "seed-after",
    "sglang-fp4",
    "vllm-fp8",
    "transformers-bf16",
    "published+store=fp8",
    "published+store=fp8-pow2",
)
NEEDLES = 4  # of each row at each margin
MARGINS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
CAVEAT = (
    "Drawn data, not a model's: real keys and queries may behave differently. --captured takes a model's own tensors."
)


def configuration(text: str) -> Configuration:
    """The configuration `PRESET[+choice=value...]` names; ValueError for an unknown preset, choice or value."""
    name, *changes = text.split("+")
    return preset(name).having(**settings(changes))


def sweep(
    tokens: Sequence[int],
    configurations: Sequence[str],
    models: Sequence[str],
    options: Settings,
    *,
    against: str = "published",
    captured: Sequence[samples.Sample] = (),
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """{kind, format, rows: [{data, tokens, keys, configuration, store_bytes, metrics, needles}], ...}, JSON types.

    `metrics` are those of `measure.METRICS` against `against`, `needles` the share retrieved at each margin (absent
    where everything is selected). Of each context length `options.cases` contexts are drawn, or `captured` is used.
    """
    named = {text: configuration(text) for text in configurations}
    reference = configuration(against)
    started, rows = time.perf_counter(), []
    for model in ("captured",) if captured else models:
        source = None if captured else dataclasses.replace(options, data=model).weights()
        for count in sorted({len_of(sample) for sample in captured}) if captured else tokens:
            if source is None:
                drawn = [sample for sample in captured if len_of(sample) == count]
            else:
                drawn = [samples.draw(source, 1000 + i, count, options.rows) for i in range(options.cases)]
            rows += _at(model, count, drawn, named, reference, options)
            say(f"parity sweep recall: {model}, {count:,} tokens, {time.perf_counter() - started:.0f} s")
    return {
        "kind": KIND,
        "format": FORMAT,
        "against": against,
        "margins": list(options.margins),
        "settings": {"heads": options.heads, "topk": options.topk, "rows": options.rows, "cases": options.cases}
        | {"seed": options.seed, "device": options.device},
        "caveat": "" if captured else CAVEAT,
        "rows": rows,
        "seconds": round(time.perf_counter() - started, 1),
    }


def len_of(sample: samples.Sample) -> int:
    """Tokens of a captured context: the longest position of its queries and one."""
    return int(sample.positions.max()) + 1


def _at(
    model: str,
    tokens: int,
    drawn: Sequence[samples.Sample],
    named: Mapping[str, Configuration],
    reference: Configuration,
    options: Settings,
) -> list[dict[str, Any]]:
    """One row per configuration at one context length."""
    found: dict[str, list[np.ndarray]] = {name: [] for name in named}
    found_needles: dict[str, list[np.ndarray]] = {name: [] for name in ("reference", *named)}
    for number, sample in enumerate(drawn):
        pipeline = Pipeline(sample)
        longer = int(sample.lens.min()) > sample.config.topk
        needles = plant(pipeline, options.margins * NEEDLES, options.seed + number) if longer else None
        measure = Measure(pipeline, reference)
        pipeline.select(reference)
        found_needles["reference"].append(retrieved(pipeline, reference, needles))
        pipeline.forget("keys")
        for name, c in named.items():
            found[name].append(measure(c))
            found_needles[name].append(retrieved(pipeline, c, needles))
            pipeline.forget("keys", "queries")
    rows = []
    for name, c in {"reference": reference, **named}.items():
        rows.append(
            {
                "data": model,
                "tokens": tokens,
                "keys": max(sample.keys for sample in drawn),
                "configuration": name,
                "store": c["store"],
                "store_bytes": SLOT_BYTES[c["store"]],
                "metrics": numbers(found[name]) if name in found else None,
                "needles": _curve(found_needles[name]),
            }
        )
    return rows


def retrieved(pipeline: Pipeline, c: Configuration, needles: Needles | None) -> np.ndarray:
    """Share of needles retrieved at each margin, float64 [m]; empty without needles."""
    if needles is None:
        return np.zeros(0)
    found = kept(pipeline, c, needles).cpu().numpy().reshape(NEEDLES, -1)
    known = np.isfinite(found)
    return np.where(known, found, 0).sum(0) / np.where(known.any(0), known.sum(0), np.nan)


def _curve(shares: Sequence[np.ndarray]) -> list[dict[str, float | None]] | None:
    if not len(shares[0]):
        return None
    return [{"mean": known(m), "half": known(h)} for m, h in zip(*interval(shares), strict=True)]

"""The second half of the story: the real kernels, the gather that does not fit, the flag, and that no fallback ran."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from parity.explain import live, sweep_memory
from parity.explain.choices import preset
from parity.explain.measure import METRICS, Measure
from parity.explain.pipeline import Pipeline, select
from parity.explain.samples import draw, weights
from parity.explain.story import Scene, StepResult, check_claim
from parity.numerics.bounds import expected
from parity.ops.paged_logits.builtin import FLAG, STRICT
from parity.ops.paged_logits.judge import compare_bounded
from parity.pages.layout import PAGE, find
from parity.results import Status
from parity.run import interpreter, memory, registry

PATHS = (("seed-before", "fp8"), ("seed-after", "bf16"))
# A matrix unit adds fp8 products with fewer bits than float32, which moves keys that are level with the cutoff.
NEAR = 0.005
SMALL = (64, 1127)  # rows and keys of the gather that is measured where the real one cannot be


@contextlib.contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables set (or removed, with None) inside the block."""
    with mock.patch.dict(os.environ, {name: value for name, value in values.items() if value is not None}):
        for name, value in values.items():
            if value is None:
                os.environ.pop(name, None)
        yield


def no_triton(scene: Scene) -> str | None:
    """Why the Triton kernels cannot run here, or None."""
    return registry.builtin(scene.device)["triton-bf16"].absent


def _context(scene: Scene) -> Measure:
    """A short context, with few rows where kernels are interpreted, at a fifth of a second a row."""
    settings = scene.settings
    source = weights(settings.config(), settings.data, settings.seed, scene.device)
    rows = settings.rows if scene.device.type == "cuda" else 2
    return Measure(Pipeline(draw(source, 0, scene.contexts[0], rows)), preset("published"))


def _call(given: live.Operands) -> torch.Tensor:
    from impl import dispatch

    with interpreter.corrected():
        return dispatch.paged_mqa_logits(**given.kwargs())


def real_kernels(scene: Scene) -> StepResult:
    """The figures above are emulated; the kernels on real pages give the same, within their proved bounds."""
    missing = no_triton(scene)
    kernel = "torch" if missing else "triton"
    measure, lines, figures = _context(scene), [], {}
    pipeline = measure.pipeline
    for name, layout in PATHS:
        c = preset(name)
        given = live.operands(pipeline, c)
        with environment(**{FLAG: "0" if missing else "1", STRICT: "1"}):
            out = _call(given)
        contract = registry.builtin(scene.device)[f"{kernel}-{layout}"].contract
        verdict = compare_bounded(out, expected(given, contract), given, contract=contract)
        check_claim(verdict.status is Status.PASSED, f"{kernel} {layout} is within its bound: {verdict.message}")
        chosen = select(out, pipeline.width(c), pipeline.sample.lens)
        loss = measure.judge(chosen, out, pipeline.width(c), None)[METRICS.index("loss")]
        emulated = measure(c)[METRICS.index("loss")]
        ratio = 0.0 if verdict.ratio is None else verdict.ratio
        lines.append(
            check_claim(
                abs(loss - emulated) <= NEAR,
                f"{kernel} {layout}: worst error {ratio:.3g} of the bound; recall {1 - loss:.4f}, emulated "
                f"{1 - emulated:.4f}",
            )
        )
        figures[layout] = {"ratio": ratio, "recall": 1 - float(loss), "emulated": 1 - float(emulated)}
    return StepResult("The kernels themselves, on pages", lines, figures)


def gather(scene: Scene) -> StepResult:
    """Bf16 keys through the old gather: 23 GB for one call."""
    rows, keys = sweep_memory.STORY
    guess = sweep_memory.predicted("gather-bf16", rows, keys)
    pages = keys // PAGE
    wanted = memory.gather_bytes(rows, pages, find("bf16").page_bytes)
    lines = [
        check_claim(
            wanted > 16e9,
            f"{rows:,} rows x {pages} pages x 64 slots x 256 bytes: the gather needs {wanted / 1e9:.1f} GB, and with "
            f"its scores {guess.workspace / 1e9:.1f} GB; a 16 GB GPU has neither.",
        )
    ]
    figures: dict[str, Any] = {"wanted": wanted, "predicted": guess.workspace}
    shape = (rows, keys) if sweep_memory.reason(scene.device, guess) is None else SMALL
    if shape == SMALL:
        lines.append(f"Measured where it fits, {SMALL[0]} rows x {SMALL[1]:,} keys:")
    else:
        lines.append("Measured here, at that size:")
    heads = scene.settings.heads
    found = sweep_memory.measured("gather-bf16", *shape, heads, scene.device)
    here = sweep_memory.predicted("gather-bf16", *shape, heads).workspace
    sentence = (
        f"the gather takes {found['workspace'] / 1e6:,.1f} MB besides inputs and result ({here / 1e6:,.1f} predicted)"
    )
    lines.append(check_claim(abs(found["workspace"] / here - 1) < 0.05, sentence))
    figures["gather"] = found
    chunked = sweep_memory.measured("torch-bf16", *shape, heads, scene.device)
    sentence = f"the torch path in chunks takes {chunked['workspace'] / 1e6:,.1f} MB, under its budget of 268.4"
    lines.append(check_claim(chunked["workspace"] <= memory.WORKSPACE, sentence))
    figures["torch"] = chunked
    if no_triton(scene) is None:
        few = shape if scene.device.type == "cuda" else (2, SMALL[1])  # interpreted: the rows decide the time
        with interpreter.corrected():
            kernel = sweep_memory.measured("triton-bf16", *few, heads, scene.device)
        sentence = f"the Triton kernel takes {kernel['workspace']:,} bytes"
        lines.append(check_claim(kernel["workspace"] <= 1 << 20, sentence))
        figures["triton"] = kernel
    return StepResult("The gather that does not fit", lines, figures)


def flag(scene: Scene) -> StepResult:
    """TRITON_INDEXER=1 routes to the kernel, unset to torch, and both give the same logits within the bound."""
    title = "The flag that routes around it"
    if missing := no_triton(scene):
        return StepResult(title, [], not_run=missing)
    from impl import dispatch

    given = live.operands(_context(scene).pipeline, preset("seed-after"))
    routes = {}
    for value in (None, "1"):
        with environment(**{FLAG: value, STRICT: None}):
            out = _call(given)
        route = dispatch.last_route()
        assert route is not None
        routes[value] = (route, out)
        contract = registry.builtin(scene.device)[f"{route.name}-bf16"].contract
        verdict = compare_bounded(out, expected(given, contract), given, contract=contract)
        check_claim(verdict.status is Status.PASSED, f"{route.kernel} is within its bound: {verdict.message}")
    lines = [
        check_claim(routes[None][0].name == "torch", f"{FLAG} unset: {routes[None][0].kernel} ran"),
        check_claim(routes["1"][0].name == "triton", f"{FLAG}=1: {routes['1'][0].kernel} ran, in Triton"),
        "Both results lie within their bounds of the exact logits.",
    ]
    return StepResult(title, lines, {"unset": routes[None][0].kernel, "1": routes["1"][0].kernel})


class _Ran(Exception):
    """Raised by the trap that stands in for the fallback."""


def no_fallback(scene: Scene) -> StepResult:
    """With the fallback replaced by a trap the flagged call still answers; without the flag the trap springs."""
    title = "The proof that the fallback did not run"
    if missing := no_triton(scene):
        return StepResult(title, [], not_run=missing)
    from impl import dispatch

    def trap(*arguments: Any, **named: Any) -> Any:
        raise _Ran

    given = live.operands(_context(scene).pipeline, preset("seed-after"))
    with mock.patch.object(dispatch, "torch_bf16_paged_mqa_logits", trap):
        with environment(**{FLAG: "1", STRICT: None}):
            out = _call(given)
        sprung = False
        with environment(**{FLAG: None, STRICT: None}):
            try:
                _call(given)
            except _Ran:
                sprung = True
    lines = [
        check_claim(
            bool(torch.isfinite(out).all()),
            f"With the torch path replaced by a trap, {FLAG}=1 still returns every logit.",
        ),
        check_claim(sprung, "Without the flag the same call springs the trap, so the trap would have shown it."),
    ]
    refused = ""
    with (
        mock.patch.object(dispatch, "_triton", side_effect=dispatch.Unsupported("the kernel does not fit this GPU")),
        environment(**{FLAG: "1", STRICT: "1"}),
    ):
        try:
            _call(given)
        except dispatch.Unsupported as error:
            refused = str(error)
    lines.append(check_claim(bool(refused), f"And where the kernel cannot run, {STRICT}=1 raises: {refused}"))
    return StepResult(title, lines)

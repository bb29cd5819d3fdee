"""`parity story`: 0 if every step's sentence is true, 1 at the first that is not."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import write_json
from parity.vocabulary import FAILED, PASSED


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=shared.count, default=0, help="draw other data (default: %(default)s)")
    shared.add_device(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.explain import story, story_paths
    from parity.explain.explain import Settings
    from parity.run.device import provenance

    device = shared.device_of(options)
    scene = story.Scene(Settings(cases=4, rows=8, seed=options.seed, device=str(device)), device)
    steps = (story.short_prompts, story.recall_without_needles, story.needle_band)
    more = (story_paths.real_kernels, story_paths.gather, story_paths.flag, story_paths.no_fallback)
    print(
        f"The story on {device}, seed {options.seed}. Data is drawn, not a model's: real keys may behave differently."
    )
    report = story.tell(scene, (*steps, *more), show=lambda text: print(text, flush=True))
    count = len(report["steps"])
    skipped = sum(step["not_run"] is not None for step in report["steps"])
    end = f"{count - skipped} steps shown and true" + (f", {skipped} not run" if skipped else "")
    print(f"\n{end}." if report["passed"] else "\nThe story is not true here.")
    write_json(options.json, report | {"provenance": provenance(device)})
    return PASSED if report["passed"] else FAILED

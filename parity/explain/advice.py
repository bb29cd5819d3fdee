"""The closing sentence of an explanation: what the loss comes from and what would remove it, every part measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parity.explain.choices import BY_NAME, Configuration
from parity.explain.measure import METRICS, Measure
from parity.explain.rounding import SLOT_BYTES

ENOUGH = 0.1  # restore choices, worst first, until a tenth of the loss is left
NAMED = 4  # choices that the sentence names
CHEAPER = ("fp4", "fp8-pow2", "bf16")
_LOSS = METRICS.index("loss")


def measured(report: dict[str, Any], measures: Sequence[Measure], target: Configuration) -> dict[str, Any]:
    """{restored: {choice: value}, loss, store, exact_stores: {format: share of keys held exactly}}.

    Choices are restored worst first until a tenth of the loss is left; an fp8 format is first given a power-of-two
    scale, and bf16 only if that is not as good. A store holds a key exactly when its value is the one that reaches it.
    """

    def lost(c: Configuration) -> float:
        return float(np.mean([measure(c)[_LOSS] for measure in measures]))

    loss = report["total"]["loss"]["mean"]
    restored: dict[str, str] = {}
    left, fixed = loss, target
    for entry in report["choices"]:
        if loss <= 0 or left <= ENOUGH * loss:
            break
        name = entry["choice"]
        better = fixed.having(**{name: entry["from"]})
        left = lost(better)
        if mild := BY_NAME[name].milder.get(entry["to"]):
            cheap = fixed.having(**{name: mild})
            if lost(cheap) <= left:
                better = cheap
        restored[name] = better[name]
        fixed = better
    bytes_now = SLOT_BYTES[target["store"]]
    candidates = [target["store"], *(form for form in CHEAPER if SLOT_BYTES[form] <= bytes_now)]
    exact = {form: _exact(measures, fixed.having(store=form)) for form in dict.fromkeys(candidates)}
    return {"restored": restored, "loss": left, "store": target["store"], "exact_stores": exact}


def _exact(measures: Sequence[Measure], c: Configuration) -> float:
    """Share of keys whose stored value is the one that reached the store, over all contexts."""
    found = []
    for measure in measures:
        before = measure.pipeline.keys(c.having(store="float32")).values()
        found.append(float((measure.pipeline.keys(c).values() == before).all(1).to(torch.float64).mean()))
    return float(np.mean(found))


def sentence(report: dict[str, Any]) -> str:
    """The loss, the choices it comes from (at least a twentieth each), what restoring them gives, and the store."""
    settings, total = report["settings"], report.get("total_with_kernel", report["total"])
    loss, half = total["loss"]["mean"], total["loss"]["half"]
    where = f"at {settings['keys']:,} keys with the top {settings['topk']:,}"
    if loss <= 0:
        return f"Nothing is lost {where}: every selection equals the reference's."
    parts = [(entry["share"]["loss"]["mean"], entry["phrase"]) for entry in report["choices"]]
    if "kernel" in report:
        kernel = report["kernel"]
        parts.append((kernel["share"]["loss"]["mean"], f"{kernel['implementation']} itself against its emulation"))
    parts.sort(key=lambda part: -part[0])
    named = [part for i, part in enumerate(parts) if i == 0 or (part[0] >= loss / 20 and i < NAMED)]
    rest = sum(part[0] for part in parts) - sum(part[0] for part in named)
    words = [f"{_points(share)} from {phrase}" for share, phrase in named]
    if len(parts) > len(named):
        words.append(f"{_points(rest)} from the other {len(parts) - len(named)} together")
    about = "" if half is None else f" ± {_percent(half)}"
    text = f"Of the {_percent(loss)}{about} of selections that differ from the reference {where}, "
    text += f"{_listed(words)} (points)."
    return text + _remedy(report["advice"], loss) + _store(report["advice"])


def _remedy(advice: dict[str, Any], loss: float) -> str:
    if not advice["restored"]:
        return ""
    names = _listed([f"{name}={value}" for name, value in advice["restored"].items()])
    return f" Setting {names} brings recall from {1 - loss:.4f} to {1 - advice['loss']:.4f}."


def _store(advice: dict[str, Any]) -> str:
    """The smallest store that would hold the keys exactly, where it is smaller or more exact than the present one."""
    now = advice["store"]
    exact = advice["exact_stores"]
    better = [form for form in exact if exact[form] == 1.0 and (exact[now] < 1.0 or SLOT_BYTES[form] < SLOT_BYTES[now])]
    better = sorted((form for form in better if SLOT_BYTES[form] <= SLOT_BYTES[now]), key=lambda form: SLOT_BYTES[form])
    if not better:
        return ""
    offers = [f"{SLOT_BYTES[form]} bytes per slot ({BY_NAME['store'].values[form]})" for form in reversed(better)]
    held = f"{now} as it is holds {_percent(exact[now])} of them exactly"
    return f" Keys would then be held exactly at {_listed(offers, 'or')}; {held}."


def _points(share: float) -> str:
    return f"{100 * share:.1f}" if abs(share) >= 5e-4 else f"{100 * share:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if abs(share) >= 5e-4 or share == 0 else f"{100 * share:.2f} %"


def _listed(words: Sequence[str], last: str = "and") -> str:
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} {last} {words[-1]}"

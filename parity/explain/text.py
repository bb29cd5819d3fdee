"""How the results of `parity explain` and `parity sweep recall` read on a terminal."""

from __future__ import annotations

from typing import Any

from parity.explain.choices import CHOICES, PRESETS


def listing() -> list[str]:
    """Choices with their values, the published one first, and the presets with what they change."""
    lines = ["choices (the published value first):"]
    for choice in CHOICES:
        values = ", ".join(choice.values) + (", or a number" if choice.number else "")
        lines.append(f"  {choice.name:16s} {values:42s} {choice.about}")
    lines.append("presets:")
    for name, (about, c) in PRESETS.items():
        lines.append(f"  {name:18s} {about}")
        changes = " ".join(f"{key}={value}" for key, value in c.departures().items())
        lines += [f"  {'':18s} {changes}"] if changes else []
    return lines


def table(report: dict[str, Any], name: str, against: str) -> list[str]:
    """The report as lines: totals, choices worst first, other contexts, and the sentence."""
    settings, total = report["settings"], report["total"]
    needles = _number(report["reference_needles"]["needles_lost"]["mean"], ".3f")
    lost = _number(total["needles_lost"]["mean"], ".3f")
    lines = [
        f"{name} against {against}: {settings['data']}, {settings['keys']:,} keys, top {settings['topk']}, "
        f"{settings['heads']} heads, {settings['cases']} contexts x {settings['rows']} rows",
        f"recall {1 - total['loss']['mean']:.4f} ± {_number(total['loss']['half'], '.4f')}, regret "
        f"{total['regret']['mean']:.5f}, logits error {total['error']['mean']:.4f}, needles lost {lost} "
        f"(by the reference {needles})",
        "",
        f"{'choice':16s} {'value':10s} {'share of loss':>16s} {'alone':>8s} {'removed':>8s} {'path':>8s} "
        f"{'regret':>8s} {'needle rank':>11s} {'error':>7s}",
    ]
    for entry in report["choices"]:
        share = entry["share"]
        lines.append(
            f"{entry['choice']:16s} {entry['to']:10s} {_points(share['loss']):>16s} "
            f"{100 * entry['alone']['loss']['mean']:7.2f}% {100 * entry['removed']['loss']['mean']:7.2f}% "
            f"{100 * entry['path']['loss']['mean']:7.2f}% {100 * share['regret']['mean']:7.3f}% "
            f"{_number(entry['alone']['needle_rank']['mean'], '.0f'):>11s} {entry['alone']['error']['mean']:7.4f}"
        )
    if "kernel" in report:
        kernel = report["kernel"]
        lines.append(f"{kernel['implementation'][:27]:27s} {_points(kernel['share']['loss']):>16s}")
    how = "exact over all orders" if report["exact"] else "over drawn orders, whose error the intervals contain"
    lines += ["", f"shares: percentage points of the selection, {how}; ± is a 95 % interval over contexts"]
    if report.get("contexts"):
        lines.append("recall by context: " + ", ".join(_context(entry) for entry in report["contexts"]))
    return [*lines, "", report["sentence"], f"({report['seconds']:.0f} s)"]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _points(value: dict[str, Any]) -> str:
    half = None if value["half"] is None else 100 * value["half"]
    return f"{100 * value['mean']:.2f} ± {_number(half, '.2f')}"


def _context(entry: dict[str, Any]) -> str:
    return f"{1 - entry['total']['loss']['mean']:.3f} at {entry['tokens']:,} tokens"


def recall_table(report: dict[str, Any], against: str) -> list[str]:
    """A sweep of recall as lines, one per data model, context and configuration."""
    lines = [
        f"{'data':16s} {'tokens':>9s} {'configuration':28s} {'bytes':>5s} {'recall':>7s} {'regret':>8s}  needles kept"
    ]
    for row in report["rows"]:
        metrics = row["metrics"]
        recall = f"{1 - metrics['loss']['mean']:7.4f} {metrics['regret']['mean']:8.5f}" if metrics else f"{'':16s}"
        kept = " ".join(_number(each["mean"], ".2f") for each in row["needles"] or ())
        name = against if row["configuration"] == "reference" else row["configuration"]
        lines.append(f"{row['data']:16s} {row['tokens']:9,d} {name:28s} {row['store_bytes']:5d} {recall}  {kept}")
    margins = ", ".join(f"{margin:g}" for margin in report["margins"])
    lines.append(f"recall and regret against {against}; needles at margins {margins} standard deviations")
    return lines + ([report["caveat"]] if report["caveat"] else [])

"""Figures of explain and the sweeps: shares of the loss, recall and needles by context, bytes by path, missed keys."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from parity.report.figures import COLOURS, INK, Picture, Table, lines, number, picture, thousands

Row = Mapping[str, Any]


def shares(report: Row, name: str) -> Picture | None:
    """The loss shared among choices, worst first, with intervals; None without choices."""
    entries = list(reversed(report["choices"]))
    if not entries:
        return None
    labels = [f"{entry['choice']} = {entry['to']}" for entry in entries]
    means = [100 * entry["share"]["loss"]["mean"] for entry in entries]
    halves = [100 * (entry["share"]["loss"]["half"] or 0) for entry in entries]

    def paint(axes: Any) -> None:
        axes.barh(labels, means, xerr=halves, color=COLOURS[0], ecolor=INK, capsize=3)
        axes.set_xlabel("share of the loss, percentage points of the selection")
        axes.grid(True, axis="x", alpha=0.25)

    table = Table(("choice", "value", "share of loss", "±", "alone", "removed", "regret", "logits error alone"), [])
    for entry in report["choices"]:
        loss = entry["share"]["loss"]
        table.rows.append(
            (
                entry["choice"],
                entry["to"],
                f"{100 * loss['mean']:.2f}",
                "-" if loss["half"] is None else f"{100 * loss['half']:.2f}",
                f"{100 * entry['alone']['loss']['mean']:.2f}",
                f"{100 * entry['removed']['loss']['mean']:.2f}",
                f"{100 * entry['share']['regret']['mean']:.3f}",
                number(entry["alone"]["error"]["mean"]),
            )
        )
    worst = report["choices"][0]
    points = 100 * worst["share"]["loss"]["mean"]
    alt = f"Shares of the lost recall by choice; the largest is {worst['choice']} with {points:.1f} points."
    size = (7.5, 1.2 + 0.32 * len(entries))
    return picture(name, "Where the recall goes", alt, table, paint, size)


def missed(report: Row, name: str) -> Picture | None:
    """The map of missed keys, row x page; None where nothing is missed."""
    counts = report.get("map", {}).get("missed") or []
    total = sum(map(sum, counts))
    if not total:
        return None
    group = report["map"]["pages_per_column"]

    def paint(axes: Any) -> None:
        image = axes.imshow(counts, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_xlabel("page" if group == 1 else f"group of {group} pages")
        axes.set_ylabel("row")
        axes.figure.colorbar(image, ax=axes, label="keys missed")

    head = ("row", *(str(i * group) for i in range(len(counts[0]))))
    table = Table(head, [(str(i), *map(str, row)) for i, row in enumerate(counts)])
    alt = f"Keys of the reference's selection that are missing, by row and page: {total} in {len(counts)} rows."
    return picture(name, "Top-k disagreement, row x page", alt, table, paint, (7.5, 1.6 + 0.18 * len(counts)))


def recall(report: Row, name: str) -> list[Picture]:
    """For each data model recall by context, and needles by context at one margin; a table holds all of it."""
    found = []
    rows = report["rows"]
    for i, data in enumerate(dict.fromkeys(row["data"] for row in rows)):
        mine = [row for row in rows if row["data"] == data]
        series = {
            config: [(row["tokens"], 1 - row["metrics"]["loss"]["mean"]) for row in group]
            for config, group in grouped(mine, "configuration")
            if group[0]["metrics"] is not None
        }
        table = Table(("configuration", "tokens", "recall", "±", "regret", *_margins(report)), [])
        for row in mine:
            metrics, kept = row["metrics"], row["needles"] or [{"mean": None}] * len(report["margins"])
            cells = (
                (
                    f"{1 - metrics['loss']['mean']:.4f}",
                    number(metrics["loss"]["half"], 2),
                    number(metrics["regret"]["mean"]),
                )
                if metrics
                else ("-", "-", "-")
            )
            named = report["against"] if row["configuration"] == "reference" else row["configuration"]
            table.rows.append((named, f"{row['tokens']:,}", *cells, *(number(each["mean"]) for each in kept)))
        found.append(_recall_curve(f"{name}-{i}", data, report["against"], series, table))
        if curve := _needle_curve(f"{name}-needle-{i}", data, report, mine):
            found.append(curve)
    return found


def _margins(report: Row) -> tuple[str, ...]:
    return tuple(f"needle at {margin:g}" for margin in report["margins"])


def _recall_curve(
    name: str, data: str, against: str, series: Mapping[str, Sequence[tuple[float, float]]], table: Table
) -> Picture:
    def paint(axes: Any) -> None:
        lines(axes, series)
        axes.set_xlabel("tokens of context")
        axes.set_ylabel(f"recall against {against}")

    ends = ", ".join(f"{config} {points[-1][1]:.3f}" for config, points in series.items())
    last = max(points[-1][0] for points in series.values())
    alt = f"Recall against context length on {data} data; at {thousands(last)} tokens: {ends}."
    return picture(name, f"Recall by context: {data}", alt, table, paint)


def _needle_curve(name: str, data: str, report: Row, rows: Sequence[Row]) -> Picture | None:
    """Needles kept against their margin, at the longest context."""
    longest = max(row["tokens"] for row in rows)
    last = [row for row in rows if row["tokens"] == longest and row["needles"]]
    if not last:
        return None
    margins = report["margins"]
    series = {
        (report["against"] if row["configuration"] == "reference" else row["configuration"]): [
            (margin, each["mean"]) for margin, each in zip(margins, row["needles"], strict=True)
        ]
        for row in last
    }

    def paint(axes: Any) -> None:
        lines(axes, series, logx=False)
        axes.set_xscale("symlog", linthresh=0.02)
        axes.set_xticks(list(margins), [f"{margin:g}" for margin in margins])
        axes.minorticks_off()
        axes.set_xlabel("margin over the cutoff, standard deviations of the row's scores")
        axes.set_ylabel("needles retrieved")

    table = Table(("configuration", *(f"{margin:g}" for margin in margins)), [])
    for config, points in series.items():
        table.rows.append((config, *(number(y) for _, y in points)))
    alt = f"Share of needles retrieved against their margin at {thousands(longest)} tokens of {data} data."
    return picture(name, f"Needles by margin: {data}, {thousands(longest)} tokens", alt, table, paint)


def memory(report: Row, name: str) -> Picture:
    """Bytes beyond inputs and result against the context at the most rows, with the sizes of four GPUs."""
    most = max(row["rows"] for row in report["rows"])
    mine = [row for row in report["rows"] if row["rows"] == most]
    series: dict[str, list[tuple[float, float]]] = {}
    table = Table(("path", "keys", "predicted GB", "measured GB", "milliseconds", "why not measured"), [])
    for path, group in grouped(mine, "path"):
        series[path] = []
        for row in group:
            real = row["workspace"]
            held = row["predicted_workspace"] if real is None else real
            series[path].append((row["keys"], (held + row["result"] + row["pages"]) / 1e9))
            table.rows.append(
                (
                    path,
                    f"{row['keys']:,}",
                    f"{row['predicted_workspace'] / 1e9:.3f}",
                    "-" if real is None else f"{real / 1e9:.3f}",
                    "-" if row["seconds"] is None else f"{1e3 * row['seconds']:.3f}",
                    row["not_measured"] or "",
                )
            )
    sizes = sorted({entry["gpu"] for entry in report["gpus"]})

    def paint(axes: Any) -> None:
        lines(axes, series, logy=True)
        for size in sizes:
            axes.axhline(size, color=INK, linewidth=0.8, linestyle=":", alpha=0.7)
            axes.annotate(f"{size} GB", (min(row["keys"] for row in mine), size), fontsize=8, va="bottom")
        axes.set_xlabel("compressed keys of context")
        axes.set_ylabel("GB for call, pages and result")

    alt = f"Memory of one call with {most:,} rows against context, by path, with the limits of {len(sizes)} GPUs."
    return picture(name, f"Memory of one call, {most:,} rows", alt, table, paint)


def longest_contexts(report: Row) -> Table:
    """The longest context of each path on each GPU, at the most rows."""
    most = max(entry["rows"] for entry in report["gpus"])
    mine = [entry for entry in report["gpus"] if entry["rows"] == most]
    names = sorted({entry["gpu"] for entry in mine})
    table = Table((f"path, {most:,} rows", *(f"{size} GB" for size in names)), [])
    for path, group in grouped(mine, "path"):
        by_size = {entry["gpu"]: entry["longest_keys"] for entry in group}
        table.rows.append((path, *(f"{by_size[size]:,} keys" for size in names)))
    return table


def grouped(rows: Iterable[Row], key: str) -> list[tuple[str, list[Row]]]:
    """Rows by a field, in the order of first appearance."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row[key]), []).append(row)
    return list(found.items())

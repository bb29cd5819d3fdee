"""Replays tensors recorded from DeepSeek's published code, stage by stage from each stage's recorded input.

`replay(folder)` gives the rows, `main_replay` is what `parity recorded DIR` runs.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from parity.recorded.files import RecordingError
from parity.recorded.replay import replay
from parity.recorded.rows import INPUT, UNKNOWN, Row

__all__ = ["RecordingError", "Row", "main_replay", "passed", "replay", "table"]


_COUNTS = ("values", "differing", "rejected", "without_input")


def passed(rows: Sequence[Row]) -> bool:
    """Whether every value is allowed by its rule and every tensor is known."""
    return not any(row.rejected or row.rule == UNKNOWN for row in rows)


def table(rows: Sequence[Row]) -> str:
    """Stage x values x differing over all files, then rejected and unknown tensors, then one line of verdict."""
    stages: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.rule not in (INPUT, UNKNOWN):
            stages.setdefault((row.stage, row.rule), []).append(row)
    cells: list[tuple[str, ...]] = [("stage", "files", "values", "differing", "not allowed", "no input", "rule")]
    for (stage, rule), group in sorted(stages.items()):
        numbers = [sum(getattr(row, name) for row in group) for name in _COUNTS]
        cells.append((stage, str(len(group)), *(f"{n:,}" for n in numbers), rule))
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    lines = [
        "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 6)), line[6]])
        for line in cells
    ]
    lines += [
        f"NOT ALLOWED {row.file}: {row.stage}: {row.rejected:,} values, {row.detail}" for row in rows if row.rejected
    ]
    lines += [f"UNKNOWN {row.file}: {row.stage}: no stage of that name" for row in rows if row.rule == UNKNOWN]
    return "\n".join([*lines, "", _verdict(rows)])


def main_replay(folder: Path | str, json_path: Path | str | None = None) -> int:
    """Replay a folder, print its table, write JSON if asked: 0 allowed, 1 disagreement, 2 unusable folder or file."""
    folder = Path(folder)
    try:
        rows = replay(folder)
    except RecordingError as error:
        print(f"parity recorded: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    if json_path is not None:
        report = {
            "command": "recorded",
            "folder": str(folder),
            "passed": passed(rows),
            "torch": torch.__version__,
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        try:
            Path(json_path).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"parity recorded: {json_path}: cannot be written ({error.strerror or error})", file=sys.stderr)
            return 2
    return 0 if passed(rows) else 1


def _verdict(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.rule not in (INPUT, UNKNOWN)]
    values, differing, rejected, without = (sum(getattr(row, name) for row in judged) for name in _COUNTS)
    inputs = sum(row.rule == INPUT for row in rows)
    return (
        f"{'passed' if passed(rows) else 'FAILED'}: {len({row.file for row in rows})} files, {len(judged)} tensors "
        f"replayed: {values:,} values, {differing:,} differ from the nearest, {rejected:,} not allowed; "
        f"{inputs} inputs, {without:,} values without a recorded input, "
        f"{len(rows) - len(judged) - inputs} unknown tensors"
    )

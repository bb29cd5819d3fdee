"""Replays tensors recorded from DeepSeek's published code, each from the recorded tensors that it was computed from.

`replay(folder)` gives the rows, `main_replay` is what `parity recorded DIR` runs.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from parity.command import write_json
from parity.recorded.files import RecordingError
from parity.recorded.replay import replay
from parity.recorded.rows import DAMAGED, INPUT, MISSING, NOT_JUDGED, UNKNOWN, Row
from parity.tables import aligned
from parity.vocabulary import FAILED, PASSED, USAGE

__all__ = ["RecordingError", "Row", "exit_code", "main_replay", "passed", "replay", "table"]

_COUNTS = ("values", "differing", "rejected", "without_input")


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a value is not allowed by its rule; 2 if nothing could be judged, if a file is not the one that the index
    describes, or if a tensor has a name that nothing replays; else 0, also where a recording lacks tensors.
    """
    if any(row.rejected for row in rows):
        return FAILED
    known = not any(row.rule in (UNKNOWN, DAMAGED) for row in rows)
    return PASSED if known and any(row.rule not in NOT_JUDGED for row in rows) else USAGE


def passed(rows: Sequence[Row]) -> bool:
    """Whether everything that was recorded and could be replayed is allowed by its rule."""
    return exit_code(rows) == PASSED


def table(rows: Sequence[Row]) -> str:
    """Tensor x values x differing over all files, then what is rejected, unknown or not replayed, then the verdict."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.rule not in NOT_JUDGED:
            groups.setdefault((row.tensor, row.rule), []).append(row)
    cells: list[tuple[str, ...]] = [("tensor", "files", "values", "differing", "not allowed", "no input", "rule")]
    for (tensor, rule), group in sorted(groups.items()):
        numbers = [sum(getattr(row, name) for row in group) for name in _COUNTS]
        cells.append((tensor, str(len(group)), *(f"{n:,}" for n in numbers), rule))
    columns = aligned([line[:-1] for line in cells], 1).splitlines()
    lines = [f"{numbers}  {line[-1]}" for numbers, line in zip(columns, cells, strict=True)]
    lines += [
        f"NOT ALLOWED {row.file}: {row.tensor}: {row.rejected:,} values, {row.detail}" for row in rows if row.rejected
    ]
    lines += [
        f"UNKNOWN {row.file}: {row.tensor}: nothing replays a tensor of that name" for row in _with(rows, UNKNOWN)
    ]
    for rule, word in ((DAMAGED, "UNUSABLE"), (MISSING, "NOT REPLAYED")):
        lines += [f"{word} {row.file}: {_reason(row)}" for row in _with(rows, rule)]
    return "\n".join([*lines, "", _verdict(rows)])


def _with(rows: Sequence[Row], *rules: str) -> list[Row]:
    return [row for row in rows if row.rule in rules]


def _reason(row: Row) -> str:
    return ": ".join(filter(None, [row.tensor, row.detail])) + (
        "" if row.detail else ", since a step before it was not"
    )


def main_replay(folder: Path | str, json_path: Path | str | None = None) -> int:
    """Replay a folder, print its table, write JSON where named; `exit_code` says what is returned, 2 also without an
    index."""
    try:
        rows = replay(folder)
    except RecordingError as error:
        print(f"parity recorded: {error}", file=sys.stderr)
        return USAGE
    print(table(rows))
    report = {
        "command": "recorded",
        "folder": str(folder),
        "passed": passed(rows),
        "exit": exit_code(rows),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "rows": [dataclasses.asdict(row) for row in rows],
    }
    write_json(json_path, report)
    return exit_code(rows)


def _verdict(rows: Sequence[Row]) -> str:
    judged = [row for row in rows if row.rule not in NOT_JUDGED]
    values, differing, rejected, without = (sum(getattr(row, name) for row in judged) for name in _COUNTS)
    word = {PASSED: "passed", FAILED: "FAILED", USAGE: "incomplete" if judged else "nothing judged"}[exit_code(rows)]
    left = {
        "unknown tensors": len(_with(rows, UNKNOWN)),
        "unusable files": len(_with(rows, DAMAGED)),
        "files not replayed in full": len({row.file for row in _with(rows, MISSING)}),
    }
    return (
        f"{word}: {len({row.file for row in rows})} files, {len(judged)} tensors "
        f"replayed: {values:,} values, {differing:,} differ from the nearest, {rejected:,} not allowed; "
        f"{len(_with(rows, INPUT))} inputs, {without:,} values without a recorded input, "
        + ", ".join(f"{count} {what}" for what, count in left.items())
    )

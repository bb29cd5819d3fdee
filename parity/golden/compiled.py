"""Goldens of the compile gate: registers, spills, shared memory and matrix instruction of every kernel, one file a
compiler version, so that a change that doubles the registers is seen in review.

A known version is compared and must agree. Of an unknown one only limits and spills are judged, and what differs from
the nearest known version is told.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.command import CommandError, blame, write_text
from parity.results import plural

TAG = "indexer-parity compile golden"
FORMAT = 1
FIELDS = ("registers", "spill_stores", "spill_loads", "shared", "instruction")
REPAIR = "parity compile --accept"
SHOWN = 5  # differences that a note spells out

Row = dict[str, Any]
Golden = dict[str, dict[str, Any]]


def locate(given: str | None) -> Path | None:
    """The folder `compile` of the fixtures: in `given`, else beside the package's checkout, else in the current folder.

    None where there is none; CommandError where the given folder does not exist.
    """
    if given is not None:
        if not Path(given).is_dir():
            raise CommandError(f"--fixtures {given}: no such folder")
        return Path(given) / "compile"
    root = Path(__file__).resolve().parents[2]
    if (root / "pyproject.toml").is_file():
        return root / "fixtures" / "compile"
    folder = Path.cwd() / "fixtures" / "compile"
    return folder if folder.is_dir() else None


def path_of(folder: Path, compiler: str) -> Path:
    return folder / (re.sub(r"[^\w.+]+", "-", compiler) + ".json")


def read(path: Path) -> Golden:
    """Entries by `sm_90 configuration`; CommandError for a file that is no golden."""
    with blame(str(path)):
        content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("tag") != TAG or not isinstance(content.get("kernels"), dict):
        raise CommandError(f"{path}: not a golden of the compile gate (no tag {TAG!r})")
    if content.get("format") != FORMAT:
        raise CommandError(f"{path}: golden format {content.get('format')!r}, this version reads {FORMAT}")
    for key, entry in content["kernels"].items():
        if not re.fullmatch(r"sm_\d+ .+", key) or not isinstance(entry, dict):
            raise CommandError(f"{path}: {key!r} is no kernel's entry")
    return content["kernels"]


def text(compiler: str, kernels: Mapping[str, Mapping[str, Any]]) -> str:
    """The file's content: one line a kernel, so that a diff reads well."""
    lines = [f"  {json.dumps(key)}: {json.dumps(dict(entry))}" for key, entry in sorted(kernels.items())]
    head = f'{{\n "tag": "{TAG}",\n "format": {FORMAT},\n "compiler": {json.dumps(compiler)},\n "kernels": {{\n'
    return head + ",\n".join(lines) + "\n }\n}\n"


def judge(rows: list[Row], folder: Path | None) -> list[str]:
    """Fail the rows that differ from the golden of their compiler, add one for each golden without a row; the notes.

    Rows that failed already keep their reason. An architecture of which nothing was compiled is left alone.
    """
    notes = []
    for compiler, mine in _by_compiler(rows).items():
        if folder is None:
            notes.append(f"{compiler}: no goldens here, judged by limits and spills alone")
            continue
        path = path_of(folder, compiler)
        if path.is_file():
            notes += _compare(rows, mine, read(path), path)
        else:
            notes += _foreign(compiler, mine, folder)
    return notes


def accept(rows: Sequence[Row], folder: Path | None) -> list[str]:
    """Write the goldens of these rows' compilers, what was known of other architectures kept; what changed, in lines.

    CommandError where a row failed, or where there is no place for goldens.
    """
    if folder is None:
        raise CommandError("no checkout to write goldens to: name its fixtures with --fixtures DIR")
    failed = [row for row in rows if row["status"] == "failed"]
    if failed:
        first = f"sm_{failed[0]['arch']} {failed[0].get('config', '')}: {failed[0]['reason']}"
        raise CommandError(f"nothing is accepted while {plural(len(failed), 'kernel')} failed, first {first}")
    notes = []
    for compiler, mine in _by_compiler(rows).items():
        path = path_of(folder, compiler)
        old = read(path) if path.is_file() else {}
        arches = {f"sm_{row['arch']}" for row in mine.values()}
        new = {key: entry for key, entry in old.items() if key.split()[0] not in arches}
        new |= {key: _entry(row) for key, row in mine.items()}
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, text(compiler, new))
        lines = [f"{key}: {_difference(old.get(key), new.get(key))}" for key in sorted(old.keys() | new.keys())]
        changed = [line for line in lines if not line.endswith(": ")]
        notes += [f"{path.name}: {plural(len(changed), 'line')} changed"]
        notes += [f"  {line}" for line in changed if old]
    return notes or ["nothing was compiled, nothing is written"]


def _by_compiler(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows with figures, by compiler and then by `sm_90 configuration`."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "registers" in row:
            found.setdefault(row["compiler"], {})[f"sm_{row['arch']} {row['config']}"] = row
    return found


def _compare(rows: list[Row], mine: Mapping[str, Row], golden: Golden, path: Path) -> list[str]:
    """A known compiler: every row must agree with its entry, and every entry must have a row."""
    arches = {f"sm_{row['arch']}" for row in mine.values()}
    listed = {f"sm_{row['arch']} {row.get('config')}" for row in rows}
    wrong = []
    for key, row in mine.items():
        difference = _difference(golden.get(key), _entry(row))
        if difference and row["status"] == "passed":
            row |= {"status": "failed", "reason": f"differs from {path.name}: {difference}; to accept: {REPAIR}"}
        if difference:
            wrong.append(f"  {key}: {difference}")
    example = next(iter(mine.values()))
    for key in sorted(key for key in golden.keys() - listed if key.split()[0] in arches):
        arch, config = key.split(" ", 1)
        reason = f"{path.name} lists it but nothing is called so any more; to accept: {REPAIR}"
        layout = found[1] if (found := re.search(r"(?:^|[-_])([a-z]{2,}\d+)", config)) else ""
        kernel = "store" if example["kernel"] == "store" else config.split("-")[0]
        about = {"arch": int(arch[3:]), "config": config, "kernel": kernel, "layout": layout}
        rows.append(about | {"status": "failed", "reason": reason})
        wrong.append(f"  {key}: gone")
    count = plural(len(mine), "kernel")
    return [f"{path.name}: {count} compared, {len(wrong)} not as recorded", *wrong]


def _foreign(compiler: str, mine: Mapping[str, Row], folder: Path) -> list[str]:
    """An unknown compiler: what differs from the nearest known version of it, told and not judged."""
    name, _, version = compiler.partition(" ")
    known = sorted(folder.glob(f"{name}-*.json"), key=lambda path: _distance(path.stem.partition("-")[2], version))
    if not known:
        return [f"{compiler}: no golden of any version of {name}, judged by limits and spills alone"]
    golden = read(known[0])
    differences = [(key, _difference(golden.get(key), _entry(row))) for key, row in mine.items()]
    lines = [f"  {key}: {difference}" for key, difference in differences if difference]
    more = [f"  and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    head = f"{compiler}: no golden of this version, judged by limits and spills alone; "
    return [head + f"{len(lines):,} of {len(mine):,} kernels differ from {known[0].name}", *lines[:SHOWN], *more]


def _distance(known: str, version: str) -> tuple[int, ...]:
    """How far apart two versions are, the first number first."""
    left, right = (([int(part) for part in re.findall(r"\d+", name)] + [0, 0, 0])[:3] for name in (known, version))
    return tuple(abs(a - b) for a, b in zip(left, right, strict=True))


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in FIELDS if name in row}


def _difference(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """In words what changed, empty if nothing did."""
    if old is None or new is None:
        return "" if old is new else "not in the golden" if old is None else "gone"
    names = [name for name in FIELDS if old.get(name) != new.get(name)]
    return ", ".join(f"{name.replace('_', ' ')} {old.get(name)} -> {new.get(name)}" for name in names)

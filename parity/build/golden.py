"""Goldens of the compile gate: registers, spills, shared memory and matrix instruction of every kernel, one file per
compiler version, so that a change that doubles the registers is seen in review.

A known version is compared and must agree. Of an unknown one only limits and spills are judged, and what differs from
the nearest known version is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from impl.store_modes import MODES
from parity.build.rows import Row, kernel_row, store_row
from parity.command import CommandError
from parity.golden import changes, stored
from parity.golden.stored import StoredError

TAG = "indexer-parity compile golden"
FORMAT = 1
FOLDER = "compile"
FIELDS = ("registers", "spill_stores", "spill_loads", "shared", "instruction")
REPAIR = "parity compile --accept"
SHOWN = 5  # differences that a note spells out

Golden = dict[str, dict[str, Any]]


def path_of(folder: Path, compiler: str) -> Path:
    """The golden of a compiler, `triton 3.9.0` say."""
    return folder / (re.sub(r"[^\w.+]+", "-", compiler) + ".json")


def read(path: Path) -> Golden:
    """Entries by `sm_90 configuration`; StoredError for a file that is no golden."""
    kernels = stored.read(path, "golden of the compile gate", tag=TAG, format=FORMAT).get("kernels")
    if not isinstance(kernels, dict):
        raise StoredError(f"{path}: not a golden of the compile gate (no entry 'kernels')")
    for key, entry in kernels.items():
        if not re.fullmatch(r"sm_\d+ .+", key) or not isinstance(entry, dict):
            raise StoredError(f"{path}: {key!r} is no kernel's entry")
    return kernels


def text(compiler: str, kernels: Mapping[str, Mapping[str, Any]]) -> str:
    """The file's content: one line per kernel, so that a diff reads well."""
    lines = [f"  {json.dumps(key)}: {json.dumps(dict(entry))}" for key, entry in sorted(kernels.items())]
    head = f'{{\n "tag": "{TAG}",\n "format": {FORMAT},\n "compiler": {json.dumps(compiler)},\n "kernels": {{\n'
    return head + ",\n".join(lines) + "\n }\n}\n"


def judge(rows: list[Row], folder: Path | None) -> list[str]:
    """Fail the rows that differ from the golden of their compiler, add one for each golden without a row; the notes.

    Rows that failed already keep their reason. An architecture of which nothing was compiled is left as it is.
    """
    notes = []
    for compiler, mine in _by_compiler(rows).items():
        if folder is None:
            notes.append(f"{compiler}: no goldens here, judged by limits and spills only")
            continue
        path = path_of(folder, compiler)
        if path.is_file():
            notes += _compare(rows, mine, read(path), path)
        else:
            notes += _foreign(compiler, mine, folder)
    return notes


def accept(rows: Sequence[Row], folder: Path | None) -> list[str]:
    """Replace the goldens of these rows' compilers; what changed, in lines.

    CommandError as in `files_of`, where there is no place for goldens, and while CI is set.
    """
    if folder is None:
        raise CommandError("no checkout to write goldens to: name its fixtures with --fixtures DIR")
    stored.leave(folder, files_of(rows, folder))
    notes = changes.diff(folder)
    accepted = stored.accept(folder) if stored.pending(folder) else []
    return [f"accepted: {', '.join(accepted) or 'nothing, since nothing was compiled'}", *notes]


def files_of(rows: Sequence[Row], folder: Path) -> Iterator[tuple[str, bytes]]:
    """The golden of each of these rows' compilers, what the accepted one says of other architectures kept.

    CommandError where a row failed.
    """
    failed = [item for item in rows if item["status"] == "failed"]
    if failed:
        first = f"sm_{failed[0]['arch']} {failed[0].get('config', '')}: {failed[0]['reason']}"
        raise CommandError(f"nothing is accepted while kernels fail ({len(failed):,} of them), first {first}")
    for compiler, mine in _by_compiler(rows).items():
        path = path_of(folder, compiler)
        arches = {f"sm_{item['arch']}" for item in mine.values()}
        old = read(path) if path.is_file() else {}
        kept = {key: entry for key, entry in old.items() if key.split()[0] not in arches}
        yield path.name, text(compiler, kept | {key: _entry(item) for key, item in mine.items()}).encode()


def _by_compiler(rows: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """Rows with figures, by compiler and then by `sm_90 configuration`."""
    found: dict[str, dict[str, Row]] = {}
    for item in rows:
        if "registers" in item:
            found.setdefault(item["compiler"], {})[f"sm_{item['arch']} {item['config']}"] = item
    return found


def _compare(rows: list[Row], mine: Mapping[str, Row], golden: Golden, path: Path) -> list[str]:
    """A known compiler: every row must agree with its entry, and every entry must have a row."""
    arches = {f"sm_{item['arch']}" for item in mine.values()}
    listed = {f"sm_{item['arch']} {item.get('config')}" for item in rows}
    wrong = []
    for key, item in mine.items():
        difference = _difference(golden.get(key), _entry(item))
        if difference and item["status"] == "passed":
            item |= {"status": "failed", "reason": f"differs from {path.name}: {difference}; to accept: {REPAIR}"}
        if difference:
            wrong.append(f"  {key}: {difference}")
    for key in sorted(key for key in golden.keys() - listed if key.split()[0] in arches):
        arch, config = key.split(" ", 1)
        reason = f"{path.name} lists it but nothing is called so any more; to accept: {REPAIR}"
        rows.append(_gone(int(arch[3:]), config, reason))
        wrong.append(f"  {key}: gone")
    return [f"{path.name}: {len(mine):,} compared, {len(wrong)} not as recorded", *wrong]


def _gone(arch: int, config: str, reason: str) -> Row:
    """The row of a configuration that has only its name left: `decode-bf16-h64-...`, or `fp8_fused f32/f32 x8` of the
    store."""
    if "/" in config:
        layouts = {mode.name: mode.layout for mode in MODES}
        return store_row(arch, config, layouts.get(f"store_{config.split()[0]}", ""), "failed", reason)
    kernel, layout, *_ = [*config.split("-"), ""]
    return kernel_row(arch, kernel, layout, "failed", reason, config=config)


def _foreign(compiler: str, mine: Mapping[str, Row], folder: Path) -> list[str]:
    """An unknown compiler: what differs from the nearest known version of it, shown and not judged."""
    name, _, version = compiler.partition(" ")
    known = sorted(folder.glob(f"{name}-*.json"), key=lambda path: _distance(path.stem.partition("-")[2], version))
    if not known:
        return [f"{compiler}: no golden of any version of {name}, judged by limits and spills only"]
    golden = read(known[0])
    differences = [(key, _difference(golden.get(key), _entry(item))) for key, item in mine.items()]
    lines = [f"  {key}: {difference}" for key, difference in differences if difference]
    more = [f"  and {len(lines) - SHOWN:,} more"] if len(lines) > SHOWN else []
    head = f"{compiler}: no golden of this version, judged by limits and spills only; "
    return [head + f"{len(lines):,} of {len(mine):,} kernels differ from {known[0].name}", *lines[:SHOWN], *more]


def _distance(known: str, version: str) -> tuple[int, ...]:
    """How far apart two versions are, the first number first."""
    left, right = (([int(part) for part in re.findall(r"\d+", name)] + [0, 0, 0])[:3] for name in (known, version))
    return tuple(abs(a - b) for a, b in zip(left, right, strict=True))


def _entry(item: Row) -> dict[str, Any]:
    return {name: item[name] for name in FIELDS if name in item}


def _difference(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> str:
    """In words what changed, empty if nothing did."""
    if old is None or new is None:
        return "" if old is new else "not in the golden" if old is None else "gone"
    names = [name for name in FIELDS if old.get(name) != new.get(name)]
    return ", ".join(f"{name.replace('_', ' ')} {old.get(name)} -> {new.get(name)}" for name in names)

"""Stored truths: where they lie, how they are read, and how a new one comes to be accepted.

Each lies in a folder of `fixtures/`. What is computed anew is left next to the accepted file as a pending one
(`a.json` -> `a.pending.json`), reviewed, and then takes its place. Nothing is written while CI is set. The small files
of `fixtures/truth`, which checks need where there is no checkout, travel in the wheel as `parity/truth`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.command import CommandError, refuse_in_ci, sentence

ROOT = Path(__file__).resolve().parents[2]
MANIFEST, PENDING = "manifest.json", ".pending"
# Folders of `fixtures/`, and a file that tells ours from anything else that a folder `fixtures` may hold.
FOLDERS = {"golden": "manifest*.json", "predicted": "manifest*.json", "truth": "*.json", "compile": "*-[0-9]*.json"}


class StoredError(CommandError):
    """A stored file cannot be believed; the text names it."""


@dataclass(frozen=True)
class Truth:
    """One kind of stored truth.

    name    as `parity golden regenerate` knows it
    folder  where it lies, a key of `FOLDERS`
    make    (folder of the accepted files) -> (file name, content) of each of its files, computed on this machine
    """

    name: str
    folder: str
    make: Callable[[Path], Iterable[tuple[str, bytes]]]


def shipped(name: str) -> Path:
    """A file of `fixtures/truth`: the checkout's, or the copy that an installed package carries."""
    checkout = (ROOT / "pyproject.toml").is_file()
    return (ROOT / "fixtures" / "truth" if checkout else ROOT / "parity" / "truth") / name


def locate(folder: str, given: str | None = None) -> Path | None:
    """A folder of the fixtures: in `given` (or `given` itself), else in the checkout's, else in ./fixtures.

    None where none was given and none is found; CommandError where the given one does not exist.
    """
    if given is not None:
        place = Path(given)
        if not place.is_dir():
            raise CommandError(f"--fixtures {given}: no such folder")
        return place if _ours(place, folder) and not (place / folder).is_dir() else place / folder
    places = (root / "fixtures" / folder for root in (ROOT, Path.cwd()))
    return next((place for place in places if _ours(place, folder)), None)


def _ours(place: Path, folder: str) -> bool:
    return any(place.glob(FOLDERS[folder]))


def read(path: Path, what: str, *, tag: str | None = None, format: int | None = None) -> dict[str, Any]:
    """The object in a JSON file; StoredError where there is none, or none of this tag and format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise StoredError(f"{path}: the {what} cannot be read: {sentence(error)}") from error
    if not isinstance(content, dict) or content.get("tag") != tag:
        raise StoredError(f"{path}: not a {what}" + (f" (no tag {tag!r})" if tag else ""))
    if content.get("format") != format:
        raise StoredError(f"{path}: {what} of format {content.get('format')!r}, this version reads {format}")
    return content


def as_json(content: Any) -> bytes:
    """The bytes of a JSON file with sorted keys, so that a diff reads well."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def pending_name(file: str) -> str:
    """`a.safetensors` -> `a.pending.safetensors`."""
    return str(Path(file).with_suffix(PENDING + Path(file).suffix))


def accepted_name(file: str) -> str:
    """`a.pending.safetensors` -> `a.safetensors`."""
    return file.replace(PENDING, "")


def pending(folder: Path) -> list[str]:
    """Names of the files that were left and that nobody has accepted yet."""
    return sorted(p.name for p in folder.iterdir() if PENDING in p.name) if folder.is_dir() else []


def leave(folder: Path, files: Iterable[tuple[str, bytes]]) -> list[str]:
    """Leave files, (name, content), to be accepted; their names. CommandError while CI is set."""
    refuse_in_ci("parity golden regenerate")
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    for name, content in files:
        (folder / pending_name(name)).write_bytes(content)
        names.append(name)
    return names


def accept(folder: Path) -> list[str]:
    """Put the pending files of a folder in place; what changed, by its name in the manifest, else by its file's.

    A pending manifest lists all that there is: each pending file must be the one it lists, and what it no longer lists
    is removed. CommandError while CI is set, where nothing is pending, and for a file that was touched.
    """
    refuse_in_ci("parity golden accept")
    new, old = _listed(folder / pending_name(MANIFEST)), _listed(folder / MANIFEST)
    waiting = [accepted_name(file) for file in pending(folder) if new or file.endswith(".json")]
    if not waiting:
        raise CommandError(f"parity golden accept: nothing is pending in {folder}")
    for file, digest in new.values():
        path = folder / pending_name(file)
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            raise StoredError(f"{path}: not the file that the pending manifest lists; run `parity golden regenerate`")
        if not path.is_file() and not (folder / file).is_file():
            raise StoredError(f"{path}: missing; run `parity golden regenerate`")
    names = {file: name for name, (file, _) in new.items()} or dict(zip(waiting, waiting, strict=True))
    changed = [name for file, name in names.items() if _put(folder, file)]
    if new:
        for name, (file, _) in old.items():
            if name not in new:
                (folder / file).unlink(missing_ok=True)
                changed.append(f"{name} (removed)")
        _put(folder, MANIFEST)  # last: interrupted before it, `verify` still sees what is missing
    return changed


def _put(folder: Path, file: str) -> bool:
    """Put one pending file in place; whether there was one."""
    path = folder / pending_name(file)
    if not path.is_file():
        return False
    os.replace(path, folder / file)
    return True


def _listed(manifest: Path) -> dict[str, tuple[str, str]]:
    """(file, sha256) of what a manifest lists, by name; empty where there is no manifest."""
    if not manifest.is_file():
        return {}
    content = json.loads(manifest.read_text(encoding="utf-8"))
    entries = content.get("goldens") or content.get("cases") or {}
    return {name: (entry.get("file", f"{name}.safetensors"), entry["sha256"]) for name, entry in entries.items()}

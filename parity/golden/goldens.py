"""Golden tensors: what an operation says about its own, and the files that hold them.

A folder of goldens has one safetensors file per golden and a `manifest.json` that lists them. Every file is checked
against the manifest before its tensors are believed, and every complaint names the file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from parity.command import sentence
from parity.golden.stored import MANIFEST, PENDING, StoredError, read

TAG = "indexer-parity golden"
FORMAT = 1
ENTRY = {"file", "bytes", "sha256", "case"}


@dataclass(frozen=True)
class Golden:
    """What an operation stores, and how an output is judged by it.

    cases    case string by golden's name
    parts    names of the stored tensors
    tensors  (case, operands on the CPU) -> the tensors: operands, exact result and what else belongs to it
    slack    (operands, tensors) -> by how much a stored tensor may differ from today's, by name; the others agree to
             the bit
    compare  (stored tensors, output, operands, implementation) -> Verdict
    """

    cases: Mapping[str, str]
    parts: frozenset[str]
    tensors: Callable[[Any, Any], dict[str, torch.Tensor]]
    compare: Callable[[Mapping[str, torch.Tensor], Any, Any, Any], Any]
    slack: Callable[[Any, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] = lambda operands, tensors: {}


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Entries by golden's name; StoredError where the manifest is missing, is no JSON or lacks a field."""
    path = folder / MANIFEST
    if not path.is_file():
        raise StoredError(f"{path}: no manifest there; `parity golden regenerate` makes one")
    entries = read(path, "manifest of goldens", tag=TAG, format=FORMAT).get("goldens")
    if not isinstance(entries, dict):
        raise StoredError(f"{path}: not a manifest of goldens (no entry 'goldens')")
    for name, entry in entries.items():
        missing = sorted(ENTRY - set(entry)) if isinstance(entry, dict) else sorted(ENTRY)
        if missing:
            raise StoredError(f"{path}: the entry {name!r} lacks {', '.join(missing)}")
        if Path(entry["file"]).name != entry["file"]:
            raise StoredError(f"{path}: the entry {name!r} names a file outside the folder: {entry['file']!r}")
    return entries


def manifest_text(goldens: Mapping[str, Mapping[str, Any]]) -> bytes:
    """The content of a manifest with these entries."""
    return (
        json.dumps({"tag": TAG, "format": FORMAT, "goldens": dict(sorted(goldens.items()))}, indent=1) + "\n"
    ).encode()


def strays(folder: Path, goldens: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of files that the manifest does not list: leftovers and foreign files. Pending ones are listed apart."""
    known = {entry["file"] for entry in goldens.values()} | {MANIFEST}
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in known and PENDING not in p.name)


def read_golden(folder: Path, entry: Mapping[str, Any], parts: frozenset[str]) -> dict[str, torch.Tensor]:
    """The tensors of one golden, once file, tag, format, parts and case agree with the manifest; else StoredError."""
    path = folder / entry["file"]
    tensors, metadata = read_listed(path, entry, tag=TAG)
    if metadata.get("format") != str(FORMAT):
        raise StoredError(f"{path}: golden format {metadata.get('format')!r}, this version reads {FORMAT}")
    wrong = sorted(parts ^ set(tensors))
    if wrong or "case" not in metadata:
        raise StoredError(f"{path}: a golden with missing or unknown parts: {', '.join(wrong) or 'case'}")
    if metadata["case"] != entry["case"]:
        raise StoredError(f"{path}: holds the case {metadata['case']!r}, the manifest says {entry['case']!r}")
    return tensors


def read_listed(
    path: Path, entry: Mapping[str, Any], tag: str | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) of a file with the tag, size and digest of its entry in a manifest; StoredError otherwise."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise StoredError(f"{path}: the manifest lists it, but its file is missing") from None
    except OSError as error:
        raise StoredError(f"{path}: cannot be read: {sentence(error)}") from error
    if len(content) < entry["bytes"]:
        raise StoredError(f"{path}: truncated, {len(content):,} of {entry['bytes']:,} bytes")
    tensors, metadata = parse(path)
    if metadata.get("tag") != tag:
        raise StoredError(f"{path}: a safetensors file, but not a golden of this software (no tag {tag!r})")
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry["sha256"]:
        raise StoredError(
            f"{path}: corrupt or edited: its sha256 is {digest[:12]}..., the manifest says {entry['sha256'][:12]}..."
        )
    return tensors, metadata


def parse(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; StoredError where it is none."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise StoredError(f"{path}: corrupt, not a readable safetensors file: {sentence(error)}") from error


def encode(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> bytes:
    """The content of one golden's file."""
    return save(
        {key: value.detach().cpu().contiguous() for key, value in tensors.items()},
        {"tag": TAG, "format": str(FORMAT), **metadata},
    )


def digest(content: bytes) -> dict[str, Any]:
    """What a manifest says of a file's bytes."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

"""The files of the golden tensors: where they lie, how they are read and written, and what may be wrong with them.

A folder of goldens holds one safetensors file a golden and a `manifest.json` that lists them. Every file is checked
against the manifest before its tensors are believed, and every complaint names the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from parity import command
from parity.command import CommandError, sentence, write_text

TAG = "indexer-parity golden"
FORMAT = 1
MANIFEST = "manifest.json"
PENDING = ".pending"
TENSORS = {
    "logits": {"q", "kv_cache", "weights", "context_lens", "block_table", "exact", "bound"},
    "topk": {"logits", "context_lens", "block_table", "exact"},
}
ENTRY = {"file", "bytes", "sha256", "case", "stage", "layout", "versions", "compiler", "sources"}


class GoldenError(Exception):
    """A golden file or its manifest cannot be believed; the text names it."""


def locate(given: str | None) -> Path | None:
    """The folder of the goldens: under `given`, else beside the package's checkout, else under the current folder.

    None where no folder was given and none is found; CommandError where a given one does not exist.
    """
    if given is not None:
        for folder in (Path(given) / "golden", Path(given)):
            if holds_goldens(folder):
                return folder
        if not Path(given).is_dir():
            raise CommandError(f"--fixtures {given}: no such folder")
        return Path(given) / "golden"
    for root in (Path(__file__).resolve().parents[2], Path.cwd()):
        folder = root / "fixtures" / "golden"
        # Anything may lie in a `fixtures` folder beside site-packages or in the current one: ask for the manifest.
        if holds_goldens(folder):
            return folder
    return None


def holds_goldens(folder: Path) -> bool:
    """Whether a manifest lies there, accepted or pending."""
    return any((folder / name).is_file() for name in (MANIFEST, pending_name(MANIFEST)))


def read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """Entries by golden's name; GoldenError where the manifest is missing, is no JSON or lacks a field."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise GoldenError(f"{path}: no manifest there; `parity golden regenerate` makes one") from None
    except (OSError, ValueError) as error:
        raise GoldenError(f"{path}: the manifest cannot be read: {sentence(error)}") from error
    if not isinstance(content, dict) or content.get("tag") != TAG or not isinstance(content.get("goldens"), dict):
        raise GoldenError(f"{path}: not a manifest of goldens (no tag {TAG!r})")
    if content.get("format") != FORMAT:
        raise GoldenError(f"{path}: manifest format {content.get('format')!r}, this version reads {FORMAT}")
    for name, entry in content["goldens"].items():
        missing = sorted(ENTRY - set(entry)) if isinstance(entry, dict) else sorted(ENTRY)
        if missing:
            raise GoldenError(f"{path}: the entry {name!r} lacks {', '.join(missing)}")
        if Path(entry["file"]).name != entry["file"]:
            raise GoldenError(f"{path}: the entry {name!r} names a file outside the folder: {entry['file']!r}")
        if entry["stage"] not in TENSORS:
            raise GoldenError(f"{path}: the entry {name!r} has the unknown stage {entry['stage']!r}")
    return content["goldens"]


def manifest_text(goldens: Mapping[str, Mapping[str, Any]]) -> str:
    return json.dumps({"tag": TAG, "format": FORMAT, "goldens": dict(sorted(goldens.items()))}, indent=1) + "\n"


def strays(folder: Path, goldens: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Names of files that the manifest does not list: leftovers and foreign files. Pending ones are listed apart."""
    known = {entry["file"] for entry in goldens.values()} | {MANIFEST}
    return sorted(p.name for p in folder.iterdir() if p.is_file() and p.name not in known and PENDING not in p.name)


def pending(folder: Path) -> list[str]:
    """Names of files that `regenerate` left and that nobody has accepted yet."""
    return sorted(p.name for p in folder.iterdir() if PENDING in p.name) if folder.is_dir() else []


def read_golden(folder: Path, name: str, entry: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) of one golden, after its size and digest agree with the manifest; GoldenError otherwise."""
    path = folder / entry["file"]
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise GoldenError(f"{path}: the golden {name!r} is in the manifest but its file is missing") from None
    except OSError as error:
        raise GoldenError(f"{path}: cannot be read: {sentence(error)}") from error
    if len(content) < entry["bytes"]:
        raise GoldenError(f"{path}: truncated, {len(content):,} of {entry['bytes']:,} bytes")
    digest = hashlib.sha256(content).hexdigest()
    if digest != entry["sha256"]:
        tensors, metadata = parse(path)
        if metadata.get("tag") != TAG:
            raise GoldenError(f"{path}: a safetensors file, but not a golden of this software (no tag {TAG!r})")
        raise GoldenError(
            f"{path}: corrupt or edited: its sha256 is {digest[:12]}..., the manifest says {entry['sha256'][:12]}..."
        )
    tensors, metadata = parse(path)
    check_content(path, tensors, metadata, entry["stage"])
    if metadata["case"] != entry["case"]:
        raise GoldenError(f"{path}: holds the case {metadata['case']!r}, the manifest says {entry['case']!r}")
    return tensors, metadata


def parse(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file; GoldenError where it is none."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise GoldenError(f"{path}: corrupt, not a readable safetensors file: {sentence(error)}") from error


def check_content(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str], stage: str) -> None:
    """GoldenError unless the file carries our tag, a case and exactly the tensors of its stage."""
    if metadata.get("tag") != TAG:
        raise GoldenError(f"{path}: a safetensors file, but not a golden of this software (no tag {TAG!r})")
    if metadata.get("format") != str(FORMAT):
        raise GoldenError(f"{path}: golden format {metadata.get('format')!r}, this version reads {FORMAT}")
    wrong = sorted(TENSORS[stage] ^ set(tensors))
    if wrong or "case" not in metadata:
        raise GoldenError(
            f"{path}: a golden of stage {stage} with missing or unknown parts: {', '.join(wrong) or 'case'}"
        )


def refuse_in_ci(what: str) -> None:
    """CommandError where CI is set, in the words of `parity golden`."""
    command.refuse_in_ci(f"parity golden {what}")


def write_golden(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Write one golden; its (bytes, sha256)."""
    content = save(
        {key: value.detach().cpu().contiguous() for key, value in tensors.items()},
        {"tag": TAG, "format": str(FORMAT), **metadata},
    )
    path.write_bytes(content)
    return len(content), hashlib.sha256(content).hexdigest()


def accept(folder: Path) -> list[str]:
    """Put every pending file in the place of the accepted one; the names that changed.

    The pending manifest lists exactly the goldens of this version, so files that it no longer names are removed.
    """
    manifest = folder / pending_name(MANIFEST)
    if not manifest.is_file():
        raise CommandError(f"parity golden accept: nothing is pending in {folder}")
    content = json.loads(manifest.read_text(encoding="utf-8"))
    old = read_manifest(folder) if (folder / MANIFEST).is_file() else {}
    for entry in content["goldens"].values():
        source = folder / pending_name(entry["file"])
        if source.is_file() and hashlib.sha256(source.read_bytes()).hexdigest() != entry["sha256"]:
            raise CommandError(
                f"{source}: not the file that the pending manifest names; run `parity golden regenerate`"
            )
        if not source.is_file() and not (folder / entry["file"]).is_file():
            raise CommandError(f"{source}: missing; run `parity golden regenerate`")
    changed = []
    for name, entry in content["goldens"].items():
        source = folder / pending_name(entry["file"])
        if source.is_file():
            os.replace(source, folder / entry["file"])
            changed.append(name)
    for name, entry in old.items():
        if name not in content["goldens"]:
            (folder / entry["file"]).unlink(missing_ok=True)
            changed.append(f"{name} (removed)")
    write_text(folder / MANIFEST, manifest_text(content["goldens"]))
    manifest.unlink()
    return changed


def pending_name(file: str) -> str:
    """`a.safetensors` -> `a.pending.safetensors`."""
    return str(Path(file).with_suffix(PENDING + Path(file).suffix))

"""Reads a folder of recordings: its index.json, and each safetensors file with every size and digest checked."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from reference.config import IndexerConfig

FORMAT = 1
KINDS = ("params", "prefill", "decode", "prefill+decode", "unit", "quirk")

RECORDED_NAMES = {"n_heads": "index_n_heads", "topk": "index_topk", "head_dim": "index_head_dim"}
RECORDED_NAMES |= {"rope_dim": "rope_head_dim", "ratio": "compress_ratio", "rope_theta": "compress_rope_theta"}
RECORDED_NAMES |= {"wq_b": "wq_b_dtype"}
"""Fields of a config that the published code calls otherwise."""


class RecordingError(ValueError):
    """What is wrong with a folder, a file or a tensor of recordings, in one sentence; who reports it names the file."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """One file: its entry in the index, its tensors by name, and the names that only the index has."""

    entry: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    lacking: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """File name inside the folder."""
        return self.entry["file"]

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return self.entry["kind"]

    def field(self, name: str) -> Any:
        """A field of the entry; RecordingError where it is missing."""
        if name not in self.entry:
            raise RecordingError(f"its entry in index.json lacks the field {name}")
        return self.entry[name]

    def count(self, name: str) -> int:
        """A field that counts something; RecordingError where it is missing or no count."""
        value = self.field(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RecordingError(f"the field {name} of its entry must be a count, got {value!r}")
        return value

    def config(self) -> IndexerConfig:
        """The indexer that was recorded."""
        held = self.field("config")
        if not isinstance(held, dict):
            raise RecordingError(f"the field config of its entry must be an object, got {held!r}")
        try:
            names = (field.name for field in dataclasses.fields(IndexerConfig))
            return IndexerConfig(**{name: held[RECORDED_NAMES.get(name, name)] for name in names})
        except (KeyError, TypeError) as error:
            raise RecordingError(f"its config in index.json lacks the field {error}") from None
        except ValueError as error:
            raise RecordingError(str(error)) from None


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Entries of index.json; RecordingError where the index as a whole cannot be used."""
    path = folder / "index.json"
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise RecordingError(f"{path}: is not JSON ({error})") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise RecordingError(f"{path}: must be an object of format {FORMAT}")
    entries = index.get("files")
    if not isinstance(entries, list) or not entries:
        raise RecordingError(f"{path}: must list at least one file under 'files'")
    return entries


def read_file(folder: Path, entry: dict[str, Any]) -> Recording:
    """One file, checked against its entry: size, sha256, and each tensor's dtype, shape and digest."""
    path = folder / entry["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"cannot be read ({error.strerror or error})") from None
    if "bytes" in entry and len(data) != entry["bytes"]:
        raise RecordingError(f"has {len(data)} bytes, index.json says {entry['bytes']}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry["sha256"]:
        raise RecordingError(f"has sha256 {digest}, index.json says {entry['sha256']}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RecordingError(f"is not a safetensors file ({error})") from None
    listed = {item.get("name"): item for item in entry["tensors"]}
    for name in sorted(tensors):
        if name not in listed:
            raise RecordingError(f"holds the tensor {name}, which index.json does not list")
        _check_tensor(name, listed[name], tensors[name])
    return Recording(entry, tensors, tuple(name for name in listed if name not in tensors))


def read_folder(folder: Path) -> Iterator[tuple[str, Recording | RecordingError]]:
    """(file name, its recording or what is wrong with it) of every file that the index lists or the folder holds.

    Files of parameters come first. RecordingError where the index cannot be used.
    """
    entries = read_index(folder)
    listed = [str(entry.get("file")) if isinstance(entry, dict) else "index.json" for entry in entries]
    pairs = sorted(zip(listed, entries, strict=True), key=lambda pair: _field(pair[1], "kind") != "params")
    for name, entry in pairs:
        try:
            _check_entry(entry)
            if listed.count(name) > 1:
                raise RecordingError("index.json lists it more than once")
            yield name, read_file(folder, entry)
        except RecordingError as error:
            yield name, error
    for name in sorted({path.name for path in folder.glob("*.safetensors")} - set(listed)):
        yield name, RecordingError("is not listed in index.json")


def _field(entry: Any, name: str) -> Any:
    return entry.get(name) if isinstance(entry, dict) else None


def _check_entry(entry: Any) -> None:
    for name in ("file", "kind", "sha256", "tensors"):
        if _field(entry, name) is None:
            raise RecordingError(f"its entry in index.json lacks the field {name}")
    if entry["kind"] not in KINDS:
        raise RecordingError(f"has kind {entry['kind']!r}, expected one of {', '.join(KINDS)}")


def _check_tensor(name: str, item: dict[str, Any], held: torch.Tensor) -> None:
    dtype = str(held.dtype).removeprefix("torch.")
    if dtype != item.get("dtype") or list(held.shape) != item.get("shape"):
        wanted = f"{item.get('dtype')} {item.get('shape')}"
        raise RecordingError(f"tensor {name} is {dtype} {list(held.shape)}, index.json says {wanted}")
    # An empty tensor has no bytes to view, and a zero-dimensional one no last dimension.
    raw = held.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    if "sha256_16" in item and hashlib.sha256(raw).hexdigest()[:16] != item["sha256_16"]:
        raise RecordingError(f"tensor {name} has other bytes than index.json says")

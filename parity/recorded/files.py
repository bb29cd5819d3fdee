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


class RecordingError(ValueError):
    """A folder or file of recordings that cannot be used; the message names it in one sentence."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """One file: its entry in the index and its tensors by name."""

    entry: dict[str, Any]
    tensors: dict[str, torch.Tensor]

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
            raise RecordingError(f"{self.name}: its entry in index.json lacks the field {name}")
        return self.entry[name]

    def count(self, name: str) -> int:
        """A field that counts something; RecordingError where it is missing or no count."""
        value = self.field(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise RecordingError(f"{self.name}: the field {name} of its entry must be a count, got {value!r}")
        return value

    def config(self) -> IndexerConfig:
        """The indexer that was recorded."""
        held = self.field("config")
        if not isinstance(held, dict):
            raise RecordingError(f"{self.name}: the field config of its entry must be an object, got {held!r}")
        try:
            return IndexerConfig(
                dim=held["dim"],
                q_lora_rank=held["q_lora_rank"],
                n_heads=held["index_n_heads"],
                topk=held["index_topk"],
                head_dim=held["index_head_dim"],
                rope_dim=held["rope_head_dim"],
                ratio=held["compress_ratio"],
                norm_eps=held["norm_eps"],
                rope_theta=held["compress_rope_theta"],
                rope_factor=held["rope_factor"],
                original_seq_len=held["original_seq_len"],
                beta_fast=held["beta_fast"],
                beta_slow=held["beta_slow"],
                wq_b=held["wq_b_dtype"],
            )
        except (KeyError, TypeError) as error:
            raise RecordingError(f"{self.name}: its config in index.json lacks the field {error}") from None
        except ValueError as error:
            raise RecordingError(f"{self.name}: {error}") from None


def read_index(folder: Path) -> list[dict[str, Any]]:
    """Entries of index.json. Every safetensors file of the folder must be listed, and every entry be well formed."""
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
    for entry in entries:
        lacking = [f for f in ("file", "kind", "sha256", "tensors") if not isinstance(entry, dict) or f not in entry]
        if lacking:
            raise RecordingError(f"{path}: an entry of 'files' lacks the field {lacking[0]}")
        if entry["kind"] not in KINDS:
            raise RecordingError(
                f"{path}: {entry['file']} has kind {entry['kind']!r}, expected one of {', '.join(KINDS)}"
            )
    listed = [entry["file"] for entry in entries]
    for name in sorted({name for name in listed if listed.count(name) > 1}):
        raise RecordingError(f"{path}: lists {name} more than once")
    for name in sorted({p.name for p in folder.glob("*.safetensors")} - set(listed)):
        raise RecordingError(f"{folder / name}: is not listed in index.json")
    return entries


def read_file(folder: Path, entry: dict[str, Any]) -> Recording:
    """One file, checked against its entry: size, sha256, and each tensor's presence, dtype, shape and digest."""
    path = folder / entry["file"]
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecordingError(f"{path}: cannot be read ({error.strerror or error})") from None
    if "bytes" in entry and len(data) != entry["bytes"]:
        raise RecordingError(f"{path}: has {len(data)} bytes, index.json says {entry['bytes']}")
    digest = hashlib.sha256(data).hexdigest()
    if digest != entry["sha256"]:
        raise RecordingError(f"{path}: has sha256 {digest}, index.json says {entry['sha256']}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise RecordingError(f"{path}: is not a safetensors file ({error})") from None
    for item in entry["tensors"]:
        _check_tensor(path, item, tensors)
    for name in sorted(tensors.keys() - {item["name"] for item in entry["tensors"]}):
        raise RecordingError(f"{path}: holds the tensor {name}, which index.json does not list")
    return Recording(entry, tensors)


def read_folder(folder: Path) -> Iterator[Recording]:
    """Every recording of a folder, the parameters first."""
    entries = read_index(folder)
    for entry in sorted(entries, key=lambda entry: entry["kind"] != "params"):
        yield read_file(folder, entry)


def _check_tensor(path: Path, item: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    name = item.get("name")
    if name not in tensors:
        raise RecordingError(f"{path}: lacks the tensor {name} that index.json lists")
    held = tensors[name]
    dtype = str(held.dtype).removeprefix("torch.")
    if dtype != item.get("dtype") or list(held.shape) != item.get("shape"):
        raise RecordingError(
            f"{path}: tensor {name} is {dtype} {list(held.shape)}, "
            f"index.json says {item.get('dtype')} {item.get('shape')}"
        )
    # An empty tensor has no bytes to view, and a zero-dimensional one no last dimension.
    raw = held.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    if "sha256_16" in item and hashlib.sha256(raw).hexdigest()[:16] != item["sha256_16"]:
        raise RecordingError(f"{path}: tensor {name} has other bytes than index.json says")

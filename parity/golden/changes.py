"""What accepting pending files would change, in numbers: one line per tensor or JSON entry that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from parity.golden.goldens import parse
from parity.golden.stored import MANIFEST, StoredError, accepted_name, pending
from reference import exact


def diff(folder: Path) -> list[str]:
    """The lines of one folder, each beginning with the file's name; manifests are left out."""
    lines = []
    for waiting in pending(folder):
        file = accepted_name(waiting)
        if file == MANIFEST:
            continue
        compare = compare_tensors if file.endswith(".safetensors") else compare_json
        try:
            lines += [f"{file}: {line}" for line in compare(folder / file, folder / waiting)]
        except StoredError as error:
            lines.append(f"{error}; would be replaced")
    return lines


def compare_json(old: Path, new: Path) -> Iterator[str]:
    """Entries of two JSON files that differ."""
    after = dict(leaves(json.loads(new.read_text(encoding="utf-8"))))
    if not old.is_file():
        yield f"new, {len(after):,} entries"
        return
    before = dict(leaves(json.loads(old.read_text(encoding="utf-8"))))
    for name in dict.fromkeys([*before, *after]):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name, 'new')} -> {after.get(name, 'gone')}"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number and text of a JSON value, by the keys that lead to it."""
    if not isinstance(value, dict):
        yield path, value
        return
    for key, item in value.items():
        yield from leaves(item, f"{path} / {key}".removeprefix(" / "))


def compare_tensors(old: Path, new: Path) -> Iterator[str]:
    """Tensors of two safetensors files that differ: elements, largest difference, or shape."""
    after, _ = parse(new)
    if not old.is_file():
        yield "new, " + ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in sorted(after.items()))
        return
    before, _ = parse(old)
    yield from differing(before, after)


def differing(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """A line for each tensor of one golden that differs."""
    for name in sorted(set(old) | set(new)):
        if name not in old or name not in new:
            yield f"{name}: {'new' if name in new else 'gone'}"
        elif old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            yield f"{name}: {old[name].dtype} {list(old[name].shape)} -> {new[name].dtype} {list(new[name].shape)}"
        elif not torch.equal(bits(old[name]), bits(new[name])):
            left, right = (exact.widen(x) if x.is_floating_point() else x.double() for x in (old[name], new[name]))
            gap = (left - right).abs().nan_to_num(0.0)
            unequal = (left != right) & ~(left.isnan() & right.isnan())
            yield f"{name}: {int(unequal.sum()):,} of {left.numel():,} values differ, by at most {float(gap.max()):.3g}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN compares equal to itself and -0 does not to +0."""
    return tensor.contiguous().view(torch.uint8)

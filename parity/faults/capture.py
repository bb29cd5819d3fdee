"""Captured calls: a safetensors file keyed by the calling convention's argument names, plus what came out.

Numbers and flags (max_context_len, clean_logits, k, eps), operation, layout and the versions of what ran are in the
file's metadata. A top-k has `slots` and `positions` instead of `output`; a store has kv_cache as it was before the
call, and `output` is the cache after it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from parity.ops.diagnosis import Diagnosis
from parity.pages import layout as layouts
from parity.run.operation import all_operations, find

FORMAT = "indexer-parity/capture 1"


@dataclass(frozen=True, eq=False)
class Capture:
    """One call: its keyword arguments, its result (a tensor; (slots, positions) for a top-k), and what ran."""

    op: str
    layout: str
    named: dict[str, Any]
    output: Any
    facts: dict[str, str] = field(default_factory=dict)


def _conventions() -> dict[str, Diagnosis]:
    """The operations whose calls can be captured, with the names in their files."""
    found = {operation.name: operation.hook("diagnosis") for operation in all_operations()}
    return {name: value for name, value in found.items() if value is not None and value.tensors}


def save_capture(
    path: str | os.PathLike[str],
    op: str,
    layout: str,
    named: Mapping[str, Any],
    output: Any,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a call to a file.

    `named` are the keyword arguments of the operation's convention (a store's cache as it was before); facts are
    strings such as versions. ValueError names an argument that is missing."""
    known = _conventions()
    if op not in known:
        raise ValueError(f"op: expected one of {', '.join(known)}, got {op!r}")
    names = known[op]
    missing = [name for name in (*names.tensors, *names.numbers) if name not in named]
    if missing:
        raise ValueError(f"{missing[0]}: a capture of {op} needs it")
    tensors = {name: _plain(named[name]) for name in names.tensors}
    results = output if isinstance(output, tuple | list) else (output,)
    tensors |= {name: _plain(x) for name, x in zip(names.results, results, strict=True)}
    numbers = {name: json.dumps(kind(named[name])) for name, kind in names.numbers.items()}
    versions = {"torch": torch.__version__, **(facts or {})}
    save_file(tensors, os.fspath(path), {"format": FORMAT, "op": op, "layout": layout, **numbers, **versions})


def load_capture(path: str | os.PathLike[str]) -> Capture:
    """Read a file; ValueError, in one sentence naming the file, for one that is no capture."""
    known = _conventions()
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
    op, layout = facts.pop("op", ""), facts.pop("layout", "")
    if facts.pop("format", "") != FORMAT or op not in known:
        raise ValueError(f"{path}: its metadata do not say format={FORMAT} and an op of {', '.join(known)}")
    if find(op).layouts:
        layouts.find(layout, f"{path}: layout")
    names = known[op]
    missing = [name for name in (*names.tensors, *names.results) if name not in tensors]
    missing += [name for name in names.numbers if name not in facts]
    if missing:
        raise ValueError(f"{path}: a capture of {op} needs {missing[0]}")
    named: dict[str, Any] = {name: tensors[name] for name in names.tensors}
    named |= {name: kind(json.loads(facts.pop(name))) for name, kind in names.numbers.items()}
    results = tuple(tensors[name] for name in names.results)
    return Capture(op, layout, named, results if len(results) > 1 else results[0], facts)


def _plain(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().clone()

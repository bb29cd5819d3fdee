"""Captured calls: a safetensors file keyed by the calling convention's argument names, plus what came out.

Numbers and flags (max_context_len, clean_logits, k, eps), stage, layout and the versions of what ran are in the file's
metadata. A top-k has `slots` and `positions` instead of `output`; a store has kv_cache as it was before the call, and
`output` is the cache after it, as bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = "indexer-parity/capture 1"
NAMES: dict[str, tuple[str, ...]] = {
    "logits": ("q", "kv_cache", "weights", "context_lens", "block_table"),
    "topk": ("logits", "context_lens", "block_table"),
    "store": ("pooled", "norm_weight", "positions", "rope_table", "out_loc", "kv_cache"),
}
NUMBERS: dict[str, dict[str, type]] = {
    "logits": {"max_context_len": int, "clean_logits": bool},
    "topk": {"k": int},
    "store": {"eps": float},
}
OUTPUTS = {"logits": ("output",), "topk": ("slots", "positions"), "store": ("output",)}


@dataclass(frozen=True, eq=False)
class Capture:
    """One call: its keyword arguments, its result (a tensor; (slots, positions) for a top-k), and what ran."""

    stage: str
    layout: str
    named: dict[str, Any]
    output: Any
    facts: dict[str, str] = field(default_factory=dict)


def save_capture(
    path: str | os.PathLike[str],
    stage: str,
    layout: str,
    named: Mapping[str, Any],
    output: Any,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write a call to a file. `named` are the keyword arguments of the stage's convention (a store's cache as it was
    before); facts are strings such as versions. ValueError names an argument that is missing."""
    if stage not in NAMES:
        raise ValueError(f"stage: expected one of {', '.join(NAMES)}, got {stage!r}")
    missing = [name for name in (*NAMES[stage], *NUMBERS[stage]) if name not in named]
    if missing:
        raise ValueError(f"{missing[0]}: a capture of stage {stage} needs it")
    tensors = {name: _plain(named[name]) for name in NAMES[stage]}
    results = output if isinstance(output, tuple | list) else (output,)
    tensors |= {name: _plain(x) for name, x in zip(OUTPUTS[stage], results, strict=True)}
    numbers = {name: json.dumps(kind(named[name])) for name, kind in NUMBERS[stage].items()}
    versions = {"torch": torch.__version__, **(facts or {})}
    save_file(tensors, os.fspath(path), {"format": FORMAT, "stage": stage, "layout": layout, **numbers, **versions})


def load_capture(path: str | os.PathLike[str]) -> Capture:
    """Read a file; ValueError, in one sentence naming the file, for one that is no capture."""
    try:
        with safe_open(os.fspath(path), framework="pt") as file:
            facts = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except Exception as error:
        raise ValueError(f"{path}: not a safetensors file: {error}") from error
    stage, layout = facts.pop("stage", ""), facts.pop("layout", "")
    if facts.pop("format", "") != FORMAT or stage not in NAMES:
        raise ValueError(f"{path}: its metadata do not say format={FORMAT} and a stage of {', '.join(NAMES)}")
    missing = [name for name in (*NAMES[stage], *OUTPUTS[stage]) if name not in tensors]
    missing += [name for name in NUMBERS[stage] if name not in facts]
    if missing:
        raise ValueError(f"{path}: a capture of stage {stage} needs {missing[0]}")
    named: dict[str, Any] = {name: tensors[name] for name in NAMES[stage]}
    named |= {name: kind(json.loads(facts.pop(name))) for name, kind in NUMBERS[stage].items()}
    results = tuple(tensors[name] for name in OUTPUTS[stage])
    return Capture(stage, layout, named, results if len(results) > 1 else results[0], facts)


def _plain(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().clone()

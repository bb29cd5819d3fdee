"""The dots of DeepGEMM's fp8 logits kernel, read out of its logits and probed like our own.

`python tools/probe_deepgemm.py [--json FILE]`. That kernel returns no dots, but its logits show them: with
a weight of 1 at one head, 0 at the others and key scales of 1, a logit is relu(dot) of that head, and negated queries
show the negative dots. So the probe can search it like any unit. Needs a CUDA device and the package deep_gemm, which
compiles its kernels with a CUDA toolkit; nothing else here uses either.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from parity.command import write_json
from parity.run import device as devices
from parity.tensorcore.probe import fits
from parity.tensorcore.probe_check import probe
from parity.tensorcore.probe_search import DotUnit

KEYS, HEADS, DEPTH = 128, 64, 128
TILES = 16
"""Tiles in one call: every query row computes only the keys of its own tile, but the result is rows x all keys."""

Logits = Callable[..., torch.Tensor]


def deepgemm_unit(mqa_logits: Logits, device: torch.device | str) -> DotUnit:
    """DeepGEMM's dots as a unit: a tile is 128 keys by the 64 heads of one query token.

    ``mqa_logits(q e4m3 [rows, 64, 128], (k e4m3 [keys, 128], scales float32 [keys]), weights float32 [rows, 64], starts
    int32 [rows], ends int32 [rows]) -> float32 [rows, keys]``, as ``deep_gemm.fp8_mqa_logits``: weighted sums over the
    heads of relu(q . k), times the key's scale. A NaN dot comes back as 0, since that relu drops it.
    """

    def positive(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """relu of the dots of up to ``TILES`` tiles; each query token occurs once per head."""
        tiles = a.shape[0]
        tile = torch.arange(tiles, dtype=torch.int32, device=device).repeat_interleave(HEADS)
        queries = b.view(torch.uint8).repeat_interleave(HEADS, 0).view(b.dtype)
        weights = torch.eye(HEADS, device=device).repeat(tiles, 1)
        scales = torch.ones(tiles * KEYS, device=device)
        keys = a.reshape(tiles * KEYS, DEPTH)
        logits = mqa_logits(queries, (keys, scales), weights, tile * KEYS, (tile + 1) * KEYS)
        own = logits[:, : tiles * KEYS].reshape(tiles, HEADS, tiles, KEYS)
        each = torch.arange(tiles, device=device)
        return own[each, :, each].transpose(1, 2)

    def dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = [torch.empty(0, KEYS, HEADS, device=device)]
        for x, y in zip(a.contiguous().split(TILES), b.contiguous().split(TILES), strict=True):
            negated = (y.view(torch.uint8) ^ 0x80).view(y.dtype)
            found.append(positive(x, y) - positive(x, negated))
        return torch.cat(found)

    return DotUnit("e4m3", dot, device, KEYS, HEADS, DEPTH, "e4m3, DeepGEMM fp8_mqa_logits")


def report(mqa_logits: Logits, device: torch.device, tiles: int = 32) -> dict[str, Any]:
    """Search, then five distributions of ``tiles`` tiles (32: 1,310,720 dots); JSON types only."""
    from importlib import metadata

    finding = probe(deepgemm_unit(mqa_logits, device), tiles=tiles)
    for line in finding.lines():
        print(line)
    versions = {}
    for name in ("sgl-deep-gemm", "deep-gemm"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "kind": "probe of deepgemm",
        "provenance": {**devices.provenance(device), **versions},
        "finding": finding.as_dict(),
        "exit": 0 if fits(finding) else 1,
    }


def main() -> int:
    """0 if a model gives every dot, 1 if none does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write what was found to FILE")
    options = parser.parse_args()
    device = devices.resolve("cuda")
    from deep_gemm import fp8_mqa_logits

    found = report(fp8_mqa_logits, device)
    write_json(options.json, found)
    return int(found["exit"])


if __name__ == "__main__":
    sys.exit(main())

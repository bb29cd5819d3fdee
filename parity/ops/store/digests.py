"""Digests of the bytes that every mode of our store leaves for a few fixed cases, the same on a CPU and on any GPU."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from parity.command import CommandError
from parity.golden.stored import Truth, as_json, read, shipped
from parity.ops.store.builtin import implementations
from parity.ops.store.case import StoreCase
from parity.ops.store.operands import StoreOperands, build_store
from parity.run.device import resolve
from parity.run.implementation import Implementation
from parity.run.operation import parse_case
from parity.run.runner import execute

FILE = "store_digests.json"
# Every data class, dtype, weight and position kind, some -1s, ragged counts, and a pool with gaps.
FIXED = tuple(
    StoreCase(ids=tuple(range(first, first + count)), layout=layout, perm=7, pages=count // 64 + 3, **fields)
    for layout in ("bf16", "fp8", "fp4")  # a digest per recorded case: a new layout has none yet
    for first, count, fields in (
        (0, 512, {"data": "bell"}),
        (3, 200, {"data": "octaves", "pooled": "bf16", "weight": "bf16", "skip": 5, "seed": 1}),
        (0, 133, {"data": "zeros", "weights": "ties", "gap": 48, "seed": 2}),
        (9, 64, {"data": "onehot", "weights": "ties", "pooled": "bf16", "seed": 3}),
        (0, 65, {"data": "pairs", "positions": "far", "seed": 4}),
        (0, 100, {"data": "tiny", "eps_exponent": 12, "seed": 5}),
        (0, 31, {"data": "large", "weight": "bf16", "place": "last", "seed": 6}),
    )
)


@functools.cache
def known_digests() -> dict[StoreCase, dict[str, str]]:
    """{built-in name: digest} of each fixed case, as recorded."""
    return {parse_case(text): digests for text, digests in read(shipped(FILE), "record of digests").items()}


def digest_of(contents: torch.Tensor) -> str:
    """SHA-256 of a uint8 tensor's bytes, 32 hexadecimal digits."""
    return hashlib.sha256(contents.cpu().numpy().tobytes()).hexdigest()[:32]


def compute(device: torch.device) -> dict[StoreCase, dict[str, str]]:
    """The same as computed on a device; CommandError where a store cannot run here."""
    found: dict[StoreCase, dict[str, str]] = {}
    for impl, operands, output in outputs(device, lambda impl: [case for case in FIXED if case.layout == impl.layout]):
        found.setdefault(operands.case, {})[impl.name] = digest_of(output)
    return found


def outputs(
    device: torch.device, cases: Callable[[Implementation], Sequence[StoreCase]]
) -> Iterator[tuple[Implementation, StoreOperands, torch.Tensor]]:
    """(store, operands after the call, contents of the pool) of every mode of our store on its cases."""
    for impl in implementations(device).values():
        assert impl.function is not None
        for case in cases(impl):
            operands = build_store(case, device)
            outcome = execute(impl, impl.function, operands)
            if outcome.output is None:
                raise CommandError(f"{impl.name} on {case}: {outcome.complaint}")
            yield impl, operands, outcome.output


def _make(folder: Path) -> Iterator[tuple[str, bytes]]:
    recorded = {parse_case(text): text for text in read(shipped(FILE), "record of digests")}
    found = compute(resolve("auto"))
    yield FILE, as_json({recorded.get(case, str(case)): digests for case, digests in found.items()})


TRUTH = Truth("digests", "truth", _make)

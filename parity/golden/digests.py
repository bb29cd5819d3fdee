"""Digests of the bytes that every mode of our store leaves for a few fixed cases, the same on a CPU and on any GPU.

`python -m parity.golden.digests` computes them on this machine and compares, `--write` records them.
"""

import functools
import hashlib
import json
import sys
from pathlib import Path

import torch

from parity.ops.store.case import StoreCase
from parity.run.operation import parse_case

FILE = Path(__file__).resolve().parents[1] / "store_digests.json"
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
def known_digests() -> dict[str, dict[str, str]]:
    """Case string to {built-in name: digest}."""
    found = json.loads(FILE.read_text()) if FILE.is_file() else {}
    return {str(parse_case(text)): digests for text, digests in found.items()}


def digest_of(contents: torch.Tensor) -> str:
    """SHA-256 of a uint8 tensor's bytes, 32 hexadecimal digits."""
    return hashlib.sha256(contents.cpu().numpy().tobytes()).hexdigest()[:32]


def compute(device: torch.device) -> dict[str, dict[str, str]]:
    """The digests of all modes on a device."""
    from parity.ops.store.builtin import implementations as stores
    from parity.ops.store.operands import build_store
    from parity.run.runner import execute as execute_store

    found: dict[str, dict[str, str]] = {}
    for impl in stores(device).values():
        for case in FIXED:
            if case.layout != impl.layout:
                continue
            assert impl.function is not None
            outcome = execute_store(impl, impl.function, build_store(case, device))
            if outcome.output is None:
                raise RuntimeError(f"{impl.name}: {outcome.complaint}")
            found.setdefault(str(case), {})[impl.name] = digest_of(outcome.output)
    return found


def differences(found: dict[str, dict[str, str]]) -> list[str]:
    """One line for each digest that is not the recorded one."""
    known = known_digests()
    return [
        f"{name}: other bytes than recorded for {case}"
        for case, digests in found.items()
        for name, digest in digests.items()
        if known.get(case, {}).get(name) != digest
    ]


def main(words: list[str]) -> int:
    """Compare or record; 0 if nothing differs."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = compute(device)
    assert all(parse_case(case) for case in found)
    if "--write" in words:
        FILE.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"recorded {sum(map(len, found.values()))} digests on {device}")
        return 0
    lines = differences(found)
    print("\n".join(lines) or f"{sum(map(len, found.values()))} digests agree on {device}")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

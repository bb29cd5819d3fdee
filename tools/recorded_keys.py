"""Our store against DeepSeek's recorded keys: from each recorded pooled key, is the stored key the recorded one?

`python tools/recorded_keys.py [DIR]` prints the counts; without a GPU the CUDA source is executed on the CPU.
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from impl.store_modes import Mode
from parity.ops.store.builtin import function_of, missing
from parity.pages.layout import find
from parity.recorded.files import Recording, RecordingError, read_folder
from parity.run import device as devices
from reference import exact, rope

# The modes that keep the published arithmetic: at 256, 132 and 68 bytes a slot.
EQUAL = (Mode("bf16", "published", True), Mode("fp8_pow2", "published", True), Mode("fp4", "published"))
# What differs if one of its steps is missing: a bf16 rounding inside, the fp4 step, the power of two.
NEAR = (Mode("bf16", "fused", True), Mode("bf16", "published"), Mode("fp8", "published", True))

Store = Callable[..., Any]


class Counts(NamedTuple):
    """Values compared, and values whose float32 bits differ, over all recordings."""

    values: int
    differing: int


class Keys(NamedTuple):
    """Recorded keys: pooled bfloat16 [n, 128], positions int32 [n], stored bfloat16 [n, 128], and what made them."""

    file: str
    pooled: Tensor
    positions: Tensor
    stored: Tensor
    norm_weight: Tensor
    eps: float
    table: Tensor


def recorded_keys(folder: Path) -> Iterator[Keys]:
    """Every recorded set of pooled and stored keys of a folder."""
    norms: dict[str, Tensor] = {}
    tables: dict[Any, Tensor] = {}
    for _, recording in read_folder(folder):
        if isinstance(recording, RecordingError):
            raise recording
        if recording.kind == "params":
            norms[recording.field("params")] = recording.tensors["param.norm"].to(torch.float32)
        elif "config" in recording.entry:
            config = recording.config()
            if config not in tables:
                tables[config] = rope.rope_table(config, 8192)
            norm = norms[recording.entry["config"]["params"]]
            for pooled, positions, stored in _phases(recording):
                yield Keys(recording.name, pooled, positions, stored, norm, config.norm_eps, tables[config])


def _phases(recording: Recording) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    tensors = recording.tensors
    for phase in ("prefill", "decode"):
        pooled, stored = tensors.get(f"{phase}.k.pooled"), tensors.get(f"{phase}.k.fp4")
        if pooled is None or stored is None or not stored.numel():
            continue
        if phase == "prefill":  # [batch, keys, 128]
            positions = (4 * torch.arange(pooled.shape[1])).repeat(pooled.shape[0])
        else:  # [closing steps, batch, 128]
            first = tensors["decode.closing_steps"] + recording.count("prefill_len") - 3
            positions = first.repeat_interleave(pooled.shape[1])
        yield pooled.reshape(-1, 128), positions.to(torch.int32), stored.reshape(-1, 128)


def compare(folder: Path, mode: Mode, device: torch.device, store: Store | None = None) -> Counts:
    """Store every recorded pooled key in `mode` and compare what a reader decodes with the recorded stored key."""
    function = store or function_of(mode, device)
    values = differing = 0
    for keys in recorded_keys(folder):
        count = keys.pooled.shape[0]
        pool_pages = count // 64 + 2
        layout = find(mode.layout)
        pool = layout.empty_cache(pool_pages, device)
        # Far apart and out of order: a slot step that is coprime to the number of slots.
        step = next(n for n in (37, 41, 43) if (64 * pool_pages) % n)
        slots = (torch.arange(count) * step % (64 * pool_pages)).to(device)
        given = (keys.pooled.contiguous(), keys.norm_weight, keys.positions, keys.table)
        pooled, norm, positions, table = (tensor.to(device) for tensor in given)
        function(pooled, norm, keys.eps, positions, table, slots, pool)
        found, scales = layout.read(pool, slots)
        decoded = exact.widen(found) * (1.0 if scales is None else exact.widen(scales)[:, None])
        got, wanted = decoded.to(torch.float32).cpu(), keys.stored.to(torch.float32)
        values += got.numel()
        differing += int((got.view(torch.int32) != wanted.view(torch.int32)).sum())
    return Counts(values, differing)


def main(folder: Path) -> int:
    """Print a line per mode; 1 if a mode that must be equal is not."""
    device = devices.resolve("auto")
    if reason := missing(device):
        raise SystemExit(f"not executed: {reason}")
    wrong = 0
    for mode in (*EQUAL, *NEAR):
        counts = compare(folder, mode, device)
        share = f"{counts.differing / counts.values:.3%}"
        print(f"{mode.name:<36}{counts.values:>9,} values{counts.differing:>9,} differ  {share}")
        wrong += counts.differing if mode in EQUAL else 0
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "fixtures/official")))

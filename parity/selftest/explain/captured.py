"""Files of captured tensors for tests."""

from pathlib import Path

import torch
from safetensors.torch import save_file

from parity.explain import samples


def write_captured(path: Path, sample: samples.Sample, **changes: torch.Tensor | None) -> Path:
    """A file of captured tensors with those of a sample; `changes` replace a tensor, or leave it out."""
    tensors = {"q": samples.projected(sample).to(torch.bfloat16), "gate": sample.gate, "norm": sample.norm}
    tensors |= {"pooled": samples.pooled(sample), "positions": sample.positions}
    kept = {name: value.contiguous() for name, value in (tensors | changes).items() if value is not None}
    save_file(kept, path)
    return path

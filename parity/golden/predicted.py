"""Results that a card must return to the bit, computed on a CPU through the models: dots, and logits where the order of
the head sum is on record.

``python -m parity.golden.predicted DIR`` writes them anew; the suite compares a GPU's with those in
fixtures/predicted.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from parity.numerics.arithmetic import named_model
from parity.numerics.blocks import Expected, blocks
from parity.numerics.headsum import HeadSum, predicted_dots, predicted_logits, recorded_order
from parity.ops.paged_logits.operands import build_logits as build
from parity.pages.layout import find
from parity.run.operation import parse_case

FOLDER = Path(__file__).resolve().parents[2] / "fixtures" / "predicted"
MANIFEST = "manifest.json"
CASES = {
    "fp8-decode": "v1 lens=130,77 layout=fp8 data=octaves seed=41 perm=3",
    "fp8-speculation": "v1 lens=64,65 next_n=2 layout=fp8 data=near_ties seed=42 perm=5 tail=huge",
    "fp8-prefill": "v1 lens=p200+8 next_n=8 layout=fp8 data=outliers seed=43 perm=2",
    "bf16-decode": "v1 lens=100 data=octaves seed=44 perm=4",
}
ARCHITECTURE = "sm_90"
TRITON = "3.6.0"
"""The compiler whose order of the head sum the stored logits follow; dots do not depend on it."""


def predict(text: str) -> tuple[dict[str, torch.Tensor], str]:
    """(dots float32 [T, H, W], NaN past a row's length; logits float32 [T, W], -inf past it), and the order's name."""
    case = parse_case(text)
    operands = build(case, torch.device("cpu"))
    arithmetic = named_model(str(find(case.layout).core)).arithmetic
    found = recorded_order(ARCHITECTURE, TRITON, True, "", case.heads)
    assert not isinstance(found, str), found
    frame = Expected.empty(operands, None)
    dots = torch.full((case.rows, case.heads, frame.logits.shape[1]), float("nan"))
    for block in blocks(operands, case.layout, frame, 64 << 20):
        values = predicted_dots(block, arithmetic)
        given = block.place >= 0
        rows = block.place[given]
        old = dots[rows][..., block.keys]
        dots[rows, :, block.keys] = torch.where(block.real[given][:, None], values[given], old)
    logits = predicted_logits(operands, case.layout, arithmetic, found.order)
    return {"dots": dots, "logits": logits.logits.to(torch.float32)}, found.name


def write(folder: Path) -> list[str]:
    """Writes every case's file and the manifest; the names."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest: dict[str, Any] = {
        "format": 1,
        "about": "Computed on a CPU through the models; a GPU has to return these bits. By parity.golden.predicted.",
        "architecture": ARCHITECTURE,
        "triton": TRITON,
        "cases": {},
    }
    for name, text in CASES.items():
        tensors, order = predict(text)
        data = save(tensors)
        (folder / f"{name}.safetensors").write_bytes(data)
        layout = parse_case(text).layout
        core = str(find(layout).core)
        manifest["cases"][name] = {
            "case": text,
            "layout": layout,
            "model": f"{core} {named_model(core).arithmetic}",
            "order": order,
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return list(CASES)


def read(name: str, folder: Path = FOLDER) -> tuple[dict[str, torch.Tensor], HeadSum]:
    """The stored tensors of a case and the order that its logits follow. ValueError where a file is not the listed
    one."""
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    entry = manifest["cases"][name]
    path = folder / f"{name}.safetensors"
    if hashlib.sha256(path.read_bytes()).hexdigest() != entry["sha256"]:
        raise ValueError(f"{path}: not the file that {MANIFEST} lists (its sha256 differs)")
    heads = parse_case(entry["case"]).heads
    found = recorded_order(manifest["architecture"], manifest["triton"], True, "", heads)
    if isinstance(found, str):
        raise ValueError(f"{folder / MANIFEST}: {found}")
    return load_file(path), found.order


def main(words: Sequence[str]) -> int:
    """``python -m parity.golden.predicted DIR``."""
    if len(words) != 1:
        print("usage: python -m parity.golden.predicted DIR", file=sys.stderr)
        return 2
    print(f"written: {', '.join(write(Path(words[0])))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

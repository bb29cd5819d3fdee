"""Results that a GPU must return to the bit, computed on a CPU through the models: dots, and logits where the order of
the head sum is on record. They lie in `fixtures/predicted` of a checkout.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from parity.golden.goldens import digest, read_listed
from parity.golden.stored import MANIFEST, StoredError, Truth, locate, read
from parity.numerics.arithmetic import named_model
from parity.numerics.blocks import Expected, blocks
from parity.numerics.headsum import HeadSum, predicted_dots, predicted_logits, recorded_order
from parity.ops.paged_logits.operands import build_logits
from parity.pages.layout import find
from parity.run.operation import parse_case

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
    operands = build_logits(case, torch.device("cpu"))
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


def _make(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every case's file, and the manifest that lists them."""
    manifest: dict[str, Any] = {
        "format": 1,
        "about": "Computed on a CPU through the models; a GPU has to return these bits.",
        "architecture": ARCHITECTURE,
        "triton": TRITON,
        "cases": {},
    }
    for name, text in CASES.items():
        tensors, order = predict(text)
        content = save(tensors)
        layout = parse_case(text).layout
        core = str(find(layout).core)
        model = f"{core} {named_model(core).arithmetic}"
        manifest["cases"][name] = {"case": text, "layout": layout, "model": model, "order": order, **digest(content)}
        yield f"{name}.safetensors", content
    yield MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode()


TRUTH = Truth("predicted", "predicted", _make)
TRUTHS = (TRUTH,)


@functools.cache
def folder() -> Path | None:
    """Where the predictions lie; None without a checkout."""
    return locate(TRUTH.folder)


def stored(name: str, place: Path | None = None) -> tuple[dict[str, torch.Tensor], HeadSum]:
    """The stored tensors of a case and the order that its logits follow; StoredError where a file is not the listed
    one."""
    place = place or folder()
    assert place is not None
    manifest = read(place / MANIFEST, "manifest of predictions", format=1)
    entry = manifest["cases"][name]
    tensors, _ = read_listed(place / f"{name}.safetensors", entry)
    heads = parse_case(entry["case"]).heads
    found = recorded_order(manifest["architecture"], manifest["triton"], True, "", heads)
    if isinstance(found, str):
        raise StoredError(f"{place / MANIFEST}: {found}")
    return tensors, found.order

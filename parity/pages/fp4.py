"""The fp4 layout: 128 e2m1 numbers, two per byte, and four ue8m0 scales per slot, one for each block of 32 channels."""

import torch

from parity.pages.layout import Layout

FP4 = Layout(
    name="fp4",
    about="128 e2m1 numbers and four ue8m0 scales, 68 bytes per slot",
    payload=64,
    scale=4,
    query_dtype=torch.bfloat16,
    poison_scale={"huge": 0xFC},  # 2^125: six times it is still finite in float32
)

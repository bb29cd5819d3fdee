"""The fp8 layout: 128 e4m3 numbers and one float32 scale per slot."""

import torch

from parity.pages.layout import Layout

FP8 = Layout(
    name="fp8",
    about="128 e4m3 numbers and a float32 scale, 132 bytes per slot",
    payload=128,
    scale=4,
    query_dtype=torch.float8_e4m3fn,
)

"""The bf16 layout: 128 bf16 numbers per slot, no scales."""

import torch

from parity.pages.layout import Layout

BF16 = Layout(
    name="bf16",
    about="128 bf16 numbers, 256 bytes per slot",
    payload=256,
    cache_dtype=torch.bfloat16,
    query_dtype=torch.bfloat16,
)

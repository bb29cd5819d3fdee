"""Our top-k as an implementation to judge."""

import torch

from impl import topk
from parity.domain.contract import Contract
from parity.run.implementation import Implementation


def implementations(device: torch.device) -> dict[str, Implementation]:
    """By name."""
    return {
        "topk": Implementation(
            name="topk",
            op="topk",
            layout="",
            contract=Contract.from_dict(topk.CONTRACT, device),
            function=topk.topk_to_slots,
            kernel="torch",
            arguments=("--impl", "topk"),
        )
    }

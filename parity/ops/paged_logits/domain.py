"""The domain of paged logits."""

from collections.abc import Iterable

import torch

from parity.domain.dimensions import Dimension
from parity.domain.profiles import Profile
from parity.ops.paged_logits.case import DATA, HEADS, OFFSETS, Case
from parity.ops.shared import domain as shared
from parity.ops.shared.domain import Reach
from parity.pages.placement import place
from parity.run.implementation import Implementation

GPU_PAGES = 20
"""Binary digits of the largest page on a GPU, whose memory is not mapped lazily: a pool of 9 to 17 GB."""
POOLS = {"below 2^31": 0, "from 2^31": 31, "from 2^32": 32, "from 2^33": 33}
"""Bytes of a pool, by the exponent of the smallest."""


def _pool(case: Case) -> Iterable[str]:
    size = place(case).pool_pages * case.page_stride
    yield [name for name, exponent in POOLS.items() if not exponent or size >= 1 << exponent][-1]


DIMENSIONS = (
    *shared.paged_dimensions(DATA, {*OFFSETS} - {"lens"}),
    Dimension(
        "out",
        "how the buffer of the result lies, where a function takes one",
        lambda case: ("gap" if "out" in case.strides else "packed",),
        among=("packed", "gap"),
        free=True,
    ),
    Dimension("pool_bytes", "bytes from the first page to the last", _pool, among=tuple(POOLS)),
    Dimension("heads", "index heads", lambda case: (case.heads,), among=HEADS, free=True),
)


def reach(impl: Implementation, profile: Profile, device: torch.device) -> Reach:
    """How far cases for an implementation go on a device."""
    found = shared.reach(impl, profile, device)
    if device.type == "cuda":
        found = found.nearer({"page": (1 << GPU_PAGES) - 1}, "a GPU's memory is not mapped lazily")
    return found

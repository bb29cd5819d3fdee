"""The domain of paged logits: its dimensions, how far a machine can go, and one case per border of every bucket."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from parity.domain.dimensions import Dimension, Domain, Promise
from parity.domain.profiles import Profile
from parity.ops.paged_logits.case import DATA, HEADS, OFFSETS, Case
from parity.ops.shared import domain as shared
from parity.ops.shared.domain import Reach
from parity.pages.layout import PAGE, find
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


PERIOD = 61
"""Pages of a long row that differ: a prime, so that pages a power of two apart never have the same content."""
FEW_ROWS = 256
"""Rows up to which a case keeps its number of heads."""


def at_length(case: Case, length: int, other: int) -> Case:
    """One row of this length; its pages repeat where they are very many."""
    period = PERIOD if length > 2 * PERIOD * PAGE else 0
    return replace(shared.at_length(case, length, other), period=period)


def few_heads(case: Case) -> Case:
    """A case of many rows with few heads, which is what they cost."""
    many = case.rows > FEW_ROWS and case.only_heads is None
    return replace(case, heads=min(case.heads, HEADS[1])) if many else case


AXES: dict[str, Any] = {
    **shared.AXES,
    "length": at_length,
    "next_n": lambda case, rows, start: few_heads(shared.at_next_n(case, rows, start)),
    "requests": lambda case, requests, start: few_heads(shared.at_requests(case, requests, start)),
}


def borders(layout: str, heads: Sequence[int], data: str, far: Reach) -> list[Case]:
    """See `parity.ops.shared.shared.borders`; besides, every number of heads, and a pool past each power of two."""
    lengths = ((70, 130), (5, 64))
    base = Case(lengths=lengths, layout=layout, heads=heads[0], data=data, seed=11, perm=5, tail="canary", spare=2)
    found = list(shared.borders(base, DIMENSIONS, AXES, far))
    found += [replace(base, heads=count) for count in heads]
    found += [replace(base, strides=("out",), seed=base.seed + more) for more in (0, 1)]
    beyond = [(1 << exponent) // find(layout).page_bytes + 16 for exponent in POOLS.values() if exponent]
    found += [shared.at_page(base, page, 0) for page in beyond if page < far.page]
    return shared.reseeded(iter(found))


def promise(impl: Implementation, profile: Profile, device: torch.device) -> tuple[Promise, str]:
    """The buckets that the checks go to, and why not to the others."""
    far = reach(impl, profile, device)
    found = shared.promised(DIMENSIONS, far)
    heads = tuple(h for h in HEADS if not impl.contract.heads or h in impl.contract.heads)
    found["heads"] = tuple(map(str, heads))
    size = find(impl.layout).page_bytes * far.page
    found["pool_bytes"] = tuple(name for name, exponent in POOLS.items() if size > 1 << exponent)
    data = tuple(name for name in DATA if not (name == "subnormal" and impl.contract.flush_to_zero))
    cases = [replace(case, data=data[0]) for case in borders(impl.layout, heads, "exact", far)]
    cases += [replace(cases[0], data=name) for name in data]
    # Classes are drawn, each by the checks that can judge it: few examples promise none.
    found["data"] = data if profile.far else ()
    return shared.narrowed(found, DOMAIN, cases, impl.contract), far.why


DOMAIN = Domain(DIMENSIONS, promise, shared.fit_paged)

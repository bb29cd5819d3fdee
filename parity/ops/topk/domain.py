"""The domain of top-k: its dimensions, and one case per border of every bucket."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.domain.dimensions import Dimension, Domain, Promise
from parity.domain.profiles import Profile
from parity.ops.shared import domain as shared
from parity.ops.shared.domain import MOST_K, Reach
from parity.ops.topk.case import DATA, STRIDES, TopkCase
from parity.run.implementation import Implementation

NONFINITE = ("neginf", "nan", "inf")
SIZES = ("no keys", "fewer than k", "k", "more than k")


def _sizes(case: TopkCase) -> Iterable[str]:
    for row in case.lengths:
        for n in row:
            yield "no keys" if not n else "fewer than k" if n < case.k else "k" if n == case.k else "more than k"


DIMENSIONS = (
    *shared.paged_dimensions(DATA, {*STRIDES} - {"lens"}),
    Dimension("k", "slots to choose per row", lambda case: (case.k,), 1, MOST_K),
    Dimension("keys", "keys of a row beside k", _sizes, among=SIZES),
)


def at_k(case: TopkCase, k: int, other: int) -> TopkCase:
    """So many places, and rows of one key fewer, as many and one more."""
    lengths = ((max(0, k - 1),), (k,), (k + 1,), (2 * k + other % 100,))
    return replace(case, **shared.PLAIN, lengths=lengths, k=k, prefix=0)


AXES: dict[str, Any] = {**shared.AXES, "k": at_k}


def borders(reach: Reach) -> list[TopkCase]:
    """See `parity.ops.shared.domain.borders`; every border under data without ties and under every class."""
    base = TopkCase(lengths=((70, 130), (5, 64)), k=20, data="random", seed=11, perm=5, tail="canary", spare=2)
    found = list(shared.borders(base, DIMENSIONS, AXES, reach))
    found += [replace(base, data=data, k=k) for data in DATA for k in (1, 20, 64)]
    return shared.reseeded(iter(found))


def reach(impl: Implementation, profile: Profile, device: torch.device) -> Reach:
    """How far cases for an implementation go on a device."""
    return shared.reach(impl, profile, device)


def fit(case: TopkCase, contract: Contract) -> TopkCase:
    """The case within what a contract accepts."""
    if contract.k and case.k not in contract.k:
        case = replace(case, k=min(contract.k, key=lambda k: (abs(k - case.k), k)))
    if contract.nonfinite == "unspecified" and case.data in NONFINITE:
        case = replace(case, data="random")
    return shared.fit_paged(case, contract)


def promise(impl: Implementation, profile: Profile, device: torch.device) -> tuple[Promise, str]:
    """The buckets that the checks go to, and why not to the others."""
    far = reach(impl, profile, device)
    return shared.narrowed(shared.promised(DIMENSIONS, far), DOMAIN, borders(far), impl.contract), far.why


DOMAIN = Domain(DIMENSIONS, promise, fit)

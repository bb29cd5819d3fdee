"""The domain of stores: the dimensions of their cases, and one case per border of every bucket."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.contract import Contract
from parity.domain.dimensions import Dimension, Domain, Promise, numbers
from parity.domain.profiles import Profile
from parity.ops.shared.domain import SINGLETONS
from parity.ops.store.case import ABOUT, DTYPES, OFFSETS, PLACES, POSITIONS, STRIDES, WEIGHTS, StoreCase
from parity.ops.store.operands import slots_of
from parity.pages.layout import PAGE
from parity.pages.placement import MAX_PAGE
from parity.run.implementation import Implementation

MOST_TOKENS = 1 << 16
"""Tokens of the largest call drawn: a prefill chunk."""
REACH = {"tokens": MOST_TOKENS, "page": MAX_PAGE}
NEAR = {"tokens": (1 << 10) - 1}
"""How far a profile goes that is meant to take seconds."""
HOSTED = {"tokens": (1 << 13) - 1}
"""How far CUDA source goes that a CPU runs thread by thread: 8,192 tokens take seconds."""
GPU_PAGES = 20
"""Binary digits of the largest page on a GPU, whose memory is not mapped lazily."""
DATA = tuple(name for name in ABOUT if name != "context")


def _view(case: StoreCase, name: str) -> Iterable[str]:
    words = [word for word, there in (("gap", name in case.strides), ("offset", name in case.offsets)) if there]
    return ("+".join(words) or "packed",)


def _last_page(case: StoreCase) -> Iterable[int]:
    slots = slots_of(case)
    if slots.numel() and int(slots.max()) >= 0:
        yield int(slots.max()) // PAGE


def _of(name: str) -> Callable[[StoreCase], Iterable[Any]]:
    return lambda case: (getattr(case, name),)


DIMENSIONS = (
    Dimension("tokens", "tokens of a call", lambda case: (case.tokens,), 0, MOST_TOKENS),
    Dimension("page", "largest page that is written", _last_page, 0, MAX_PAGE),
    Dimension("skipped", "slots of -1", lambda c: (str(min(c.skip, 2)),), among=("0", "1", "2")),
    Dimension("data", "class of the pooled keys", _of("data"), among=DATA, free=True),
    Dimension("pooled_dtype", "type of the pooled keys", _of("pooled"), among=DTYPES, free=True),
    Dimension("weight_dtype", "type of the norm's weight", _of("weight"), among=DTYPES, free=True),
    Dimension("weights", "norm weights", _of("weights"), among=WEIGHTS, free=True),
    Dimension("positions", "positions", _of("positions"), among=POSITIONS, free=True),
    Dimension("place", "where slots lie", _of("place"), among=PLACES, free=True),
    Dimension("gap", "bytes between pages", lambda c: ("yes" if c.gap else "no",), among=("no", "yes"), free=True),
    *(
        Dimension(
            f"{name} view",
            "how it lies in its storage",
            partial(_view, name=name),
            among=("packed", "offset", *(("gap", "gap+offset") if name in STRIDES else ())),
            free=True,
        )
        for name in OFFSETS
    ),
    SINGLETONS,
)


def at_tokens(case: StoreCase, tokens: int) -> StoreCase:
    """So many tokens, in a pool that holds them."""
    place = "spread" if case.place == "edges" and tokens > 64 else case.place
    first = case.ids[0] if case.ids else 0
    least = -(-tokens // (2 if place == "edges" else PAGE))
    return replace(case, ids=tuple(range(first, first + tokens)), place=place, pages=max(case.pages, least))


def at_page(case: StoreCase, page: int) -> StoreCase:
    """The last page that slots may lie in has this number."""
    return replace(case, base=max(0, page - case.pages + 1), gap=0)


AXES: Mapping[str, Callable[[StoreCase, int], StoreCase]] = {"tokens": at_tokens, "page": at_page}


def reach(impl: Implementation, profile: Profile, device: torch.device) -> tuple[dict[str, int], str]:
    """(how far cases for an implementation go on a device, why not further)."""
    limits = [
        (not profile.far, NEAR, f"profile {profile.name}"),
        (impl.kernel == "cuda source on cpu", HOSTED, "CUDA source that a CPU runs"),
        (device.type == "cuda", {"page": (1 << GPU_PAGES) - 1}, "a GPU's memory is not mapped lazily"),
    ]
    found = dict(REACH)
    for holds, limit, _ in limits:
        if holds:
            found |= {name: min(found[name], most) for name, most in limit.items()}
    return found, ", ".join(why for holds, _, why in limits if holds)


def stretched(plain: st.SearchStrategy[StoreCase], far: Mapping[str, int]) -> st.SearchStrategy[StoreCase]:
    """A case of `plain` with one dimension drawn over all of its range."""

    @st.composite
    def cases(draw: st.DrawFn) -> StoreCase:
        case = draw(plain)
        axis = draw(st.sampled_from(tuple(AXES)))
        return AXES[axis](case, draw(numbers(0, far[axis])))

    return cases()


def borders(layout: str, far: Mapping[str, int]) -> list[StoreCase]:
    """Both ends of every bucket of tokens and of pages, and every kind of view, one per case."""
    base = StoreCase(ids=tuple(range(1000, 1005)), layout=layout, data="bell", seed=11, pages=2, perm=5)
    found = []
    for each in DIMENSIONS:
        if each.name in AXES:
            for bits in range(far[each.name].bit_length() + 1):
                first, last = each.borders(bits)
                ends = dict.fromkeys((first, min(last, far[each.name])))
                found += [AXES[each.name](base, value) for value in ends if value <= far[each.name]]
    found += [replace(base, offsets=(name,)) for name in OFFSETS]
    found += [replace(base, strides=(name,), offsets=offsets) for name in STRIDES for offsets in ((), (name,))]
    found += [replace(base, ids=(7,), pages=1, singletons=True), replace(base, gap=48)]
    found += [replace(base, skip=skip) for skip in (1, 2)]
    found += [replace(base, pooled=one, weight=other) for one in DTYPES for other in DTYPES]
    found += [replace(base, data=data) for data in DATA]
    found += [replace(base, weights=weights) for weights in WEIGHTS]
    found += [replace(base, positions=positions) for positions in POSITIONS]
    found += [replace(base, place=place, pages=3) for place in PLACES]
    found += [
        replace(base, eps_exponent=exponent, data=data) for exponent in (1, 4, 8, 20) for data in ("bell", "tiny")
    ]
    return list(dict.fromkeys(replace(case, seed=case.seed + place) for place, case in enumerate(found)))


def fit(case: StoreCase, contract: Contract) -> StoreCase:
    """The case within what a contract accepts."""
    if not contract.restrictions:
        return case
    return replace(
        case,
        gap=case.gap if contract.page_gap else 0,
        strides=tuple(name for name in case.strides if name not in contract.contiguous),
        offsets=case.offsets if contract.storage_offset else (),
        singletons=case.singletons and contract.singleton_strides,
        ids=case.ids[: contract.max_rows],
    )


def promise(impl: Implementation, profile: Profile, device: torch.device) -> tuple[Promise, str]:
    """The buckets that the checks go to, and why not to the others."""
    far, why = reach(impl, profile, device)
    found = {each.name: each.up_to(far[each.name]) if each.name in far else each.buckets for each in DIMENSIONS}
    if "pooled" in impl.contract.contiguous:
        found["pooled view"] = ("packed", "offset")
    return found, why


DOMAIN = Domain(DIMENSIONS, promise, fit)

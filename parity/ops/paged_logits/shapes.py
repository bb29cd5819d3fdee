"""Which cases a check draws: small ones that shrink well, and real shapes where the device can compute them."""

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.dimensions import mostly
from parity.domain.notation import causal_lengths
from parity.domain.profiles import Profile
from parity.ops.paged_logits import domain
from parity.ops.paged_logits.case import HEADS, Case
from parity.ops.paged_logits.strategies import paged_cases
from parity.ops.shared.case import POISONS, TAILS
from parity.ops.shared.domain import LONGEST, stretched
from parity.ops.shared.strategies import SEEDS
from parity.pages.layout import PAGE
from parity.pages.placement import MAX_ID
from parity.run.implementation import Implementation

TALL = (8, 20)
"""Rows of a short prefill."""

POOL_KEYS = 1 << 20
"""Distinct keys in a drawn case of real shape: at most 256 MiB of bf16 pages."""

MOST_KEYS = 1 << 22
"""Distinct keys of the largest listed case: 1 GiB of bf16 pages."""

FAR_EVERY = 8
"""One case in so many goes far in one dimension."""

REAL_EVERY = 16
"""One case in so many has a real shape, where the device can compute them: it costs as much as dozens of small ones."""

RESULT_CELLS = 1 << 27
"""Cells of a real-shaped result: at most 512 MiB."""


def heads_of(impl: Implementation) -> tuple[int, ...]:
    """Head counts to draw, the usual 64 twice as often: what the contract lists, else all."""
    allowed = tuple(h for h in HEADS if not impl.contract.heads or h in impl.contract.heads)
    return (*allowed, 64) if 64 in allowed else allowed


def small(impl: Implementation, profile: Profile, data: Sequence[str], **options: Any) -> st.SearchStrategy[Case]:
    """Few rows and pages with every structural feature; fewer still where a call is interpreted.

    Every fifth case is a short prefill of one request, unless the options limit the rows: kernels take another path
    there. Shrinks toward the fewest rows.
    """
    limits = {"max_rows": 4, "max_pages": 3} if impl.interpreted else {"max_rows": 6, "max_pages": 4}
    common = {"layout": impl.layout, "heads": heads_of(impl), "data": data}
    few = paged_cases(**{**common, **limits, **options})
    if "max_rows" in options:
        return few
    tall = {"max_requests": 1, "max_next_n": TALL[1], "max_rows": TALL[1], "max_pages": 2, "wide": False}
    return mostly(few, paged_cases(**{**common, **options, **tall, "min_rows": TALL[0]}), 5)


def drawn(
    impl: Implementation, profile: Profile, device: torch.device, data: Sequence[str], **options: Any
) -> st.SearchStrategy[Case]:
    """`small` cases, in one of FAR_EVERY places gone far in one dimension, and with one of real shape in REAL_EVERY
    places on CUDA. Shrinks toward small ones."""
    plain = small(impl, profile, data, **options)
    far = stretched(plain, domain.AXES, domain.reach(impl, profile, device), options.get("min_rows", 0))
    both = mostly(plain, far, FAR_EVERY)
    if device.type != "cuda" or not profile.large:
        return both
    return mostly(both, real(impl, data), REAL_EVERY)


def borders(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """One case per border of every bucket that the profile goes to; see `domain.borders`."""
    heads = sorted(set(heads_of(impl)))
    return st.sampled_from(domain.borders(impl.layout, heads, "exact", domain.reach(impl, profile, device)))


def real(impl: Implementation, data: Sequence[str]) -> st.SearchStrategy[Case]:
    """Batches as a server sees them: decode, speculation, expanded rows, and prefill up to 4,096 rows, 64 heads."""
    heads = 64 if 64 in heads_of(impl) else heads_of(impl)[-1]

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        fields: dict[str, Any] = {}
        kind = draw(st.sampled_from(("decode", "speculation", "prefill", "expanded")))
        length = st.one_of(
            st.integers(0, 18).map(lambda power: 1 << power), st.integers(1, LONGEST), st.sampled_from((PAGE, PAGE + 1))
        )
        if kind == "prefill" or kind == "expanded":
            rows = draw(st.sampled_from((64, 500, 4096)))
            start = draw(st.integers(0, 4 * min(LONGEST, RESULT_CELLS // rows) - rows))
            flat = causal_lengths(start, rows)
            lengths: tuple[tuple[int, ...], ...] = (flat,)
            if kind == "expanded":
                lengths = tuple((n,) for n in flat)
                fields |= {"request_ids": (0,) * rows, "row_ids": tuple(range(rows))}
        else:
            requests = draw(st.sampled_from((1, 2, 7, 64)))
            most = POOL_KEYS // requests
            ends = [min(most, draw(length)) for _ in range(min(requests, 8))]
            next_n = 1 if kind == "decode" else draw(st.sampled_from((2, 4)))
            lengths = tuple(causal_lengths(max(0, 4 * ends[b % len(ends)] - next_n), next_n) for b in range(requests))
        return Case(
            lengths=lengths,
            layout=impl.layout,
            heads=heads,
            data=draw(st.sampled_from(tuple(data))),
            seed=draw(st.integers(0, SEEDS)),
            perm=draw(st.integers(1, SEEDS)),
            tail=draw(st.sampled_from(TAILS)),
            poison=draw(st.sampled_from(POISONS)),
            **fields,
        )

    return cases()


def long_rows(impl: Implementation, device: torch.device, data: str) -> st.SearchStrategy[Case]:
    """One long row on a CPU (4,096 keys at 64 heads); on CUDA the ends of the range, 16 of the longest at once, and a
    4,096-row prefill."""
    heads = 64 if 64 in heads_of(impl) else heads_of(impl)[-1]
    shapes: list[tuple[tuple[int, ...], ...]] = [((4096,),)]
    if device.type == "cuda":
        shapes += [
            ((1,),),
            ((LONGEST,),),
            ((LONGEST,),) * (MOST_KEYS // LONGEST),
            (causal_lengths(4 * 16384 - 4096, 4096),),
        ]
    return st.sampled_from(
        [Case(lengths=x, layout=impl.layout, heads=heads, data=data, seed=7, perm=11, tail="canary") for x in shapes]
    )


def shared_rows(impl: Implementation, rows: int, length: int, heads: int, **fields: Any) -> Case:
    """Many rows of few distinct pages, so that operands stay small whatever the number of rows: one request a row."""
    pages = -(-length // PAGE)
    return Case(
        lengths=((length,),) * rows,
        layout=impl.layout,
        heads=heads,
        prefix=max(1, pages),
        row_ids=tuple(row % (MAX_ID - 1) for row in range(rows)),
        **fields,
    )

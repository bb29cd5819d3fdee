"""Hypothesis strategies of cases: structure and placement are drawn and shrunk, values follow from a drawn seed."""

from collections.abc import Sequence

from hypothesis import strategies as st

from parity.domain.notation import RATIO, causal_lengths
from parity.ops.paged_logits.case import (
    DATA,
    HEADS,
    MAX_LENGTH,
    POISONS,
    STAGES,
    STRIDES,
    TAILS,
    Case,
)
from parity.pages.layout import PAGE, find

# Where kernels break: nothing, one key, one short of a page, a page, one beyond, and the ragged middle.
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 192, 255, 256, 300)
SEEDS = 1 << 16
BIG_BYTES = (1 << 32) + (1 << 29)  # a pool of this size has pages past 2^32 bytes, 2^31 bf16 elements


def paged_cases(
    *,
    layout: str = "bf16",
    stage: str = "logits",
    heads: Sequence[int] = HEADS,
    data: Sequence[str] | None = None,
    max_requests: int = 3,
    max_next_n: int = 3,
    max_rows: int = 6,
    min_rows: int = 1,
    max_pages: int = 4,
    min_length: int = 0,
    sharing: bool = True,
    shuffled: bool = True,
    strides: Sequence[str] | None = None,
    tails: Sequence[str] = TAILS,
    poisons: Sequence[str] = POISONS,
    clean: Sequence[bool] = (True, False),
    wide: bool = True,
    big: bool = False,
) -> st.SearchStrategy[Case]:
    """Cases of logits functions, small enough for an interpreted kernel by default.

    layout, heads, data: what is drawn from; every data class of the stage by default. max_requests, max_next_n, and
    min_rows <= requests * next_n <= max_rows bound the batch, max_pages the pages of a request, min_length every
    context length. sharing: prefixes, pages used twice, copies, expanded rows. shuffled: physical order. strides: which
    operands may be views with gaps; all but context_lens by default. wide: tables and results wider than needed, large
    pools, gaps between pages. big: every pool passes 2^32 bytes (mapped lazily on the CPU).

    Shrinks to the fewest requests, rows, pages and keys, then to pages in order, no sharing, the narrowest table, no
    gaps, tail -1 and NaN poison. ValueError for options out of range.
    """
    data = _options(stage, layout, heads, data, tails, poisons)
    if strides is None:
        strides = [name for name in STRIDES[stage] if name != "lens"]
    for name in strides:
        _one_of("strides", name, STRIDES[stage])
    _at_least("max_requests", max_requests, 1)
    _at_least("max_next_n", max_next_n, 1)
    _at_least("max_pages", max_pages, 1)
    _at_least("min_rows", min_rows, 0)
    _at_least("min_length", min_length, 0)
    if max_rows < max(1, min_rows) or min_rows > max_requests * max_next_n:
        raise ValueError(f"max_rows must be at least {max(1, min_rows)} and reachable, got {max_rows}")
    if min_length > max_pages * PAGE:
        raise ValueError(f"min_length must fit in max_pages * {PAGE} keys, got {min_length}")
    if not clean:
        raise ValueError("clean must name at least one of True and False, got none")

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        requests, next_n = draw(_shapes(min_rows, max_rows, max_requests, max_next_n))
        lengths = draw(_lengths(requests, next_n, min_length, max_pages * PAGE))
        longest = max((max(row) for row in lengths), default=0)
        pages = -(-longest // PAGE)
        fields = _placement(draw, requests, pages, sharing, shuffled, wide)
        if sharing and requests > 1 and draw(_rarely()):  # rows of one request, expanded by the engine
            fields["request_ids"] = (0,) * requests
            fields["row_ids"] = tuple(range(requests * next_n))
        if wide:
            fields["width"] = _wider(draw, max(1, pages), 1 if pages < 3 else 7)
            fields["max_len"] = _wider(draw, max(1, longest), 70)
        if big:
            fields |= _big(draw, layout, max(1, pages) * max(1, requests))
        return Case(
            lengths=lengths,
            stage=stage,
            layout=layout,
            heads=draw(st.sampled_from(tuple(heads))) if stage == "logits" else HEADS[-1],
            data=draw(st.sampled_from(tuple(data))),
            seed=draw(st.integers(0, SEEDS)),
            tail=draw(st.sampled_from(tuple(tails))),
            poison=draw(st.sampled_from(tuple(poisons))),
            strides=draw(_subsets(strides)),
            clean=draw(st.sampled_from(tuple(clean))),
            **fields,
        )

    return cases()


def topk_cases(
    *,
    data: Sequence[str] | None = None,
    ks: Sequence[int] = (1, 64, 512, 1024, 2048),
    max_requests: int = 3,
    max_next_n: int = 3,
    max_length: int = 4500,
    sharing: bool = True,
    strides: Sequence[str] | None = None,
    tails: Sequence[str] = TAILS,
    poisons: Sequence[str] = POISONS,
    clean: Sequence[bool] = (True, False),
) -> st.SearchStrategy[Case]:
    """Cases of top-k functions: k from `ks`, lengths around k, short ones and up to `max_length` mixed in one batch.

    With clean=no the scores past a row's length are NaN, 3e38 or leftovers above every score. Shrinks like paged_cases,
    then to the smallest k.
    """
    data = _options("topk", "bf16", HEADS, data, tails, poisons)
    strides = [name for name in STRIDES["topk"] if name != "lens"] if strides is None else strides
    for name in strides:
        _one_of("strides", name, STRIDES["topk"])
    if not ks or min(ks) < 1:
        raise ValueError(f"ks must name integers of at least 1, got {tuple(ks)}")
    _at_least("max_requests", max_requests, 1)
    _at_least("max_next_n", max_next_n, 1)
    _at_least("max_length", max_length, 1)

    @st.composite
    def cases(draw: st.DrawFn) -> Case:
        k = draw(st.sampled_from(tuple(sorted(ks))))
        requests, next_n = draw(_shapes(1, max_requests * max_next_n, max_requests, max_next_n))
        around = sorted({min(max_length, max(0, n)) for n in (0, 1, k - 1, k, k + 1, 2 * k, max_length)})
        length = st.one_of(st.sampled_from(around), st.integers(0, max_length))
        lengths = tuple(tuple(draw(length) for _ in range(next_n)) for _ in range(requests))
        longest = max(max(row) for row in lengths)
        pages = -(-longest // PAGE)
        fields = _placement(draw, requests, pages, sharing, True, False)
        if pages and draw(_rarely()):  # page numbers of a real pool: slots past 2^15, and past 2^24 (no pool is built)
            fields["spare"] = draw(st.sampled_from((1200, 1 << 19)))
        return Case(
            lengths=lengths,
            stage="topk",
            data=draw(st.sampled_from(tuple(data))),
            seed=draw(st.integers(0, SEEDS)),
            k=k,
            width=_wider(draw, max(1, pages), 3),
            max_len=_wider(draw, max(1, longest), 200),
            tail=draw(st.sampled_from(tuple(tails))),
            poison=draw(st.sampled_from(tuple(poisons))),
            strides=draw(_subsets(strides)),
            clean=draw(st.sampled_from(tuple(clean))),
            **fields,
        )

    return cases()


def _options(stage, layout, heads, data, tails, poisons) -> tuple[str, ...]:
    _one_of("stage", stage, STAGES)
    find(layout)
    chosen = DATA[stage] if data is None else tuple(data)
    for name, given, known in (
        ("heads", heads, HEADS),
        ("data", chosen, DATA[stage]),
        ("tails", tails, TAILS),
        ("poisons", poisons, POISONS),
    ):
        if not given:
            raise ValueError(f"{name} must name at least one of {', '.join(map(str, known))}, got none")
        for value in given:
            _one_of(name, value, known)
    return chosen


def _one_of(name: str, value: object, known: Sequence) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least or value > MAX_LENGTH:
        raise ValueError(f"{name} must be an integer from {least} to {MAX_LENGTH}, got {value!r}")


def _rarely() -> st.SearchStrategy[bool]:
    return st.sampled_from((False, False, False, True))


def _shapes(min_rows: int, max_rows: int, max_requests: int, max_next_n: int) -> st.SearchStrategy[tuple[int, int]]:
    """(requests, next_n), fewest rows first."""
    shapes = [
        (b, n)
        for b in range(0 if min_rows == 0 else 1, max_requests + 1)
        for n in range(1, (max_next_n if b else 1) + 1)
        if min_rows <= b * n <= max_rows
    ]
    if not shapes:
        raise ValueError(f"min_rows and max_rows must allow a batch, got {min_rows} to {max_rows} rows")
    return st.sampled_from(sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)))


@st.composite
def _lengths(draw: st.DrawFn, requests: int, next_n: int, least: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Context lengths: mostly the causal lengths of consecutive tokens, sometimes independent ones."""
    edges = [n for n in EDGES if least <= n <= most] or [least]
    length = st.one_of(st.sampled_from(edges), st.integers(least, most))
    if next_n == 1:
        return tuple((draw(length),) for _ in range(requests))
    if draw(_rarely()):
        return tuple(tuple(draw(length) for _ in range(next_n)) for _ in range(requests))
    rows = []
    for _ in range(requests):
        start = RATIO * draw(length) + draw(st.integers(0, RATIO - 1)) - 1
        rows.append(tuple(min(most, max(least, n)) for n in causal_lengths(max(0, start), next_n)))
    return tuple(rows)


def _placement(draw: st.DrawFn, requests: int, pages: int, sharing: bool, shuffled: bool, wide: bool) -> dict:
    fields: dict = {"perm": draw(st.integers(0, SEEDS)) if shuffled else 0}
    fields["spare"] = draw(st.sampled_from((1, 2, 5, 40))) if wide else 1
    if wide:
        fields["gap"] = draw(st.sampled_from((0, 0, 0, 16, 128, 4096)))
    if sharing and pages:
        if requests > 1 and draw(_rarely()):
            fields["prefix"] = draw(st.integers(1, pages))
        if pages > 1 and draw(_rarely()):  # a page used again by the same request
            fields["page_ids"] = tuple(draw(st.integers(0, page)) for page in range(pages))
        fields["alias"] = draw(st.sampled_from(("shared", "shared", "copied")))
    return fields


def _wider(draw: st.DrawFn, needed: int, most: int) -> int | None:
    extra = draw(st.one_of(st.just(0), st.integers(0, most)))
    return needed + extra if extra else None


def _big(draw: st.DrawFn, layout: str, used: int) -> dict:
    """A pool that passes 2^32 bytes, by gaps between few pages or by very many pages, whose byte offsets have more than
    24 significant bits where there is a small gap."""
    page = find(layout).page_bytes
    if draw(st.booleans()):
        return {"spare": BIG_BYTES // page, "gap": draw(st.sampled_from((0, 16, 48)))}
    spare = 5
    return {"spare": spare, "gap": -(-BIG_BYTES // (spare + 1) // 4096) * 4096}


def _subsets(names: Sequence[str]) -> st.SearchStrategy[tuple[str, ...]]:
    ordered = sorted(names)
    choices = [tuple(n for i, n in enumerate(ordered) if mask >> i & 1) for mask in range(1 << len(ordered))]
    return st.sampled_from(sorted(choices, key=len))

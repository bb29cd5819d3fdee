"""How structure and placement of cases over a block table are drawn; the operations' strategies put them together."""

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from parity.domain.notation import RATIO, causal_lengths
from parity.ops.shared.case import MAX_LENGTH

# Where kernels break: nothing, one key, one short of a page, a page, one beyond, and the ragged middle.
EDGES = (0, 1, 63, 64, 65, 127, 128, 129, 192, 255, 256, 300)
SEEDS = 1 << 16


def check_options(*options: tuple[str, Sequence, Sequence]) -> None:
    """ValueError for an option (name, given, known) that is empty or names what is not known."""
    for name, given, known in options:
        if not given:
            raise ValueError(f"{name} must name at least one of {', '.join(map(str, known))}, got none")
        for value in given:
            one_of(name, value, known)


def free_strides(strides: Iterable[str] | None, known: Sequence[str]) -> list[str]:
    """The operands that may be views with gaps: those named, by default all but context_lens. ValueError for others."""
    chosen = [name for name in known if name != "lens"] if strides is None else list(strides)
    for name in chosen:
        one_of("strides", name, known)
    return chosen


def one_of(name: str, value: object, known: Sequence) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(map(str, known))}, got {value!r}")


def at_least(name: str, value: int, least: int) -> None:
    if value < least or value > MAX_LENGTH:
        raise ValueError(f"{name} must be an integer from {least} to {MAX_LENGTH}, got {value!r}")


def rarely() -> st.SearchStrategy[bool]:
    return st.sampled_from((False, False, False, True))


def shapes(min_rows: int, max_rows: int, max_requests: int, max_next_n: int) -> st.SearchStrategy[tuple[int, int]]:
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
def length_rows(draw: st.DrawFn, requests: int, next_n: int, least: int, most: int) -> tuple[tuple[int, ...], ...]:
    """Context lengths: mostly the causal lengths of consecutive tokens, sometimes independent ones."""
    edges = [n for n in EDGES if least <= n <= most] or [least]
    length = st.one_of(st.sampled_from(edges), st.integers(least, most))
    if next_n == 1:
        return tuple((draw(length),) for _ in range(requests))
    if draw(rarely()):
        return tuple(tuple(draw(length) for _ in range(next_n)) for _ in range(requests))
    rows = []
    for _ in range(requests):
        start = RATIO * draw(length) + draw(st.integers(0, RATIO - 1)) - 1
        rows.append(tuple(min(most, max(least, n)) for n in causal_lengths(max(0, start), next_n)))
    return tuple(rows)


def placement(draw: st.DrawFn, requests: int, pages: int, sharing: bool, shuffled: bool, wide: bool) -> dict:
    fields: dict = {"perm": draw(st.integers(0, SEEDS)) if shuffled else 0}
    fields["spare"] = draw(st.sampled_from((1, 2, 5, 40))) if wide else 1
    if wide:
        fields["gap"] = draw(st.sampled_from((0, 0, 0, 16, 128, 4096)))
    if sharing and pages:
        if requests > 1 and draw(rarely()):
            fields["prefix"] = draw(st.integers(1, pages))
        if pages > 1 and draw(rarely()):  # a page used again by the same request
            fields["page_ids"] = tuple(draw(st.integers(0, page)) for page in range(pages))
        fields["alias"] = draw(st.sampled_from(("shared", "shared", "copied")))
    return fields


def wider(draw: st.DrawFn, needed: int, most: int) -> int | None:
    extra = draw(st.one_of(st.just(0), st.integers(0, most)))
    return needed + extra if extra else None


def subsets(names: Sequence[str]) -> st.SearchStrategy[tuple[str, ...]]:
    ordered = sorted(names)
    choices = [tuple(n for i, n in enumerate(ordered) if mask >> i & 1) for mask in range(1 << len(ordered))]
    return st.sampled_from(sorted(choices, key=len))

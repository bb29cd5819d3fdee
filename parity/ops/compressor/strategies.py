"""Hypothesis strategies of compressor cases."""

from hypothesis import strategies as st

from parity.ops.compressor.case import DATA, POISONS, UNDO, CompressorCase, Item

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 21)


@st.composite
def compressor_cases(draw: st.DrawFn, *, data: tuple[str, ...] = DATA, max_calls: int = 8) -> CompressorCase:
    """Scripts of up to `max_calls` calls: one shot, token by token, unaligned chunks, requests mixed, dropped and
    followed by others in their state rows, drafts rejected. Shrinks to one call of one token."""
    calls: list[tuple[Item, ...]] = []
    alive: dict[int, int] = {0: 0}
    newest: dict[int, int] = {}
    born = 1
    for _ in range(draw(st.integers(1, max_calls))):
        if calls and draw(st.sampled_from((False, False, True))):
            alive[born] = 0
            born += 1
        if len(alive) > 1 and draw(st.sampled_from((False, False, True))):
            alive.pop(draw(st.sampled_from(sorted(alive))))
        chosen = [r for r in sorted(alive) if len(alive) == 1 or draw(st.sampled_from((True, True, False)))]
        chosen = chosen or [min(alive)]
        if len(chosen) > 1 and draw(st.booleans()):
            chosen.reverse()
        call = []
        for request in chosen:
            undone = 0
            most = min(alive[request], UNDO - newest.get(request, 0) + alive[request])
            if most > 0 and draw(st.sampled_from((False, False, False, True))):
                undone = draw(st.integers(1, most))
            count = draw(st.sampled_from(SIZES))
            call.append((request, count, undone))
            alive[request] += count - undone
            newest[request] = max(newest.get(request, 0), alive[request])
        calls.append(tuple(call))
    return CompressorCase(
        calls=tuple(calls),
        data=draw(st.sampled_from(data)),
        seed=draw(st.integers(0, 1 << 16)),
        poison=draw(st.sampled_from(POISONS)),
        perm=draw(st.integers(0, 3)),
    )

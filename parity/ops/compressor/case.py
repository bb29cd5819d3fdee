"""Cases of the chunked compressor: a script of calls, in which prompts are split, mixed, rolled back and dropped.

A compressor function takes the projections of the next tokens of some requests and pools every group of four tokens
that they close; what it needs of earlier calls it keeps in `state`. See docs/faults.md for its calling convention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parity.ops.paged_logits.case import MAX_SEED, VERSION
from parity.pages import counter
from parity.run import memory

RATIO, DIM, WIDTH = 4, 128, 256
RING = 16  # token rows of the state: what a window reads back, and up to UNDO rejected tokens
UNDO = 8
DATA = ("exact", "random")
POISONS = ("nan", "stale")
STREAM_KV, STREAM_SCORE, STREAM_WINDOW, STREAM_APE, STREAM_STATE = range(41, 46)
AWAY = -1024.0  # exp of it is zero, in float64 too

Item = tuple[int, int, int]  # request, tokens, tokens undone before


@dataclass(frozen=True, slots=True)
class CompressorCase:
    """`calls[i]` lists (request, count, undone): a request drops `undone` tokens, then takes `count`.

    data: `exact`, where a window's weights are all equal or one is 1, and values are integers; or `random`. poison:
    what stands in the state before the first call, NaN or plausible leftovers of other sequences. A request holds a
    state row from its first to its last call; later requests take over free rows, uncleared. perm shuffles the rows.
    ValueError if a call names a request twice, takes nothing, or goes back by more than UNDO from the newest token that
    the request has ever had, or past its start.
    """

    calls: tuple[tuple[Item, ...], ...]
    data: str = "exact"
    seed: int = 0
    poison: str = "nan"
    perm: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (("data", DATA), ("poison", POISONS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name in ("seed", "perm"):
            if not 0 <= getattr(self, name) <= MAX_SEED:
                raise ValueError(f"{name} must be from 0 to {MAX_SEED}, got {getattr(self, name)}")
        length: dict[int, int] = {}
        newest: dict[int, int] = {}
        for call in self.calls:
            if len({request for request, _, _ in call}) != len(call):
                raise ValueError("calls must name a request at most once each")
            for request, count, undone in call:
                held = length.get(request, 0)
                most = min(held, UNDO - (newest.get(request, 0) - held))
                if count < 1 or not 0 <= undone <= most:
                    raise ValueError(
                        f"calls: request {request} has {held} tokens, so it can drop at most {most} and must take at "
                        f"least 1, got {undone} and {count}"
                    )
                length[request] = held - undone + count
                newest[request] = max(newest.get(request, 0), length[request])

    @property
    def stage(self) -> str:
        """Always "compressor"."""
        return "compressor"

    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]:
        """The size of the case as the search for small cases counts it: tokens of each call."""
        return tuple((sum(count for _, count, _ in call),) for call in self.calls)

    def __str__(self) -> str:
        calls = "/".join("+".join(f"{r}:{n}" + (f"-{u}" if u else "") for r, n, u in call) for call in self.calls)
        parts = [VERSION, "stage=compressor", f"calls={calls}"]
        usual = {"data": "exact", "seed": 0, "poison": "nan", "perm": 0}
        return " ".join(parts + [f"{k}={getattr(self, k)}" for k, v in usual.items() if getattr(self, k) != v])


def is_compressor_case(text: str) -> bool:
    """Whether a case string is one of a compressor case."""
    return "stage=compressor" in text.split()


def parse_compressor_case(text: str) -> CompressorCase:
    """The case that prints as `text`; ValueError in one sentence otherwise."""
    words = text.split()
    if not words or words[0] != VERSION:
        raise ValueError(f"a case string must begin with {VERSION}, got {words[0] if words else 'an empty string'!r}")
    found: dict[str, Any] = {}
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if not equals or name not in ("stage", "calls", "data", "seed", "poison", "perm") or name in found:
            raise ValueError(f"a compressor case has stage, calls, data, seed, poison and perm once each, got {word!r}")
        found[name] = value
    if found.pop("stage", None) != "compressor" or "calls" not in found:
        raise ValueError("a compressor case must say stage=compressor and calls=...")
    try:
        for name in ("seed", "perm"):
            if name in found:
                found[name] = _integer(found[name])
        calls = tuple(tuple(_item(x) for x in call.split("+")) for call in found.pop("calls").split("/"))
    except ValueError as error:
        raise ValueError(f"calls must look like 0:5/0:3-1+1:7, seed and perm be integers: {error}") from error
    return CompressorCase(calls=calls, **found)


def _item(text: str) -> Item:
    request, _, rest = text.partition(":")
    count, _, undone = rest.partition("-")
    return _integer(request), _integer(count), _integer(undone or "0")


def _integer(text: str) -> int:
    if not (text.isascii() and text.isdigit()):  # int() also reads other scripts' digits, signs and underscores
        raise ValueError(f"expected a non-negative integer, got {text!r}")
    return int(text)


@dataclass(frozen=True, eq=False)
class Step:
    """One call: its arguments beside `state`, and the names of its tokens (request, position, version), int64 [N]."""

    kv: Tensor
    score: Tensor
    positions: Tensor
    slots: Tensor
    names: tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class CompressorOperands:
    """All calls of a case, the position encoding float32 [4, 256] and the state float32 [rows, RING, 512]."""

    case: CompressorCase
    steps: tuple[Step, ...]
    ape: Tensor
    state: Tensor

    def kwargs(self, step: int) -> dict[str, Any]:
        """Keyword arguments of one call."""
        now = self.steps[step]
        named = {name: getattr(now, name) for name in ("kv", "score", "positions", "slots")}
        return named | {"ape": self.ape, "state": self.state}


def operand_bytes(case: CompressorCase, device: str | torch.device = "cpu") -> int:
    """About how many bytes the operands and the results of all calls take; what judging takes comes on top."""
    calls = [sum(count for _, count, _ in call) for call in case.calls]
    state = 16 * _state_rows(case)[1] * RING * 2 * WIDTH
    # Of all tokens their names in lists, projections and pooled keys; of the longest call what it is drawn from.
    return sum(calls) * (1000 + 8 * WIDTH + 4 * DIM) + 10 * WIDTH * max(calls, default=0) + state


def build_compressor(case: CompressorCase, device: str | torch.device = "cpu") -> CompressorOperands:
    """The operands of a case on a device; new storages at every call."""
    device = torch.device(device)
    memory.require(operand_bytes(case, device), device)
    rows, count = _state_rows(case)
    ape = _ape(case, device)
    history: dict[int, list[int]] = {}
    undone: dict[int, int] = {}
    steps = []
    for call in case.calls:
        parts: list[tuple[int, int, int]] = []
        for request, tokens, dropped in call:
            versions = history.setdefault(request, [])
            undone[request] = undone.get(request, 0) + (dropped > 0)
            del versions[len(versions) - dropped :]
            for _ in range(tokens):
                parts.append((request, len(versions), undone[request]))
                versions.append(undone[request])
        columns = torch.tensor(parts, dtype=torch.int64, device=device).unbind(1)
        names = (columns[0], columns[1], columns[2])
        kv, score = draw_tokens(case, names, ape)
        slots = torch.tensor([rows[request] for request, _, _ in parts], dtype=torch.int32, device=device)
        steps.append(Step(kv, score, names[1].to(torch.int32), slots, names))
    return CompressorOperands(case, tuple(steps), ape, _state(case, count, device))


def _state_rows(case: CompressorCase) -> tuple[dict[int, int], int]:
    """State row of each request, and the number of rows: a free row is taken over, the lowest first."""
    last = {request: at for at, call in enumerate(case.calls) for request, _, _ in call}
    rows: dict[int, int] = {}
    taken: set[int] = set()
    most = 1
    for at, call in enumerate(case.calls):
        for request, _, _ in call:
            if request not in rows:
                rows[request] = next(row for row in range(len(last) + 1) if row not in taken)
                taken.add(rows[request])
        most = max(most, max(taken) + 1)
        taken -= {rows[request] for request, _, _ in call if last[request] == at}
    count = most + 1
    return {request: (row + case.perm) % count for request, row in rows.items()}, count


def _ape(case: CompressorCase, device: torch.device) -> Tensor:
    """Multiples of 1/64 up to 2 in magnitude, so that sums with scores of the exact class do not round."""
    keys = counter.row_keys(case.seed, STREAM_APE, (torch.arange(RATIO, dtype=torch.int64, device=device),))
    words = counter.row_words(keys, counter.counting(WIDTH, device))
    return (words >> 25).to(torch.float32) * (1.0 / 32)


def draw_tokens(case: CompressorCase, names: tuple[Tensor, ...], ape: Tensor) -> tuple[Tensor, Tensor]:
    """Projections (kv, score), float32 [N, 256], of named tokens, the score without its position encoding."""
    request, position, _ = names
    device = request.device
    words = counter.row_words(counter.row_keys(case.seed, STREAM_KV, names), counter.counting(WIDTH, device))
    if case.data == "random":
        kv = (words >> 7).to(torch.float32) * 2.0**-22
        more = counter.row_words(counter.row_keys(case.seed, STREAM_SCORE, names), counter.counting(WIDTH, device))
        return kv, (more >> 7).to(torch.float32) * 2.0**-22
    kv = (words >> 20).to(torch.float32) * 8.0
    # The window that each half of the channels belongs to: the token's own, and the next one's overlap.
    wins = []
    for window, place in ((position // RATIO + 1, position % RATIO), (position // RATIO, position % RATIO + RATIO)):
        keys = counter.row_keys(case.seed, STREAM_WINDOW, (request, window))
        drawn = counter.row_words(keys, counter.counting(DIM, device))
        winner = (drawn >> 8) & 7
        winner = torch.where((window == 0)[:, None], 4 + (winner & 3), winner)
        uniform = ((drawn >> 16) & 3) == 0
        wins.append(torch.where(uniform | (winner == place[:, None]), 0.0, AWAY))
    return kv, torch.cat(wins, 1) - ape[position % RATIO]


def _state(case: CompressorCase, rows: int, device: torch.device) -> Tensor:
    state = torch.full((rows, RING, 2 * WIDTH), torch.nan, device=device)
    if case.poison == "stale":
        keys = counter.row_keys(case.seed, STREAM_STATE, (torch.arange(rows * RING, dtype=torch.int64, device=device),))
        words = counter.row_words(keys, counter.counting(2 * WIDTH, device))
        state.copy_(((words >> 20).to(torch.float32) * 0.125).view(rows, RING, 2 * WIDTH))
    return state


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

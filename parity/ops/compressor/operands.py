"""From a compressor case to the tensors of its calls."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.ops.compressor.case import RATIO, RING, WIDTH, CompressorCase
from parity.pages import counter
from parity.pages.layout import DIM
from parity.run import memory

STREAM_KV, STREAM_SCORE, STREAM_WINDOW, STREAM_APE, STREAM_STATE = range(41, 46)
AWAY = -1024.0  # exp of it is zero, in float64 too
STEP_TENSORS = ("kv", "score", "positions", "slots")


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
    """All calls of a case, the position encoding float32 [4, 256], the state float32 [rows, RING, 512] that the calls
    share, and a copy of it from before the first one."""

    case: CompressorCase
    steps: tuple[Step, ...]
    ape: Tensor
    state: Tensor
    fresh: Tensor

    @property
    def device(self) -> torch.device:
        """The device of every operand."""
        return self.state.device

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of everything that a call must not write."""
        return {name: tensor.clone() for name, tensor in self.guarded().items()}

    def changed(self, before: dict[str, Tensor]) -> tuple[str, ...]:
        """Names of the inputs that differ from the snapshot."""
        return tuple(name for name, now in self.guarded().items() if not torch.equal(now, before[name]))

    def guarded(self) -> dict[str, Tensor]:
        """The tensors that a call must not write, by name."""
        steps = enumerate(self.steps)
        return {"ape": self.ape} | {
            f"{name} of call {at}": getattr(step, name) for at, step in steps for name in STEP_TENSORS
        }

    def kwargs(self, step: int = 0) -> dict[str, Any]:
        """Keyword arguments of one call."""
        now = self.steps[step]
        named = {name: getattr(now, name) for name in STEP_TENSORS}
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
    state = _state(case, count, device)
    return CompressorOperands(case, tuple(steps), ape, state, state.clone())


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

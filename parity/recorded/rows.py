"""Bookkeeping of a replay: one row per tensor, which tensors are inputs, and the projections that were not recorded."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parity.recorded import rules
from parity.recorded.files import Recording, RecordingError
from parity.recorded.rules import Approximate, Judged
from reference import compressor, exact

BITS = "bits"
ROPE = "bits, given the table (its last place free)"
GEMM = "float64 within gamma(K) sum |x w|, rounded once"
POOL = "float64 within its gamma, rounded once"
CHAIN = "bits, of values that those intervals allow"
VALUE = "by value"
TABLE = "cos, sin of the float32 angle within one last place"
INPUT = "input"
UNKNOWN = "unknown tensor"
MISSING = "not replayed"
DAMAGED = "unusable file"
NOT_JUDGED = (INPUT, UNKNOWN, MISSING, DAMAGED)


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor: its counts and the rule it was judged by.

    `INPUT` is the rule of inputs, `UNKNOWN` of names that nothing replays, `MISSING` of what could not be replayed and
    `DAMAGED` of a file that is not the one that the index describes; `detail` says why. `values` counts what was
    judged; `without_input` what could not be, because the recording keeps no input for it. `tensor` is empty where a
    row speaks of more than one.
    """

    file: str
    tensor: str
    rule: str
    values: int
    differing: int = 0
    rejected: int = 0
    without_input: int = 0
    detail: str = ""


class Replay:
    """Rows of one file. `read` gives an input, `judge` compares a tensor; both mark it as seen."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.rows = [
            Row(recording.name, name, MISSING, 0, detail="index.json lists it, the file lacks it")
            for name in recording.lacking
        ]
        self._seen: set[str] = set()

    def step(self, work: Callable[..., None], *given: Any) -> None:
        """Run a part of the replay; if it lacks a tensor, or tensors do not fit, that is named and others go on."""
        try:
            work(*given)
            return
        except RecordingError as error:
            reason = str(error)
        except (ValueError, TypeError, RuntimeError, IndexError) as error:
            first = str(error).partition("\n")[0]
            reason = f"its tensors do not fit each other ({first})"
        row = Row(self.recording.name, "", MISSING, 0, detail=reason)
        if row not in self.rows:  # two steps may lack one tensor
            self.rows.append(row)

    def has(self, name: str) -> bool:
        """Whether the file holds a tensor."""
        return name in self.recording.tensors

    def get(self, name: str) -> Tensor:
        """A tensor that another step reads; RecordingError when the file lacks it."""
        if not self.has(name):
            raise RecordingError(f"lacks the tensor {name}, which other tensors are replayed from")
        return self.recording.tensors[name]

    def read(self, name: str) -> Tensor:
        """A tensor that is an input of the recording."""
        tensor = self.get(name)
        if name not in self._seen:
            self._add(name, Row(self.recording.name, name, INPUT, tensor.numel()))
        return tensor

    def index(self, name: str, limit: int) -> Tensor:
        """An input that numbers rows: int64, ascending, in [0, limit)."""
        tensor = self.read(name)
        ascending = tensor.dtype == torch.int64 and tensor.dim() == 1 and bool((tensor.diff() > 0).all())
        if not ascending or (tensor.numel() and not (tensor[0] >= 0 and tensor[-1] < limit)):
            raise RecordingError(f"tensor {name} must hold ascending int64 rows in [0, {limit})")
        return tensor

    def judge(
        self, name: str, rule: str, compare: Callable[..., Judged], *operands: Any, only: Tensor | None = None
    ) -> None:
        """Run compare(tensor, *operands) if the file holds the tensor; a shape that cannot be right raises.

        `only` (bool) picks along dimension 1 the part whose input was recorded; the rest is counted as without input.
        """
        if not self.has(name):
            return
        tensor = self.recording.tensors[name]
        try:
            found = compare(tensor if only is None else tensor[:, only], *operands)
        except (ValueError, RuntimeError, IndexError) as error:
            reason = str(error).partition("\n")[0]
            raise RecordingError(f"tensor {name} {reason}") from None
        without = tensor.numel() - found.values
        self._add(name, Row(self.recording.name, name, rule, *found[:3], without, found.detail))

    def add(self, name: str, rule: str, found: Judged) -> None:
        """Record a comparison made elsewhere."""
        self._add(name, Row(self.recording.name, name, rule, *found[:3], 0, found.detail))

    def finish(self) -> list[Row]:
        """The rows, with one for every tensor that nothing read or judged: unknown, or left out with a step."""
        broken = any(row.rule == MISSING for row in self.rows)
        for name in sorted(self.recording.tensors.keys() - self._seen):
            size = self.recording.tensors[name].numel()
            self.rows.append(Row(self.recording.name, name, MISSING if broken else UNKNOWN, 0, without_input=size))
        return self.rows

    def _add(self, name: str, row: Row) -> None:
        self._seen.add(name)
        self.rows.append(row)


def projected(x: Tensor, weight: Tensor, ape_rows: Tensor | None = None) -> Approximate:
    """A float32 projection that was not recorded, plus the position encoding where it is a score."""
    product = rules.matmul(x, weight)
    if ape_rows is None:
        return product
    total = product.value + exact.widen(ape_rows)
    return Approximate(total, product.error + rules.gamma(1) * (total.abs() + product.error))


def overlapped(kv: Approximate, score: Approximate) -> tuple[Approximate, Approximate]:
    """Windows [.., n, 8, 128] of the whole prompt's rows [.., S, 256]: an empty overlap, then complete groups."""
    cut = kv.value.shape[-2] // compressor.RATIO * compressor.RATIO

    def padded(x: Tensor, fill: float) -> Tensor:
        shape = (*x.shape[:-2], compressor.RATIO, x.shape[-1])
        return torch.cat((x.new_full(shape, fill), x[..., :cut, :]), dim=-2)

    values = compressor.windows(padded(kv.value, 0.0), padded(score.value, -torch.inf))
    errors = compressor.windows(padded(kv.error, 0.0), padded(score.error, 0.0))
    return Approximate(values[0], errors[0]), Approximate(values[1], errors[1])


def stored(x: Tensor) -> Approximate:
    """A recorded tensor as an exact operand."""
    return Approximate(exact.widen(x), torch.zeros(x.shape, dtype=torch.float64))

"""One call of one implementation: operands built, poison laid, the function called by keyword, its answer inspected.

`InProcess` runs it here and `parity.run.worker.Worker` in a child process; both give an `Outcome`, and neither judges.
"""

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from parity.run import interpreter, memory
from parity.run.device import to_device
from parity.run.implementation import Implementation
from parity.vocabulary import Grounds


@dataclass
class Outcome:
    """What a call did. `output` is None exactly when `error`, `defect` or `unsupported` says why.

    output       float32 [T, width] logits, or (slots, positions) int32 [T, k]; on the runner's device
    error        the call crashed or hung: one sentence
    defect       the call broke the calling convention: shape, dtype or device of the result, inputs written, a wild
                 address
    grounds      what an error or a defect amounts to, where that is neither a crash nor wrong values
    unsupported  the call cannot be made here, with the reason
    route        which of our own paths ran (built-ins only)
    peak_bytes   bytes of tensors beyond inputs, result included (only when measured); `peak_note` names the largest
    joint_bytes  the same with what Python and numpy allocated on the host
    launches     interpreted Triton launches seen; `excess` a grid that no CUDA device accepts
    variants     keys of what triton compiled during the call (native compilation only)
    differing    (run, output) of the first of the repeats that differs from the first run in any bit
    kept         tensors that the call returned or wrote, themselves and not copies
    """

    output: Any = None
    error: str | None = None
    defect: str | None = None
    grounds: Grounds | None = None
    unsupported: str | None = None
    route: str | None = None
    peak_bytes: int | None = None
    peak_note: str = ""
    joint_bytes: int | None = None
    launches: int = 0
    excess: str | None = None
    variants: tuple[str, ...] = ()
    differing: Any = None
    kept: Any = field(default=None, repr=False)
    seconds: float = 0.0
    operands: Any = field(default=None, repr=False)

    @property
    def complaint(self) -> str | None:
        """Why there is no output to judge."""
        return self.error or self.defect or self.unsupported


class Runner(Protocol):
    """What the suite needs of a runner."""

    impl: Implementation
    device: torch.device

    def run(self, case: Any, *, measure: bool = False, repeats: int = 1, dry: bool = False) -> Outcome:
        """Call the implementation on the case's operands, `repeats` times on the same operands."""

    def replay(self, wide: Any, narrow: Any) -> Outcome:
        """Capture a CUDA graph on one case, replay it on another of the same shapes."""

    def sequence(self, cases: Sequence[Any]) -> list[Outcome]:
        """Call it on each case in turn, in one process, results kept until the last call has been made."""

    def fresh(self, sequences: Sequence[Sequence[Any]]) -> list[list[Outcome]]:
        """Each sequence in a process of its own that has called nothing before."""

    def companion(self) -> "Runner | None":
        """The runner of the function that shows what this one hides (the dots of every head), or None."""

    def close(self) -> None:
        """Give back what the runner holds."""


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill whatever torch allocates uninitialised inside the block: NaN, or the largest integer."""
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    with warnings.catch_warnings():
        # "warn": the filling is wanted, not a refusal of operators that have no deterministic form.
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        torch.set_deterministic_debug_mode("warn")
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        try:
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
            torch.set_deterministic_debug_mode(mode)


class BrokenConventionError(Exception):
    """A call that broke the calling convention so that it cannot go on; the message says how."""

    grounds = Grounds.FORM


class ChangedResultError(BrokenConventionError):
    """A call that changed what an earlier one had returned."""

    grounds = Grounds.VALUES


Part = tuple[str, Any, torch.dtype, tuple[int, ...]]
"""Name, value, and the dtype and shape that it should have."""


def inspect_tensors(parts: Sequence[Part], device: torch.device) -> str | None:
    """The sentence that says which of the parts of a result is not the tensor that the convention asks for, or None."""
    for name, value, dtype, shape in parts:
        if not isinstance(value, Tensor):
            return f"{name}: expected a {dtype} tensor {list(shape)}, got {kind_of(value)}"
        if tuple(value.shape) != shape or value.dtype != dtype:
            return f"{name}: expected {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}"
        if value.device != device:
            return f"{name}: expected a tensor on {device}, got one on {value.device}"
    return None


def kind_of(value: Any) -> str:
    """What a value is, for messages."""
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def same_bits(a: Any, b: Any) -> bool:
    """Bitwise equality of two results (NaN equals itself, zeros of different sign differ)."""
    if isinstance(a, tuple | list):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def over_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """`value` with every tensor in its tuples and lists changed; None stays None."""
    if isinstance(value, tuple | list):
        return tuple(over_tensors(change, each) for each in value)
    return None if value is None else change(value)


def sentence(error: BaseException) -> str:
    """An exception as one line: its kind, its message, and the line of source that raised it."""
    root = interpreter.cause(error)
    frames = traceback.extract_tb(root.__traceback__)
    place = f" at {frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(root).split())
    return f"{type(root).__name__}: {text[:500]}{place}" if text else f"{type(root).__name__}{place}"


def execute(
    impl: Implementation,
    function: Callable[..., Any],
    operands: Any,
    *,
    measure: bool = False,
    repeats: int = 1,
    dry: bool = False,
) -> Outcome:
    """Call `function` on operands that exist, under all the precautions, and inspect what comes back.

    Python exceptions of the function become `error`; a process that dies is the worker's business.
    """
    operation = impl.operation
    outcome = Outcome(operands=operands)
    equal = operation.equal or same_bits
    before = operands.snapshot()
    versions = _versions(operands)
    started = time.perf_counter()

    def call(named: dict[str, Any]) -> Any:
        given = operation.invoke(function, named, operands)
        if operands.device.type == "cuda":
            torch.cuda.synchronize(operands.device)
        return given

    try:
        named = operation.arguments(impl, operands)
        with (
            poisoned_allocations(),
            interpreter.corrected(),
            interpreter.watched(dry=dry) as watch,
            _compiled_variants() as compiled,
        ):
            if measure:
                with memory.peak_bytes(operands.device) as peak:
                    given = call(named)
                outcome.peak_bytes, outcome.peak_note, outcome.joint_bytes = peak.bytes, peak.largest, peak.joint
            else:
                given = call(named)
            put_back = sorted(name for name, count in _versions(operands).items() if count != versions[name])
            output, outcome.kept = operation.collect(given, operands), operation.kept(given, operands)
            outcome.defect = operation.inspect(output, operands) or _elsewhere(output, named)
            outcome.grounds = Grounds.FORM if outcome.defect else None
            if repeats > 1 and outcome.defect is None:
                # A function may hand out one buffer again and again.
                output = over_tensors(Tensor.clone, output)
                for index in range(1, repeats):
                    operation.restore(operands)
                    given = call(named | operation.arguments(impl, operands))
                    again = operation.collect(given, operands)
                    if operation.inspect(again, operands) or not equal(output, again):
                        outcome.differing = (index, over_tensors(Tensor.clone, again))
                        break
        outcome.launches = len(watch.launches)
        outcome.excess = next((text for launch in watch.launches if (text := launch.excess())), None)
        outcome.variants = tuple(sorted(compiled))
    except Exception as error:  # a user's function may raise anything
        root = interpreter.cause(error)
        if isinstance(root, interpreter.OutOfBounds):
            outcome.defect = f"address out of bounds: {root}"
        elif isinstance(root, BrokenConventionError):
            outcome.defect, outcome.grounds = str(root), root.grounds
        else:
            outcome.error = sentence(error)
        outcome.seconds = time.perf_counter() - started
        return outcome
    outcome.seconds = time.perf_counter() - started
    if outcome.defect is None:
        written = operands.changed(before)
        outcome.defect = f"inputs: the call wrote {', '.join(written)}" if written else None
        if outcome.defect is None and put_back:
            outcome.defect = f"inputs: the call wrote {', '.join(put_back)} and put it back"
    if outcome.defect is None and hasattr(operands, "outside"):
        outcome.defect = operands.outside()
    if outcome.defect is None:
        outcome.output = tuple(output) if isinstance(output, list) else output
    return outcome


def _versions(operands: Any) -> dict[str, int]:
    """How often torch has written each storage that a call must not write, by name; views count with their storage."""
    guarded = operands.guarded() if hasattr(operands, "guarded") else {}
    return {name: tensor._version for name, tensor in guarded.items()}


def _elsewhere(output: Any, named: dict[str, Any]) -> str | None:
    if "out" in named and output.data_ptr() != named["out"].data_ptr():
        return "result: the function was given out=, but returned another tensor"
    return None


@contextlib.contextmanager
def _compiled_variants() -> Iterator[set[str]]:
    """Collect what triton compiles inside the block (native compilation only)."""
    seen: set[str] = set()
    # A function that holds Triton kernels has imported triton when it was loaded.
    knobs = getattr(sys.modules.get("triton"), "knobs", None)
    if interpreter.interpreting() or knobs is None:
        yield seen
        return

    def note(**named: Any) -> bool:
        seen.add(str(named.get("key", named.get("repr"))))
        return False

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield seen
    finally:
        knobs.runtime.jit_cache_hook = before


def run_sequence(
    impl: Implementation, function: Callable[..., Any], cases: Sequence[Any], device: torch.device
) -> list[Outcome]:
    """Call `function` on one case after another, keeping what it returned as it is.

    The output of each outcome is a copy of what its call gave; a result that a later call changed is a defect, for an
    engine may still be reading it. The first call that gives nothing to judge is the last one made."""
    operation = impl.operation
    found: list[Outcome] = []
    copies: list[Any] = []
    for at, case in enumerate(cases):
        outcome = execute(impl, function, operation.build(case, device))
        for earlier, (other, copy) in enumerate(zip(found, copies, strict=True)):
            if other.defect is None and not same_bits(other.kept, copy):
                other.defect = f"result: call {at + 1} changed what call {earlier + 1} had returned"
        found.append(outcome)
        if outcome.complaint:
            break
        outcome.output = over_tensors(Tensor.clone, outcome.output)
        copies.append(over_tensors(Tensor.clone, outcome.kept))
    return found


def replay(impl: Implementation, function: Callable[..., Any], wide: Any, narrow: Any, device: torch.device) -> Outcome:
    """A CUDA graph captured on one case and replayed on another, as the operation does it."""
    if impl.operation.replay is None:
        return Outcome(unsupported=f"functions of {impl.op} are not captured in CUDA graphs")
    return impl.operation.replay(impl, function, wide, narrow, device)


class InProcess:
    """Runs an implementation whose function lives in this process."""

    def __init__(self, impl: Implementation, device: torch.device) -> None:
        if impl.function is None:
            raise ValueError(f"{impl.name} has no function in this process; it needs a worker")
        self.impl, self.device = impl, device

    def companion(self) -> "Runner | None":
        """The runner of the function that shows what the first one hides, or None if there is none."""
        if self.impl.companion is None:
            return None
        return InProcess(self.impl.accompanied(function=self.impl.companion), self.device)

    def run(self, case: Any, *, measure: bool = False, repeats: int = 1, dry: bool = False) -> Outcome:
        """Build the case's operands on the device and call the function; see `execute`.

        The operands of a small case for a GPU are drawn on the CPU and judged there, for their many small steps would
        take longer to launch than to compute; a verified model of the dot is evaluated on the GPU all the same.
        """
        assert self.impl.function is not None
        drawn = None
        build = self.impl.operation.build
        if self.device.type == "cuda" and self.impl.operation.light(case):
            drawn = build(case, torch.device("cpu"))
            operands = to_device(drawn, self.device)
        else:
            operands = build(case, self.device)
        outcome = execute(self.impl, self.impl.function, operands, measure=measure, repeats=repeats, dry=dry)
        if drawn is not None and not self.impl.contract.dot_verified:
            outcome.operands, outcome.output = drawn, over_tensors(Tensor.cpu, outcome.output)
            if outcome.differing is not None:
                outcome.differing = (outcome.differing[0], over_tensors(Tensor.cpu, outcome.differing[1]))
        if self.impl.route is not None and outcome.error is None:
            outcome.route, wrong = self.impl.route()
            if wrong:
                outcome.output, outcome.error, outcome.grounds = None, wrong, Grounds.ROUTE
        return outcome

    def sequence(self, cases: Sequence[Any]) -> list[Outcome]:
        """Calls that follow each other; results are judged where they are."""
        assert self.impl.function is not None
        return run_sequence(self.impl, self.impl.function, cases, self.device)

    def fresh(self, sequences: Sequence[Sequence[Any]]) -> list[list[Outcome]]:
        """Not for a function that lives here."""
        raise ValueError(f"{self.impl.name} lives in this process")

    def replay(self, wide: Any, narrow: Any) -> Outcome:
        """Graph capture on `wide`, replay on `narrow`'s operands copied into the captured buffers."""
        assert self.impl.function is not None
        return replay(self.impl, self.impl.function, wide, narrow, self.device)

    def close(self) -> None:
        """Nothing to give back."""

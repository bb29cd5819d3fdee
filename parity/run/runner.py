"""One call of one implementation: operands built, poison laid, the function called by keyword, its answer inspected.

`InProcess` runs it here and `parity.run.worker.Worker` in a child process; both give an `Outcome`, and neither judges.
"""

import contextlib
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from parity.ops.paged_logits import case as cases
from parity.ops.paged_logits import operands as building
from parity.pages.layout import DIM, PAGE
from parity.run import interpreter, memory
from parity.run.registry import Implementation, resolve_name

LIGHT_PRODUCTS, LIGHT_CELLS, LIGHT_TOKENS, LIGHT_BYTES = 3 << 24, 1 << 18, 512, 1 << 25
"""Float64 products, logits of a top-k case, tokens stored and bytes of pages, up to which a case is drawn and judged on
the CPU."""

SENTINEL = -7.0e33
"""What an `out=` buffer holds before the call: finite, and no logit that a case can produce."""


@dataclass
class Outcome:
    """What a call did. `output` is None exactly when `error`, `defect` or `unsupported` says why.

    output       float32 [T, width] logits, or (slots, positions) int32 [T, k]; on the runner's device
    error        the call crashed or hung: one sentence
    defect       the call broke the calling convention: shape, dtype or device of the result, inputs written, a wild
                 address
    unsupported  the call cannot be made here, with the reason
    route        which of our own paths ran (built-ins alone)
    peak_bytes   bytes allocated beyond inputs, result included (only when measured); `peak_note` names the largest
    launches     interpreted Triton launches seen; `excess` a grid that no CUDA device accepts
    variants     keys of what triton compiled during the call (native compilation alone)
    differing    (run, output) of the first of the repeats that differs from the first run in any bit
    """

    output: Any = None
    error: str | None = None
    defect: str | None = None
    unsupported: str | None = None
    route: str | None = None
    peak_bytes: int | None = None
    peak_note: str = ""
    launches: int = 0
    excess: str | None = None
    variants: tuple[str, ...] = ()
    differing: Any = None
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

    def run(self, case: cases.Case, *, measure: bool = False, repeats: int = 1, dry: bool = False) -> Outcome:
        """Call the implementation on the case's operands, `repeats` times on the same operands."""

    def replay(self, wide: cases.Case, narrow: cases.Case) -> Outcome:
        """Capture a CUDA graph on one case, replay it on another of the same shapes."""

    def companion(self) -> "Runner | None":
        """The runner of the function that returns the dots of every head (stage "dots"), or None if there is none."""

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


def arguments(impl: Implementation, operands: Any) -> dict[str, Any]:
    """Keyword arguments of the calling convention; `schedule_meta` and `out` only if the function names them."""
    named = dict(operands.kwargs())
    if impl.stage == "dots":
        return {name: value for name, value in named.items() if name not in ("weights", "clean_logits")}
    if "schedule_meta" in impl.parameters:
        builder = impl.contract.schedule_meta
        if builder is None:
            raise ValueError(
                f"{impl.name} names schedule_meta, but its contract does not say what builds it "
                "(key schedule_meta = 'module:function')"
            )
        # DeepGEMM's own convention: lengths, slots in a page, number of multiprocessors.
        processors = 1
        if operands.context_lens.is_cuda:
            processors = torch.cuda.get_device_properties(operands.context_lens.device).multi_processor_count
        named["schedule_meta"] = resolve_name(builder)(operands.context_lens, PAGE, processors)
    # Every second case: both ways of returning have to work.
    if "out" in impl.parameters and impl.stage == "logits" and operands.case.seed % 2:
        shape = (operands.case.rows, operands.max_context_len)
        named["out"] = torch.full(shape, SENTINEL, dtype=torch.float32, device=operands.context_lens.device)
    return named


def inspect(output: Any, operands: Any, stage: str) -> str | None:
    """The sentence that says how a result breaks the calling convention, or None."""
    rows, device = operands.case.rows, operands.context_lens.device
    if stage == "topk":
        if not (isinstance(output, tuple | list) and len(output) == 2):
            return f"result: expected (slots, positions), got {_kind(output)}"
        shape = (rows, operands.k)
        named = [("slots", output[0], torch.int32, shape), ("positions", output[1], torch.int32, shape)]
    else:
        heads = (operands.case.heads,) if stage == "dots" else ()
        named = [("result", output, torch.float32, (rows, *heads, operands.max_context_len))]
    for name, value, dtype, shape in named:
        if not isinstance(value, torch.Tensor):
            return f"{name}: expected a {dtype} tensor {list(shape)}, got {_kind(value)}"
        if tuple(value.shape) != shape or value.dtype != dtype:
            return f"{name}: expected {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}"
        if value.device != device:
            return f"{name}: expected a tensor on {device}, got one on {value.device}"
    return None


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {value.dtype} tensor {list(value.shape)}"
    return f"a {type(value).__name__}" if value is not None else "None"


def same_bits(a: Any, b: Any) -> bool:
    """Bitwise equality of two results (NaN equals itself, zeros of different sign differ)."""
    if isinstance(a, tuple | list):
        return all(same_bits(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def _copy(value: Any) -> Any:
    return tuple(item.clone() for item in value) if isinstance(value, tuple | list) else value.clone()


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
    if impl.stage == "store":
        from parity.ops.store.call import execute_store

        return execute_store(impl, function, operands, measure=measure, repeats=repeats)
    if impl.stage == "compressor":
        from parity.ops.compressor.call import execute_compressor

        return execute_compressor(impl, function, operands, repeats=repeats)
    outcome = Outcome(operands=operands)
    device = operands.context_lens.device
    before = operands.snapshot()
    started = time.perf_counter()
    try:
        named = arguments(impl, operands)
        with (
            poisoned_allocations(),
            interpreter.corrected(),
            interpreter.watched(dry=dry) as watch,
            _compiled_variants() as compiled,
        ):
            if measure:
                with memory.peak_bytes(device) as peak:
                    output = function(**named)
                outcome.peak_bytes, outcome.peak_note = peak.bytes, peak.largest
            else:
                output = function(**named)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            outcome.defect = inspect(output, operands, impl.stage) or _elsewhere(output, named)
            if repeats > 1 and outcome.defect is None:
                # A function may hand out one buffer again and again.
                output = _copy(output)
                for index in range(1, repeats):
                    again = function(**(named | arguments(impl, operands)))
                    if inspect(again, operands, impl.stage) or not same_bits(output, again):
                        outcome.differing = (index, _copy(again))
                        break
        outcome.launches = len(watch.launches)
        outcome.excess = next((text for launch in watch.launches if (text := launch.excess())), None)
        outcome.variants = tuple(sorted(compiled))
    except Exception as error:
        root = interpreter.cause(error)
        if isinstance(root, interpreter.OutOfBounds):
            outcome.defect = f"address out of bounds: {root}"
        else:
            outcome.error = sentence(error)
        outcome.seconds = time.perf_counter() - started
        return outcome
    outcome.seconds = time.perf_counter() - started
    if outcome.defect is None:
        written = operands.changed(before)
        outcome.defect = f"inputs: the call wrote {', '.join(written)}" if written else None
    if outcome.defect is None:
        outcome.output = tuple(output) if impl.stage == "topk" else output
    return outcome


def light(case: Any) -> bool:
    """Whether a CPU evaluates the case about as fast as a GPU launches the steps of it."""
    if case.stage == "topk":
        return case.rows * case.max_context_len <= LIGHT_CELLS
    if case.stage == "store":
        return len(case.ids) <= LIGHT_TOKENS and case.pages * case.page_stride <= LIGHT_BYTES
    if case.stage != "logits":
        return False
    pages = case.spare + sum(-(-max(request, default=0) // PAGE) for request in case.lengths)
    return (
        case.rows * case.heads * (case.longest + PAGE) * DIM <= LIGHT_PRODUCTS
        and pages * case.page_stride <= LIGHT_BYTES
    )


def _on_cpu(value: Any) -> Any:
    return (
        tuple(item.cpu() for item in value)
        if isinstance(value, tuple | list)
        else value
        if value is None
        else value.cpu()
    )


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


class InProcess:
    """Runs an implementation whose function lives in this process."""

    def __init__(self, impl: Implementation, device: torch.device) -> None:
        if impl.function is None:
            raise ValueError(f"{impl.name} has no function in this process; it needs a worker")
        self.impl, self.device = impl, device

    def companion(self) -> "Runner | None":
        """The runner of the function that returns the dots of every head, or None if there is none."""
        if self.impl.dots is None:
            return None
        beside = replace(self.impl, stage="dots", function=self.impl.dots, route=None, parameters=frozenset())
        return InProcess(beside, self.device)

    def run(self, case: cases.Case, *, measure: bool = False, repeats: int = 1, dry: bool = False) -> Outcome:
        """Build the case's operands on the device and call the function; see `execute`.

        The operands of a small case for a GPU are drawn on the CPU and judged there, for their many small steps would
        take longer to launch than to compute; a verified model of the dot is evaluated on the GPU all the same.
        """
        assert self.impl.function is not None
        drawn = None
        if self.device.type == "cuda" and light(case):
            drawn = building.build(case, "cpu")
            operands = building.moved(drawn, self.device)
        else:
            operands = building.build(case, self.device)
        outcome = execute(self.impl, self.impl.function, operands, measure=measure, repeats=repeats, dry=dry)
        if drawn is not None and not self.impl.contract.dot_verified:
            outcome.operands, outcome.output = drawn, _on_cpu(outcome.output)
            if outcome.differing is not None:
                outcome.differing = (outcome.differing[0], _on_cpu(outcome.differing[1]))
        if self.impl.route is not None and outcome.error is None:
            outcome.route, wrong = self.impl.route()
            if wrong:
                outcome.output, outcome.error = None, wrong
        return outcome

    def replay(self, wide: cases.Case, narrow: cases.Case) -> Outcome:
        """Graph capture on `wide`, replay on `narrow`'s operands copied into the captured buffers."""
        from parity.run.graph import replay

        assert self.impl.function is not None
        return replay(self.impl, self.impl.function, wide, narrow, self.device)

    def close(self) -> None:
        """Nothing to give back."""

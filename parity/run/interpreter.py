"""Triton's interpreter made fit for judging: when it is switched on, its known defects corrected, its launches watched.

Two context managers, both over hooks that triton does not promise to keep: `corrected()` repairs the arithmetic on
bf16 and fp8 values, which the interpreter stores as raw integers; `watched()` records every launch, checks every
unmasked address against the tensors that the launch was given, and can leave the programs out ("dry"), so that launch
shapes and memory are seen at sizes that no interpreter can compute.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

GRID_LIMITS = (2**31 - 1, 65535, 65535)
"""Largest launch grid in x, y and z of every CUDA architecture (CUDA programming guide, compute capabilities)."""

DEFECTS = (
    "tl.dot of bf16 multiplies bit patterns",
    "tl.dot sums in an order that depends on the shape of the tile and on the BLAS",
    "bf16 element-wise arithmetic works on bit patterns",
    "float32 to bf16 truncates",
    "float32 to fp8 rounds wrongly",
    "an fp8 NaN becomes 480",
)
"""What `corrected()` repairs. Reductions and scans over bf16 itself (not promoted to float32 first) stay wrong."""


class OutOfBounds(IndexError):
    """An interpreted kernel read or wrote an address outside every tensor that its launch was given."""


class _NoScope:
    """Stands for a patch scope that has nothing to undo."""

    def restore(self) -> None:
        pass


class _Dry(Exception):
    """Leaves a launch once its grid is known."""


def prepare(device: str) -> bool:
    """Set TRITON_INTERPRET=1 where kernels cannot run natively; True if kernels will be interpreted.

    Has to be called before anything imports triton; `device` is auto, cpu or cuda. A value that the user has set is
    kept. TRITON_DEFAULT_FP_FUSION is pinned too, because its default changes between triton releases.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    if "TRITON_INTERPRET" not in os.environ and "triton" not in sys.modules:
        import torch

        if device == "cpu" or not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"
    return interpreting()


def interpreting() -> bool:
    """Whether Triton kernels run under the interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@dataclass(frozen=True)
class Launch:
    """One kernel launch and its grid."""

    kernel: str
    grid: tuple[int, ...]

    def excess(self) -> str | None:
        """The sentence that says which grid dimension no CUDA device accepts, or None."""
        for axis, size, limit in zip("xyz", self.grid, GRID_LIMITS, strict=False):
            if size > limit:
                return f"{self.kernel}: grid {axis} is {size}, CUDA devices accept at most {limit}"
        return None


@dataclass
class Watch:
    """What `watched()` saw: launches in order, and the number of elements loaded and stored."""

    launches: list[Launch] = field(default_factory=list)
    loads: int = 0
    stores: int = 0
    spans: np.ndarray = field(default_factory=lambda: np.zeros((0, 2), dtype=np.uint64))


def _interpreter() -> Any:
    from triton.runtime import interpreter

    return interpreter


@contextlib.contextmanager
def _patched(owner: Any, **replacements: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in replacements}
    for name, value in replacements.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def widen_bf16(bits: np.ndarray) -> np.ndarray:
    """bf16 bit patterns (uint16) as float32, exact for every pattern."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(values: np.ndarray) -> np.ndarray:
    """float32 to bf16 bit patterns (uint16), to nearest with ties to even, as the hardware's conversion; NaN stays."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )
    return np.where(np.isnan(values), np.uint16(0x7FFF), rounded)


def _torch_fp8(tl: Any) -> dict[Any, Any]:
    import torch

    return {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def widen_fp8(bits: np.ndarray, dtype: Any) -> np.ndarray:
    """fp8 bit patterns (uint8) of a torch dtype as float32, through the table of all 256 values."""
    import torch

    table = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32).numpy()
    return table[bits]


def round_fp8(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float32 to fp8 bit patterns, to nearest even and saturating (`cvt.rn.satfinite`); NaN stays."""
    import torch

    # Clamped first: torch releases differ in what they make of values beyond the largest.
    largest = torch.finfo(dtype).max
    wide = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clamp(-largest, largest)
    return wide.to(dtype).view(torch.uint8).numpy()


def ordered_product(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """a [..., M, K] @ b [..., K, N] in `dtype`, the order of each sum depending on K only.

    A matrix unit computes every element of a tile alike. A BLAS does not: it has other kernels for small matrices and
    edges, so that a row's bits would depend on the rows beside it. Three to seven times slower than one, a small part
    of an interpreted program.
    """
    left = np.ascontiguousarray(a, dtype=dtype)
    right = np.ascontiguousarray(np.swapaxes(b, -1, -2), dtype=dtype)
    return np.einsum("...mk,...nk->...mn", left, right)


@contextlib.contextmanager
def corrected() -> Iterator[None]:
    """Repair the interpreter's arithmetic (see DEFECTS) inside the block; does nothing where kernels are compiled."""
    if not interpreting():
        yield
        return
    import triton.language as tl

    module = _interpreter()
    builder, handle = type(module.interpreter_builder), module.TensorHandle
    fp8 = _torch_fp8(tl)
    original_cast, original_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    original_binary, original_unary = builder.binary_op, builder.unary_op

    def wide(value: Any) -> Any:
        kind = value.dtype.scalar
        if kind == tl.bfloat16:
            return widen_bf16(value.data)
        if kind in fp8:
            return widen_fp8(value.data, fp8[kind])
        return value.data

    def narrow(data: np.ndarray, kind: Any) -> Any:
        if kind == tl.bfloat16:
            return handle(round_bf16(data), kind)
        return handle(round_fp8(data, fp8[kind]), kind)

    def raw(kind: Any) -> bool:
        return kind == tl.bfloat16 or kind in fp8

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        source, target = src.dtype.scalar, dst_type.scalar
        if not (raw(source) or raw(target)) or source == target or source.is_ptr() or target.is_ptr():
            return original_cast(self, src, dst_type)
        if raw(target):
            return narrow(wide(src), target)
        return original_cast(self, handle(wide(src), tl.float32), dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        toward_zero = rounding_mode is not None and "RTZ" in str(rounding_mode)
        if toward_zero or not (raw(src.dtype.scalar) or raw(dst_type.scalar)):
            return original_fp_to_fp(self, src, dst_type, rounding_mode)
        return cast_impl(self, src, dst_type)

    def binary_op(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
        kind = lhs.dtype.scalar
        # Bitwise operators see integers already; only values of a raw floating type are widened.
        if not raw(kind) or rhs.dtype.scalar != kind:
            return original_binary(self, lhs, rhs, op)
        result = original_binary(self, handle(wide(lhs), tl.float32), handle(wide(rhs), tl.float32), op)
        comparison = op in (np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal)
        return result if comparison else narrow(result.data, kind)

    def unary_op(self: Any, arg: Any, op: Any) -> Any:
        if not raw(arg.dtype.scalar):
            return original_unary(self, arg, op)
        return narrow(op(wide(arg)), arg.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        return handle(ordered_product(wide(a), wide(b), d.data.dtype) + d.data, d.dtype.scalar)

    def through_cast(self: Any, src: Any, dst_type: Any) -> Any:
        return cast_impl(self, src, dst_type)

    with _patched(
        builder,
        cast_impl=cast_impl,
        create_fp_to_fp=create_fp_to_fp,
        create_fp_ext=through_cast,
        create_fp_trunc=through_cast,
        binary_op=binary_op,
        unary_op=unary_op,
        create_dot=create_dot,
    ):
        yield


def _tensors(arguments: Any) -> Iterator[Any]:
    for value in arguments:
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "data_ptr"):
            yield getattr(value, "base", value) if not hasattr(value, "untyped_storage") else value
        elif hasattr(value, "base") and hasattr(value.base, "untyped_storage"):
            yield value.base


def _spans(tensors: Iterator[Any]) -> np.ndarray:
    """Sorted, merged [start, end) addresses of the storages behind the given tensors."""
    ranges: list[list[int]] = []
    for start, end in sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in (t.untyped_storage() for t in tensors)):
        if ranges and start <= ranges[-1][1]:
            ranges[-1][1] = max(ranges[-1][1], end)
        elif end > start:
            ranges.append([start, end])
    return np.array(ranges, dtype=np.uint64).reshape(-1, 2)


def _check(watch: Watch, pointers: Any, mask: Any, what: str) -> int:
    size = np.uint64(max(1, pointers.get_element_ty().primitive_bitwidth // 8))
    addresses, wanted = np.broadcast_arrays(pointers.data, mask.data)
    addresses = addresses[wanted]
    if addresses.size == 0:
        return 0
    if not len(watch.spans):
        raise OutOfBounds(f"{what} of {addresses.size} elements, but the launch was given no memory")
    low, high = addresses.min(), addresses.max() + size
    index = int(np.searchsorted(watch.spans[:, 0], low, side="right")) - 1
    if index >= 0 and high <= watch.spans[index, 1]:
        return int(addresses.size)
    which = np.searchsorted(watch.spans[:, 0], addresses, side="right") - 1
    bad = (which < 0) | (addresses + size > watch.spans[np.maximum(which, 0), 1])
    if bad.any():
        first = int(addresses[bad][0])
        distance = first - int(watch.spans[max(int(which[bad][0]), 0), 0])
        raise OutOfBounds(
            f"{what} of {int(bad.sum())} of {addresses.size} elements outside every tensor of the launch; "
            f"the first lies {distance} bytes from the start of the nearest tensor below"
        )
    return int(addresses.size)


@contextlib.contextmanager
def _thrifty(module: Any) -> Iterator[None]:
    """Leave out what the interpreter computes for nothing, a fifth of its time.

    It adds, subtracts and multiplies every 32-bit integer again in 64 bits for an assertion that only its option
    `debug` would raise; and it builds its table of numpy's dtypes anew for every value.
    """
    options, original = module.interpreter_builder.options, module._get_np_dtype
    if getattr(options, "sanitize_overflow", False) and not options.debug:
        options = dataclasses.replace(options, sanitize_overflow=False)
    known: dict[Any, np.dtype[Any]] = {}

    def _get_np_dtype(kind: Any) -> np.dtype[Any]:
        scalar = kind.scalar
        if scalar.is_ptr():
            return np.dtype(np.uint64)
        found = known.get(scalar)
        if found is None:
            found = known[scalar] = original(scalar)
        return found

    with _patched(module.interpreter_builder, options=options), _patched(module, _get_np_dtype=_get_np_dtype):
        yield


@contextlib.contextmanager
def watched(*, dry: bool = False) -> Iterator[Watch]:
    """Watch the interpreted launches of the block; yields the Watch that fills up. Nothing is seen on a compiler.

    Every unmasked address must lie in the storage of a tensor that the launch was given, else OutOfBounds (wrapped by
    triton in an InterpreterError). dry: launches are recorded but no program runs.
    """
    watch = Watch()
    if not interpreting():
        yield watch
        return
    module = _interpreter()
    builder, executor = type(module.interpreter_builder), module.GridExecutor
    load, store = builder.create_masked_load, builder.create_masked_store
    set_grid, to_host, call = builder.set_grid_dim, executor._init_args_hst, executor.__call__
    patch_language = module._patch_lang
    patched: set[int] = set()
    met: set[Any] = set()

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        watch.loads += _check(watch, ptrs, mask, "load")
        return load(self, ptrs, mask, *rest, **named)

    def create_masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        watch.stores += _check(watch, ptrs, mask, "store")
        return store(self, ptrs, value, mask, *rest, **named)

    def _init_args_hst(self: Any, args_dev: Any, kwargs: Any) -> Any:
        args, named = to_host(self, args_dev, kwargs)
        watch.spans = _spans(_tensors([*args, *named.values()]))
        watch.launches.append(Launch(self.fn.__name__, ()))
        return args, named

    def set_grid_dim(self: Any, *grid: int) -> Any:
        last = watch.launches[-1]
        watch.launches[-1] = Launch(last.kernel, tuple(int(n) for n in grid))
        if dry:
            raise _Dry
        return set_grid(self, *grid)

    def _patch_lang(fn: Any) -> Any:
        # The interpreter patches triton.language anew at every call of a device function, a quarter of its time; once
        # a launch is enough, since the patches stay until it ends.
        if fn in met:
            return _NoScope()
        met.add(fn)
        modules = {id(value) for value in fn.__globals__.values() if value in (module.tl, module.tl.core)}
        if modules <= patched:
            return _NoScope()
        patched.update(modules)
        return patch_language(fn)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        met.clear()
        try:
            return call(self, *args, **kwargs)
        except _Dry:
            return None

    with (
        _patched(builder, create_masked_load=create_masked_load, create_masked_store=create_masked_store),
        _patched(builder, set_grid_dim=set_grid_dim),
        _patched(executor, _init_args_hst=_init_args_hst, __call__=__call__),
        _patched(module, _patch_lang=_patch_lang),
        _thrifty(module),
        np.errstate(all="ignore"),  # NaN and infinity are operands like any other here
    ):
        yield watch


def cause(error: BaseException) -> BaseException:
    """The exception at the root of one that triton's interpreter has wrapped."""
    seen = error
    while type(seen).__name__ == "InterpreterError" and seen.__cause__ is not None:
        seen = seen.__cause__
    return seen

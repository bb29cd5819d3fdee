"""The modes of the fused store and the checks of its arguments: what each template choice means, and one clear sentence
for every mistake before any memory is touched."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from impl.checks import DIM, PAGE, SLOT_BYTES, layout_of

FORMATS = ("fp8", "fp8_pow2", "bf16", "fp4")
SCHEDULES = ("fused", "published")
ROPE = 64  # floats of a rope_table row: 32 (cos, sin) pairs
MAX_TOKENS = 2**27


@dataclass(frozen=True)
class Mode:
    """One template choice.

    format     "fp8": e4m3 with one float32 scale max(amax, 1e-4) / 448 a slot; "fp8_pow2": that scale rounded up to a
               power of two; "bf16"; "fp4": e2m1 with a ue8m0 scale for each 32 channels
    schedule   "fused": float32 up to the one rounding of the store; "published": a bf16 rounding after pooling, norm,
               rotary and Hadamard, as DeepSeek's inference code has them
    fake_fp4   quantise to the fp4 grid and back before a bf16 or fp8 store, as that code does
    """

    format: str
    schedule: str
    fake_fp4: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be one of {', '.join(FORMATS)}, got {self.format!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {self.schedule!r}")
        if self.fake_fp4 and self.format == "fp4":
            raise ValueError("fake_fp4 must be off for the fp4 format, which stores the fp4 values themselves")

    @property
    def layout(self) -> str:
        """Page layout that the mode writes."""
        return "fp8" if self.format == "fp8_pow2" else self.format

    @property
    def index(self) -> int:
        """Number of the mode in the CUDA source: 4 * format + 2 * published + fake_fp4."""
        return 4 * FORMATS.index(self.format) + 2 * (self.schedule == "published") + self.fake_fp4

    @property
    def name(self) -> str:
        """Name of the mode's function."""
        return f"store_{self.format}_{self.schedule}" + ("_fake_fp4" if self.fake_fp4 else "")

    @property
    def contract(self) -> dict[str, Any]:
        """What the mode promises, in the words of a contract file."""
        scale = {"fp8": "amax", "fp8_pow2": "pow2"}.get(self.format)
        words = {"op": "store", "layout": self.layout, "schedule": self.schedule, "fake_fp4": self.fake_fp4}
        words |= {"scale": scale} if scale else {}
        return words | {"mean_order": "halving", "batch_invariant": True, "contiguous": ["pooled"]}


MODES = tuple(
    Mode(format, schedule, fake)
    for format in FORMATS
    for schedule in SCHEDULES
    for fake in ((False,) if format == "fp4" else (False, True))
)


class Sizes(NamedTuple):
    """Sizes of one call: tokens, slots in the pool, bytes from page to page, rows of the rotary table."""

    tokens: int
    slots: int
    page_stride: int
    max_position: int


def check_store(
    layout: str,
    pooled: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    out_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    validate: bool = False,
) -> Sizes:
    """Check one store call and return its sizes.

    Raises TypeError or ValueError with one sentence naming the argument, what it must be and what came. With `validate`
    slots and positions are read as well, which on a GPU makes the host wait: a slot that is neither -1 nor in the pool,
    one written twice, a position outside the table.
    """
    found = layout_of(kv_cache)
    if found != layout:
        raise ValueError(f"kv_cache must be laid out as {layout} ({SLOT_BYTES[layout]} bytes per slot), got {found}")
    for name, tensor in (("pooled", pooled), ("norm_weight", norm_weight)):
        _tensor(name, tensor)
        if tensor.dtype not in (torch.float32, torch.bfloat16):
            raise TypeError(f"{name} must be float32 or bfloat16, got {_dtype(tensor)}")
    if pooled.dim() != 2 or pooled.shape[1] != DIM:
        raise ValueError(f"pooled must have shape [tokens, {DIM}], got {list(pooled.shape)}")
    tokens = pooled.shape[0]
    if tokens > MAX_TOKENS:
        raise ValueError(f"pooled must have at most {MAX_TOKENS} rows, got {tokens}")
    _expect("norm_weight", norm_weight, norm_weight.dtype, (DIM,))
    _expect("positions", positions, torch.int32, (tokens,))
    _expect("out_loc", out_loc, torch.int64, (tokens,))
    _tensor("rope_table", rope_table)
    if rope_table.dim() != 2 or rope_table.shape[1] != ROPE:
        raise ValueError(f"rope_table must have shape [max_position, {ROPE}], got {list(rope_table.shape)}")
    if rope_table.dtype != torch.float32:
        raise TypeError(f"rope_table must be float32, got {_dtype(rope_table)}")
    if isinstance(eps, bool) or not isinstance(eps, int | float):
        raise TypeError(f"eps must be a float, got {type(eps).__name__}")
    if not (math.isfinite(eps) and eps > 0):
        raise ValueError(f"eps must be positive and finite, got {eps}")
    given = {"norm_weight": norm_weight, "positions": positions, "rope_table": rope_table, "out_loc": out_loc}
    for name, tensor in {"pooled": pooled, **given}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {list(tensor.stride())}")
        if tensor.device.type != "meta" and tensor.data_ptr() % 16 and name in ("pooled", "norm_weight", "rope_table"):
            raise ValueError(f"{name} must start at a multiple of 16 bytes, got offset {tensor.data_ptr() % 16}")
    for name, tensor in {**given, "kv_cache": kv_cache}.items():
        if tensor.device != pooled.device:
            raise ValueError(f"{name} must be on pooled's device {pooled.device}, got {tensor.device}")
    sizes = Sizes(tokens, kv_cache.shape[0] * PAGE, _page_stride(layout, kv_cache), rope_table.shape[0])
    if validate:
        check_values(positions, out_loc, sizes)
    return sizes


def check_values(positions: torch.Tensor, out_loc: torch.Tensor, sizes: Sizes) -> None:
    """Read slots and positions and refuse what the kernel would leave out or what has no one meaning."""
    slots, places = out_loc.cpu(), positions.cpu()
    _first_bad("out_loc", slots, (slots < -1) | (slots >= sizes.slots), f"be -1 or lie in [0, {sizes.slots})")
    kept = slots[slots >= 0]
    values, counts = kept.unique(return_counts=True)
    if values.numel() != kept.numel():
        raise ValueError(f"out_loc must not name a slot twice, got slot {int(values[counts > 1][0])} more than once")
    wrong = ((places < 0) | (places >= sizes.max_position)) & (slots >= 0)
    _first_bad("positions", places, wrong, f"lie in [0, {sizes.max_position}), the rows of rope_table")


def _first_bad(name: str, values: torch.Tensor, wrong: torch.Tensor, rule: str) -> None:
    if wrong.any():
        token = int(wrong.nonzero()[0])
        raise ValueError(f"{name} must {rule}, got {int(values[token])} at token {token}")


def _page_stride(layout: str, kv_cache: torch.Tensor) -> int:
    """Bytes from one page to the next; inside a page the bytes are fixed."""
    page_bytes = PAGE * SLOT_BYTES[layout]
    if kv_cache.shape[0] == 0:
        return page_bytes
    stride, width = kv_cache.stride(), kv_cache.shape[3]
    if stride[3] != 1 or stride[1] != width:
        raise ValueError(
            f"kv_cache must be contiguous inside a page (strides {width} and 1), got {stride[1]} and {stride[3]}"
        )
    if kv_cache.device.type != "meta" and kv_cache.data_ptr() % 16:
        raise ValueError(f"kv_cache must start at a multiple of 16 bytes, got offset {kv_cache.data_ptr() % 16}")
    if kv_cache.shape[0] == 1:
        return page_bytes
    found = stride[0] * kv_cache.element_size()
    if found % 16 or found < page_bytes:
        raise ValueError(
            f"kv_cache must have a page stride of at least {page_bytes} bytes and a multiple of 16, got {found}"
        )
    return found


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    _tensor(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {str(dtype).removeprefix('torch.')}, got {_dtype(tensor)}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {list(shape)}, got {list(tensor.shape)}")


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

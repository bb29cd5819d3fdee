"""The fused compressor store on a GPU: RMSNorm, rotary, Hadamard and the store of pooled keys into pages, one launch.

One function a mode, all with the calling convention f(pooled, norm_weight, eps, positions, rope_table, out_loc,
kv_cache), writing kv_cache in place:

    pooled       float32 or bfloat16 [tokens, 128]
    norm_weight  float32 or bfloat16 [128]
    eps          positive float, used in float32
    positions    int32 [tokens], position of the first token of each group, a row of rope_table
    rope_table   float32 [max_position, 64], 32 (cos, sin) pairs
    out_loc      int64 [tokens], slots page * 64 + offset; -1 leaves a token out
    kv_cache     bfloat16 [pages, 64, 1, 128], uint8 [pages, 64, 1, 132] (fp8) or uint8 [pages, 64, 1, 68] (fp4), any
                 page stride that is a multiple of 16 bytes

A call runs on torch's current stream and can be captured in a CUDA graph once the function has been called. A slot or
position out of range is left out on the device; `validate=True` reads both first and refuses them, as well as a slot
named twice, whose content would be either token's.
"""

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from impl.checks import Unsupported
from impl.store_compile import Variant, compile_variants
from impl.store_modes import MODES, Mode, check_store

THREADS = 128  # as in the CUDA source
LANES = 8
# A small call is all latency: a warp per token has the shortest chain. The bytes are the same.
SMALL_TOKENS, SMALL_LANES = 1024, 32


def lanes_for(tokens: int) -> int:
    """Lanes that share a token in a call of so many tokens."""
    return SMALL_LANES if tokens < SMALL_TOKENS else LANES


class _TorchStream:
    """A stream of torch's as cuda.core asks for it."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self._handle)


@functools.cache
def _kernel(variant: Variant, index: int) -> Any:
    """The loaded kernel for a device; compiled on first use."""
    from cuda.core import Device, ObjectCode

    major, minor = torch.cuda.get_device_capability(index)
    if torch.cuda.is_current_stream_capturing():
        raise Unsupported(f"{variant.mode.name} must be called once before it is captured in a CUDA graph")
    made = compile_variants((variant,), f"sm_{major}{minor}")
    Device(index).set_current()
    # cuda.core 1.2.0 hands a mapped name on as it is, and its driver call takes only bytes.
    symbols: Any = {name: symbol.encode() for name, symbol in made.symbols.items()}
    return ObjectCode.from_cubin(made.cubin, symbol_mapping=symbols).get_kernel(variant.expression)


def store(
    mode: Mode,
    pooled: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    out_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    validate: bool = False,
    lanes: int | None = None,
) -> None:
    """Store pooled keys in `mode`; arguments as in the module's description.

    `lanes` a token are for tuning (default: `lanes_for`).

    TypeError or ValueError for a wrong argument, Unsupported without a CUDA device or the packages to compile with.
    """
    sizes = check_store(
        mode.layout, pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache, validate=validate
    )
    if pooled.device.type != "cuda":
        raise Unsupported(f"{mode.name} needs tensors on a CUDA device, got them on {pooled.device}")
    if sizes.tokens == 0 or sizes.slots == 0:
        return
    from cuda.core import LaunchConfig, launch

    lanes = lanes or lanes_for(sizes.tokens)
    variant = Variant(mode, _name(pooled), _name(norm_weight), lanes)
    with torch.cuda.device(pooled.device):
        kernel = _kernel(variant, torch.cuda.current_device())
        stream = _TorchStream(torch.cuda.current_stream().cuda_stream)
        launch(
            stream,
            LaunchConfig(grid=-(-sizes.tokens * lanes // THREADS), block=THREADS),
            kernel,
            *(pooled.data_ptr(), norm_weight.data_ptr(), ctypes.c_float(eps)),
            *(positions.data_ptr(), rope_table.data_ptr(), out_loc.data_ptr(), kv_cache.data_ptr()),
            *(ctypes.c_longlong(sizes.page_stride), ctypes.c_longlong(sizes.slots)),
            *(ctypes.c_int(sizes.max_position), ctypes.c_int(sizes.tokens)),
        )


def _name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _function(mode: Mode) -> Callable[..., None]:
    """The mode's function, with its contract as an attribute."""

    def call(
        pooled: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        rope_table: torch.Tensor,
        out_loc: torch.Tensor,
        kv_cache: torch.Tensor,
        *,
        validate: bool = False,
    ) -> None:
        store(mode, pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache, validate)

    call.__name__ = call.__qualname__ = mode.name
    call.__doc__ = (
        f"Store pooled keys: format {mode.format}, schedule {mode.schedule}, "
        f"fake_fp4 {'on' if mode.fake_fp4 else 'off'}. Arguments and errors: see the module."
    )
    call.parity_contract = {**mode.contract, "devices": ["cuda"]}  # type: ignore[attr-defined]
    return call


STORES = {mode.name: _function(mode) for mode in MODES}

store_fp8_fused = STORES["store_fp8_fused"]
store_fp8_fused_fake_fp4 = STORES["store_fp8_fused_fake_fp4"]
store_fp8_published = STORES["store_fp8_published"]
store_fp8_published_fake_fp4 = STORES["store_fp8_published_fake_fp4"]
store_fp8_pow2_fused = STORES["store_fp8_pow2_fused"]
store_fp8_pow2_fused_fake_fp4 = STORES["store_fp8_pow2_fused_fake_fp4"]
store_fp8_pow2_published = STORES["store_fp8_pow2_published"]
store_fp8_pow2_published_fake_fp4 = STORES["store_fp8_pow2_published_fake_fp4"]
store_bf16_fused = STORES["store_bf16_fused"]
store_bf16_fused_fake_fp4 = STORES["store_bf16_fused_fake_fp4"]
store_bf16_published = STORES["store_bf16_published"]
store_bf16_published_fake_fp4 = STORES["store_bf16_published_fake_fp4"]
store_fp4_fused = STORES["store_fp4_fused"]
store_fp4_published = STORES["store_fp4_published"]

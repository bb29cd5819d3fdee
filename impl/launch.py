"""Host side of the Triton kernels: checks, output, choice of configuration and the one launch."""

from functools import cache

import torch
import triton
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from impl import configs, kernels, tiles
from impl.checks import Shapes, Unsupported, check_logits


class KernelFailed(Unsupported):
    """Triton could not compile the kernel or fit it on the device."""


def paged_logits(
    layout: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor | None,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
    out: torch.Tensor | None = None,
    validate: bool = False,
    config: configs.Config | None = None,
) -> tuple[torch.Tensor, configs.Config | None]:
    """Run one logits call, or with `weights` None the per-head dots, in one launch.

    Returns the result and the configuration used (None when there was nothing to launch). `config` overrides the
    choice, for tuning. Raises what `check_logits` raises, ValueError for a table with gaps within a row, and
    Unsupported where the kernels cannot run.
    """
    shapes = check_logits(
        layout, q, kv_cache, weights, context_lens, block_table, max_context_len, out=out, validate=validate
    )
    if block_table.numel() and block_table.shape[1] > 1 and block_table.stride(1) != 1:
        # The kernels step from page to page of a row by one entry.
        raise ValueError(f"block_table must be contiguous in its last dimension, got stride {block_table.stride(1)}")
    per_head = weights is None
    if weights is None:
        # Cells past a row's length are no one's result; NaN says so, whatever the buffer held.
        size = (shapes.rows, shapes.heads, max_context_len)
        out = torch.full(size, float("nan"), dtype=torch.float32, device=q.device)
        weights = q.new_zeros((), dtype=torch.float32).expand(shapes.rows, shapes.heads)
        clean_logits = False
    elif out is None:
        out = torch.empty((shapes.rows, max_context_len), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, None
    chosen = plan_for(shapes, q.device, config)
    _launch(chosen, shapes, q, kv_cache, weights, context_lens, block_table, out, clean_logits, per_head)
    return out, chosen.config


def plan_for(shapes: Shapes, device: torch.device, config: configs.Config | None = None) -> configs.Plan:
    """The plan of a call on a device; Unsupported when Triton cannot run there."""
    arch, processors = target(device)
    if config is None:
        return configs.plan(shapes, arch, processors)
    return configs.plan_with(config, shapes, processors, arch)


def target(device: torch.device) -> tuple[int, int]:
    """Compute capability (0 for the interpreter) and number of multiprocessors of a device."""
    if tiles.INTERPRETED:
        return configs.INTERPRETER, 1
    if device.type != "cuda":
        raise Unsupported(f"Triton kernels need a CUDA device or TRITON_INTERPRET=1, the tensors are on {device.type}")
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _cuda_target(index: int) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        raise Unsupported("the Triton kernels are for NVIDIA devices, this is an AMD one")
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _launch(
    chosen: configs.Plan,
    shapes: Shapes,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    out: torch.Tensor,
    clean: bool,
    per_head: bool,
) -> None:
    config = chosen.config
    fp8 = shapes.layout == "fp8"
    if fp8 and tiles.INTERPRETED:
        # The interpreter widens e4m3 itself, from the bytes.
        q = q.view(torch.uint8)
    constants: dict[str, object] = {
        "FP8": fp8,
        "HEADS": shapes.heads,
        "BLOCK": config.block,
        "ROW_TILE": config.row_tile,
        "DOTS": per_head,
        "INTERPRET": tiles.INTERPRETED,
    }
    # Loop bounds are compiled in for the interpreter only; a compiled kernel takes them at run time.
    fixed = chosen.trips if tiles.INTERPRETED else 0
    if config.kernel == "decode":
        kernel = kernels.decode
        constants["TILES"] = fixed
    else:
        kernel = kernels.prefill
        constants |= {"STEPS": fixed, "ROWS": triton.next_power_of_2(config.trips * config.row_tile)}
    unit = 16 // kv_cache.element_size()
    arguments = (
        *(q, kv_cache, weights, context_lens, block_table, out),
        *(shapes.next_n, chosen.groups, shapes.limit, shapes.max_context_len if clean else 0, chosen.trips),
        *(q.stride(0), q.stride(1), q.stride(2), kv_cache.stride(0) // unit),
        *(weights.stride(0), weights.stride(1), context_lens.stride(0), context_lens.stride(1)),
        *(block_table.stride(0), out.stride(-2)),
    )
    try:
        if q.device.type == "cuda":
            with torch.cuda.device(q.device):
                options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
                kernel[chosen.grid](*arguments, **constants, **options, enable_fp_fusion=configs.fused())
        else:
            kernel[chosen.grid](*arguments, **constants)
    except (CompilationError, OutOfResources, PTXASError) as error:
        raise KernelFailed(f"kernel {config} failed: {type(error).__name__}: {_first_line(error)}") from error
    except RuntimeError as error:
        # A pass of Triton's compiler reports its failure as a bare RuntimeError; a device error must go through.
        if "PassManager" not in str(error):
            raise
        raise KernelFailed(f"kernel {config} failed to compile: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")

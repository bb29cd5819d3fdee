"""What a server calls: paged logits by the Triton kernel or by PyTorch, chosen by an environment flag at every call.

TRITON_INDEXER=1 asks for Triton, 0 or unset for PyTorch. Where Triton cannot serve a call, PyTorch does, with one
warning a reason; TRITON_INDEXER_STRICT=1 raises instead.
"""

import os
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from impl.checks import Unsupported, layout_of
from impl.torch_path import torch_bf16_paged_mqa_logits, torch_fp8_paged_mqa_logits

FLAG = "TRITON_INDEXER"
STRICT_FLAG = "TRITON_INDEXER_STRICT"


@dataclass(frozen=True)
class Route:
    """Which path served a call.

    `name` is "triton" or "torch"; `kernel` the function that ran; `reason` why this path; `config` the launch
    configuration of a Triton kernel (empty for PyTorch and for calls with nothing to compute).
    """

    name: str
    kernel: str
    reason: str
    config: str = ""


_last: Route | None = None
_warned: set[str] = set()


def paged_mqa_logits(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    clean_logits: bool = True,
    *,
    validate: bool = False,
) -> torch.Tensor:
    """Paged logits of bf16 or fp8 pages, distinguished by `kv_cache`'s dtype and shape.

    Arguments and result as `impl.logits_bf16.bf16_paged_mqa_logits` and its fp8 sibling. Raises ValueError for an
    unknown flag value or layout, what the argument checks raise, and Unsupported in strict mode.
    """
    global _last
    wanted, strict = flag(FLAG), flag(STRICT_FLAG)
    layout = layout_of(kv_cache)
    if layout not in ("bf16", "fp8"):
        raise ValueError(f"kv_cache must be laid out as bf16 or fp8 pages, got {layout}")
    arguments = (q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits)
    reason = f"{FLAG} is not 1"
    if wanted:
        try:
            result, config = _triton(layout, arguments, validate)
        except Unsupported as error:
            reason = str(error)
            if strict:
                raise Unsupported(f"{STRICT_FLAG}=1 and the Triton kernel cannot run: {reason}") from error
            _warn(reason)
        else:
            _last = Route("triton", f"{layout}_paged_mqa_logits", f"{FLAG}=1", config)
            return result
    torch_path = torch_bf16_paged_mqa_logits if layout == "bf16" else torch_fp8_paged_mqa_logits
    result = torch_path(*arguments, validate=validate)
    _last = Route("torch", torch_path.__name__, reason)
    return result


def last_route() -> Route | None:
    """The route of this process's latest successful call of `paged_mqa_logits`, None before the first."""
    return _last


def flag(name: str) -> bool:
    """Read a 0/1 environment flag now; unset or empty is 0. ValueError for anything else."""
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0, 1 or unset, got {value!r}")
    return value == "1"


def _triton(layout: str, arguments: tuple[Any, ...], validate: bool) -> tuple[torch.Tensor, str]:
    """Import late: where there is no triton, the torch path still serves."""
    try:
        from impl.launch import paged_logits
    except ImportError as error:
        raise Unsupported(f"triton cannot be imported: {error}") from error
    q, kv_cache, weights, context_lens, block_table, max_context_len, clean = arguments
    result, config = paged_logits(
        layout, q, kv_cache, weights, context_lens, block_table, max_context_len, clean, validate=validate
    )
    return result, str(config or "")


def _warn(reason: str) -> None:
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(f"Triton indexer falls back to PyTorch: {reason}", RuntimeWarning, stacklevel=3)

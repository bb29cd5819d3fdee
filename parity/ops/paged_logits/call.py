"""How logits functions, and the functions that return their dots, are called, and what they have to return."""

from typing import Any

import torch

from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.operands import SENTINEL, Operands
from parity.pages.layout import DIM, PAGE
from parity.run.implementation import Implementation
from parity.run.loading import resolve_name
from parity.run.runner import inspect_tensors

GAP = 5  # columns between the rows of an `out=` buffer that is a view

LIGHT_PRODUCTS, LIGHT_BYTES = 3 << 24, 1 << 25
"""Float64 products and bytes of pages, up to which a case is drawn and judged on the CPU."""


def arguments(impl: Implementation, operands: Operands) -> dict[str, Any]:
    """Keyword arguments of a logits function; `schedule_meta` and `out` only if it names them."""
    named = operands.kwargs()
    if "schedule_meta" in impl.parameters:
        builder = impl.contract.schedule_meta
        if builder is None:
            raise ValueError(
                f"{impl.name} names schedule_meta, but its contract does not say what builds it "
                "(key schedule_meta = 'module:function')"
            )
        # DeepGEMM's own convention: lengths, slots per page, number of multiprocessors.
        processors = 1
        if operands.device.type == "cuda":
            processors = torch.cuda.get_device_properties(operands.device).multi_processor_count
        named["schedule_meta"] = resolve_name(builder)(operands.context_lens, PAGE, processors)
    # Every second case: both ways of returning have to work.
    if "out" in impl.parameters and operands.case.seed % 2:
        # A row before and a row after, and where the case says so columns between the rows, that stay as they are.
        rows, width = operands.case.rows, operands.max_context_len
        gap = GAP if "out" in operands.case.strides else 0
        around = torch.full((rows + 2, width + gap), SENTINEL, dtype=torch.float32, device=operands.device)
        named["out"] = around[1:-1, :width]
        operands.around[:] = [around]
    return named


def inspect(output: Any, operands: Operands) -> str | None:
    """Logits are float32 [T, max_context_len]."""
    shape = (operands.case.rows, operands.max_context_len)
    return inspect_tensors([("result", output, torch.float32, shape)], operands.device)


def dots_arguments(impl: Implementation, operands: Operands) -> dict[str, Any]:
    """Keyword arguments of a function that returns the dots of every head."""
    return {name: value for name, value in operands.kwargs().items() if name not in ("weights", "clean_logits")}


def inspect_dots(output: Any, operands: Operands) -> str | None:
    """Dots are float32 [T, H, max_context_len]."""
    case = operands.case
    shape = (case.rows, case.heads, operands.max_context_len)
    return inspect_tensors([("result", output, torch.float32, shape)], operands.device)


def light(case: Case) -> bool:
    """Whether a CPU evaluates the case about as fast as a GPU launches the steps of it."""
    pages = case.spare + sum(-(-max(request, default=0) // PAGE) for request in case.lengths)
    return (
        case.rows * case.heads * (case.longest + PAGE) * DIM <= LIGHT_PRODUCTS
        and pages * case.page_stride <= LIGHT_BYTES
    )

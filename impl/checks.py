"""Argument checks of the logits and top-k functions: every mistake becomes one sentence before any memory is touched.

Dtypes, shapes, devices and strides are always checked, from tensor metadata. Values (lengths, page ids) are
checked only on request, because reading them on a GPU makes the host wait.
"""

from dataclasses import dataclass

import torch

PAGE = 64
DIM = 128
SLOT_BYTES = {"bf16": 2 * DIM, "fp8": DIM + 4, "fp4": DIM // 2 + 4}
MAX_KEYS = 2**30


class Unsupported(RuntimeError):
    """The arguments are legal but this path cannot serve them here; the message says why."""


@dataclass(frozen=True)
class Shapes:
    """Sizes of one logits call.

    `limit` is the largest length a row can have: table width in slots or the result's columns, 0 in an empty pool.
    """

    layout: str
    requests: int
    next_n: int
    heads: int
    pages: int
    table_width: int
    max_context_len: int

    @property
    def rows(self) -> int:
        return self.requests * self.next_n

    @property
    def limit(self) -> int:
        return min(self.table_width * PAGE, self.max_context_len) if self.pages else 0


def layout_of(kv_cache: torch.Tensor) -> str:
    """Name the page layout of `kv_cache` ("bf16", "fp8" or "fp4") by its dtype and shape; ValueError or TypeError."""
    _tensor("kv_cache", kv_cache)
    if kv_cache.dtype not in (torch.bfloat16, torch.uint8):
        raise TypeError(f"kv_cache must be bfloat16 or uint8, got {_dtype(kv_cache)}")
    shape = tuple(kv_cache.shape)
    if kv_cache.dim() == 4 and shape[1] != PAGE and shape[2] == 1:
        raise ValueError(f"kv_cache must have pages of {PAGE} slots (its second dimension), got {shape[1]}")
    widths = {DIM: "bf16"} if kv_cache.dtype == torch.bfloat16 else {132: "fp8", 68: "fp4"}
    if kv_cache.dim() != 4 or shape[1:3] != (PAGE, 1) or shape[3] not in widths:
        wanted = " or ".join(f"[pages, {PAGE}, 1, {width}]" for width in widths)
        raise ValueError(f"kv_cache of {_dtype(kv_cache)} must have shape {wanted}, got {list(shape)}")
    return widths[shape[3]]


def check_logits(
    layout: str,
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    weights: torch.Tensor | None,
    context_lens: torch.Tensor,
    block_table: torch.Tensor,
    max_context_len: int,
    out: torch.Tensor | None = None,
    validate: bool = False,
) -> Shapes:
    """Check one logits call against `layout` and return its sizes.

    `weights` is None for the per-head dots, which take none. Raises TypeError or ValueError with one sentence naming
    the argument, what it must be and what came. With `validate` lengths and page ids are read as well.
    """
    found = layout_of(kv_cache)
    if found != layout:
        raise ValueError(
            f"kv_cache must be laid out as {layout} ({_layout_words(layout)}), got {found} ({_layout_words(found)})"
        )
    _tensor("q", q)
    if q.dim() != 4 or q.shape[3] != DIM:
        raise ValueError(f"q must have shape [requests, next_n, heads, {DIM}], got {list(q.shape)}")
    operand = torch.bfloat16 if layout == "bf16" else torch.float8_e4m3fn
    if q.dtype != operand:
        raise TypeError(f"q must be {_name(operand)} for {layout} pages, got {_dtype(q)}")
    requests, next_n, heads, _ = q.shape
    if heads < 1:
        raise ValueError("q must have at least one head, got none")
    if weights is not None:
        _expect("weights", weights, torch.float32, (requests * next_n, heads), "[requests * next_n, heads]")
    _expect("context_lens", context_lens, torch.int32, (requests, next_n), "[requests, next_n]")
    _tensor("block_table", block_table)
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table must be int32, got {_dtype(block_table)}")
    if block_table.dim() != 2 or block_table.shape[0] != requests:
        raise ValueError(f"block_table must have shape [{requests}, max_pages], got {list(block_table.shape)}")
    _max_context_len(max_context_len)
    given = {"kv_cache": kv_cache, "weights": weights, "context_lens": context_lens, "block_table": block_table}
    given["out"] = out
    for name, tensor in given.items():
        if tensor is not None and isinstance(tensor, torch.Tensor) and tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
    if q.stride(3) != 1 and q.numel():
        raise ValueError(f"q must be contiguous in its last dimension, got stride {q.stride(3)}")
    _page_strides(layout, kv_cache)
    if out is not None:
        _expect("out", out, torch.float32, (requests * next_n, max_context_len), "[rows, max_context_len]")
        if out.numel() and out.shape[1] > 1 and out.stride(1) != 1:
            raise ValueError(f"out must be contiguous in its last dimension, got stride {out.stride(1)}")
    shapes = Shapes(layout, requests, next_n, heads, kv_cache.shape[0], block_table.shape[1], max_context_len)
    if validate:
        check_values(context_lens, block_table, shapes.pages, max_context_len)
    return shapes


def check_topk(
    logits: torch.Tensor, context_lens: torch.Tensor, block_table: torch.Tensor, k: int, validate: bool = False
) -> None:
    """Check one top-k call: TypeError or ValueError with one sentence."""
    _tensor("logits", logits)
    _tensor("context_lens", context_lens)
    _tensor("block_table", block_table)
    if logits.dtype != torch.float32:
        raise TypeError(f"logits must be float32, got {_dtype(logits)}")
    for name, tensor in (("context_lens", context_lens), ("block_table", block_table)):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, got {_dtype(tensor)}")
        if tensor.dim() != 2:
            raise ValueError(f"{name} must have two dimensions, got shape {list(tensor.shape)}")
        if tensor.device != logits.device:
            raise ValueError(f"{name} must be on logits' device {logits.device}, got {tensor.device}")
    if logits.dim() != 2 or logits.shape[0] != context_lens.numel():
        raise ValueError(
            f"logits must have shape [{context_lens.numel()}, max_context_len] to match context_lens, "
            f"got {list(logits.shape)}"
        )
    if block_table.shape[0] != context_lens.shape[0]:
        raise ValueError(
            f"block_table must have one row a request ({context_lens.shape[0]}), got {block_table.shape[0]}"
        )
    if isinstance(k, bool) or not isinstance(k, int):
        raise TypeError(f"k must be an int, got {type(k).__name__}")
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    if logits.shape[1] > MAX_KEYS:
        raise ValueError(f"logits must have at most {MAX_KEYS} columns, got {logits.shape[1]}")
    if validate:
        check_values(context_lens, block_table, None, logits.shape[1])


def check_values(
    context_lens: torch.Tensor, block_table: torch.Tensor, pages: int | None, max_context_len: int
) -> None:
    """Read lengths and page ids and refuse what a kernel would clamp or must not touch. The host waits for the device.

    `pages` is the pool's size, or None where no pool is at hand and only negative ids can be refused.
    """
    if context_lens.numel() == 0:
        return
    lens = context_lens.cpu()
    table = block_table.cpu()
    _first_bad(lens, lens < 0, "context_lens must not be negative")
    slots = table.shape[1] * PAGE
    _first_bad(lens, lens > slots, f"context_lens must not exceed the block table's {table.shape[1]} pages ({slots})")
    _first_bad(lens, lens > max_context_len, f"context_lens must not exceed max_context_len ({max_context_len})")
    used = (lens.amax(dim=1, keepdim=True) + PAGE - 1) // PAGE
    wrong = table < 0
    if pages is not None:
        wrong |= table >= pages
    wrong &= torch.arange(table.shape[1])[None, :] < used
    if wrong.any():
        request, page = (int(i) for i in wrong.nonzero()[0])
        pool = "not be negative" if pages is None else f"lie in [0, {pages})"
        raise ValueError(
            f"block_table entries in use must {pool}, got {int(table[request, page])} at request {request}, page {page}"
        )


def _first_bad(lens: torch.Tensor, wrong: torch.Tensor, rule: str) -> None:
    if wrong.any():
        request, row = (int(i) for i in wrong.nonzero()[0])
        raise ValueError(f"{rule}, got {int(lens[request, row])} at request {request}, row {row}")


def _page_strides(layout: str, kv_cache: torch.Tensor) -> None:
    """Inside a page the bytes are fixed; only the distance between pages is free, in whole 16-byte units."""
    size = kv_cache.element_size()
    width = kv_cache.shape[3]
    stride = kv_cache.stride()
    if kv_cache.shape[0] == 0:
        return
    if stride[3] != 1 or stride[1] != width:
        raise ValueError(
            f"kv_cache must be contiguous inside a page (strides {width} and 1), got {stride[1]} and {stride[3]}"
        )
    page_bytes = PAGE * SLOT_BYTES[layout]
    if kv_cache.shape[0] > 1 and (stride[0] * size % 16 or stride[0] * size < page_bytes):
        raise ValueError(
            f"kv_cache must have a page stride of at least {page_bytes} bytes and a multiple of 16, "
            f"got {stride[0] * size}"
        )
    if kv_cache.device.type != "meta" and kv_cache.data_ptr() % 16:
        raise ValueError(f"kv_cache must start at a multiple of 16 bytes, got offset {kv_cache.data_ptr() % 16}")


def _max_context_len(value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"max_context_len must be an int, got {type(value).__name__}")
    if not 0 <= value <= MAX_KEYS:
        raise ValueError(f"max_context_len must lie in [0, {MAX_KEYS}], got {value}")


def _expect(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], words: str) -> None:
    _tensor(name, tensor)
    if tensor.dtype != dtype:
        raise TypeError(f"{name} must be {_name(dtype)}, got {_dtype(tensor)}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} must have shape {words} = {list(shape)}, got {list(tensor.shape)}")


def _tensor(name: str, value: object) -> None:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


def _layout_words(layout: str) -> str:
    return (
        f"bfloat16 [pages, {PAGE}, 1, {DIM}]" if layout == "bf16" else f"uint8 [pages, {PAGE}, 1, {SLOT_BYTES[layout]}]"
    )


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

"""Paged logits as a chain of small torch stages under the calling convention, so that a fault model can replace one.

Correct as it stands. Memory behaves as on a device: an address outside the pool, or a table entry outside the table,
reads some other place instead of raising, so that faults are found by their values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from parity.pages.layout import DIM, PAGE, Layout, find

BUDGET = 48 << 20  # bytes of temporaries that a batch of rows may take


@dataclass
class Call:
    """What one call was given, and the memory that a faulty function keeps from call to call.

    q [B, N, H, 128]; kv_cache as the layout has it; weights float32 [B * N, H]; context_lens int32 [B, N];
    block_table int32 [B, P]; width columns of the result.
    """

    layout: Layout
    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    width: int
    clean: bool
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def payload_words(self) -> int:
        """4-byte words of a key's payload."""
        return self.layout.payload // 4

    @property
    def next_n(self) -> int:
        return self.context_lens.shape[1]

    @property
    def rows(self) -> int:
        return self.context_lens.numel()

    @property
    def heads(self) -> int:
        return self.q.shape[2]

    def load(self, words: Tensor) -> Tensor:
        """int32 words of the cache's memory at word addresses int64 of any shape; outside of it, some other word."""
        cache = self.kv_cache
        size = cache.untyped_storage().nbytes() // cache.element_size()
        flat = cache.as_strided((size,), (1,), 0).view(torch.int32)
        return flat[words.remainder(flat.numel())]

    def entry(self, row: Tensor, column: Tensor) -> Tensor:
        """Block-table entries int64, rows and columns broadcast; outside of it, some other entry of its storage."""
        table = self.block_table
        if not table.numel():
            return torch.zeros(torch.broadcast_shapes(row.shape, column.shape), dtype=torch.int64)
        flat = table.as_strided((table.untyped_storage().nbytes() // 4,), (1,), 0)
        place: Tensor = int(table.storage_offset()) + row * table.stride(0) + column * table.stride(1)
        return flat[place.remainder(flat.numel())].to(torch.int64)


def allocate(c: Call) -> Tensor:
    """The result, uninitialised, float32 [T, width]."""
    return torch.empty((c.rows, c.width), dtype=torch.float32, device=c.q.device)


def batches(c: Call) -> Iterator[Tensor]:
    """Rows (int64) that are computed together: as many as the budget allows."""
    longest = int(c.context_lens.max()) if c.rows else 0
    cost = max(1, longest) * (c.payload_words * 12 + DIM * 4 + 12 * c.heads) + 4 * c.heads * DIM
    step = max(1, BUDGET // cost)
    for first in range(0, c.rows, step):
        yield torch.arange(first, min(c.rows, first + step))


def lengths(c: Call, rows: Tensor) -> Tensor:
    """Visible keys of each row, int64 [R]."""
    return c.context_lens.reshape(-1)[rows].to(torch.int64)


def query(c: Call, rows: Tensor) -> Tensor:
    """float32 [R, H, 128]."""
    return c.q[rows // c.next_n, rows % c.next_n].to(torch.float32)


def weights(c: Call, rows: Tensor) -> Tensor:
    """Head weights float32 [R, H]."""
    return c.weights[rows]


def request(c: Call, rows: Tensor) -> Tensor:
    """Row of the block table that each row reads, int64 [R]."""
    return rows // c.next_n


def pages(c: Call, requests: Tensor, key: Tensor) -> Tensor:
    """Physical pages int64 [R, K] of the keys at positions int64 [K]."""
    return c.entry(requests[:, None], key // PAGE)


def offsets(c: Call, key: Tensor) -> Tensor:
    """Places of the keys in their pages, int64 [K]."""
    return key % PAGE


def address(c: Call, page: Tensor) -> Tensor:
    """Word address of each page, int64."""
    stride = c.kv_cache.stride(0) * c.kv_cache.element_size() // 4
    return c.kv_cache.storage_offset() * c.kv_cache.element_size() // 4 + page * stride


def payload(c: Call, base: Tensor, offset: Tensor) -> Tensor:
    """Word address of the first word of each key's payload, int64 [R, K]."""
    return base + offset * c.payload_words


def decode(c: Call, words: Tensor) -> Tensor:
    """float32 [R, K, 128] of payload words int32 [R, K, n]."""
    return words.view(c.layout.element.dtype).to(torch.float32)


def keys(c: Call, first: Tensor) -> Tensor:
    """Payload words int32 [R, K, n] from the address of their first."""
    return c.load(first[..., None] + torch.arange(c.payload_words))


def scales(c: Call, base: Tensor, offset: Tensor) -> Tensor | None:
    """Key scales float32 [R, K], which stand behind the page's payload; None for layouts without."""
    if not c.layout.scale:
        return None
    return c.load(base + PAGE * c.payload_words + offset).view(torch.float32)


def dot(c: Call, q: Tensor, k: Tensor) -> Tensor:
    """float32 [R, H, K] of q [R, H, 128] and k [R, K, 128]."""
    return q @ k.mT


def relu(c: Call, x: Tensor) -> Tensor:
    """max(x, 0), NaN kept."""
    return torch.relu(x)


def product(c: Call, w: Tensor, x: Tensor) -> Tensor:
    """Weighted heads [R, H, K]."""
    return w[..., None] * x


def head_sum(c: Call, x: Tensor) -> Tensor:
    """Sum over heads, [R, K]."""
    return x.sum(1)


def scale(c: Call, total: Tensor, s: Tensor | None) -> Tensor:
    """Logits [R, K]: the key's scale comes last."""
    return total if s is None else total * s


def write(c: Call, out: Tensor, rows: Tensor, logits: Tensor, lens: Tensor) -> None:
    """Visible cells of each row, and -inf behind them where a clean tail is wanted."""
    visible = torch.arange(c.width) < lens[:, None]
    wide = torch.nn.functional.pad(logits, (0, c.width - logits.shape[1]), value=-torch.inf)
    out[rows] = torch.where(visible, wide, -torch.inf if c.clean else out[rows])


def finish(c: Call, out: Tensor) -> Tensor:
    """The result as it is returned."""
    return out


@dataclass(frozen=True)
class Stages:
    """The chain; every field is a function of the same name in this module until a model replaces it."""

    allocate: Callable[[Call], Tensor] = allocate
    batches: Callable[[Call], Iterator[Tensor]] = batches
    lengths: Callable[[Call, Tensor], Tensor] = lengths
    query: Callable[[Call, Tensor], Tensor] = query
    weights: Callable[[Call, Tensor], Tensor] = weights
    request: Callable[[Call, Tensor], Tensor] = request
    pages: Callable[[Call, Tensor, Tensor], Tensor] = pages
    offsets: Callable[[Call, Tensor], Tensor] = offsets
    address: Callable[[Call, Tensor], Tensor] = address
    payload: Callable[[Call, Tensor, Tensor], Tensor] = payload
    keys: Callable[[Call, Tensor], Tensor] = keys
    decode: Callable[[Call, Tensor], Tensor] = decode
    scales: Callable[[Call, Tensor, Tensor], Tensor | None] = scales
    dot: Callable[[Call, Tensor, Tensor], Tensor] = dot
    relu: Callable[[Call, Tensor], Tensor] = relu
    product: Callable[[Call, Tensor, Tensor], Tensor] = product
    head_sum: Callable[[Call, Tensor], Tensor] = head_sum
    scale: Callable[[Call, Tensor, Tensor | None], Tensor] = scale
    write: Callable[[Call, Tensor, Tensor, Tensor, Tensor], None] = write
    finish: Callable[[Call, Tensor], Tensor] = finish


CORRECT = Stages()


def compute(stages: Stages, c: Call) -> Tensor:
    """Run the chain on one call: float32 [T, width]."""
    out = stages.allocate(c)
    if not out.numel():
        return out
    for rows in stages.batches(c):
        lens = stages.lengths(c, rows)
        key = torch.arange(min(c.width, int(lens.max()) if len(lens) else 0))
        requests = stages.request(c, rows)
        offset = stages.offsets(c, key)
        base = stages.address(c, stages.pages(c, requests, key))
        k = stages.decode(c, stages.keys(c, stages.payload(c, base, offset)))
        x = stages.relu(c, stages.dot(c, stages.query(c, rows), k))
        total = stages.head_sum(c, stages.product(c, stages.weights(c, rows), x))
        stages.write(c, out, rows, stages.scale(c, total, stages.scales(c, base, offset)), lens)
    return stages.finish(c, out)


def function(layout: str, change: Mapping[str, Callable[..., Any]] | None = None) -> Callable[..., Tensor]:
    """A logits function under the calling convention, with some stages replaced and a memory of its own.

    ValueError for a layout whose keys are packed, or have more scales than one: the chain has no stage for those."""
    form = find(layout)
    if form.element.dtype == torch.uint8 or form.scale not in (0, 4):
        raise ValueError(f"staged logits read keys of one number per byte or two, and one float32 scale, not {layout}")
    stages, memory = replace(CORRECT, **(change or {})), dict[str, Any]()  # type: ignore[arg-type]

    def staged_logits(
        q: Tensor,
        kv_cache: Tensor,
        weights: Tensor,
        context_lens: Tensor,
        block_table: Tensor,
        max_context_len: int,
        clean_logits: bool = True,
    ) -> Tensor:
        c = Call(form, q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits, memory)
        return compute(stages, c)

    return staged_logits

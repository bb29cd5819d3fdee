"""From a case to the tensors a kernel is called with, and the proof that it left them alone."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from parity.ops.paged_logits.case import DIM, PAGE, Case
from parity.ops.topk import scores
from parity.pages import counter, placement, pools, values
from parity.pages.placement import Placement, block_table, count_pages, placement_bytes, row_names
from parity.pages.pools import Windows, build_pool, cache_view, chosen_keys, pool_bytes
from parity.run import memory

HUGE_ID = 0x7EEEEEEE  # in the gaps of a strided table
LEAST, MOST = -3.0e38, 3.0e38

Snapshot = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class _Stored:
    """What every stage's operands have: the case, and the storages behind the views, to prove them unwritten."""

    case: Case
    placement: Placement
    storages: dict[str, Tensor]
    windows: Windows | None = field(default=None, kw_only=True)

    def snapshot(self) -> Snapshot:
        """Copies of all storages, gaps and poison included; of large ones a digest of the bytes."""
        return {name: self._record(name, storage) for name, storage in self.storages.items()}

    def changed(self, before: Snapshot) -> tuple[str, ...]:
        """Names of the storages that differ from the snapshot."""
        now = self.snapshot()
        return tuple(
            name for name in now if not all(torch.equal(a, b) for a, b in zip(now[name], before[name], strict=True))
        )

    def unchanged(self, before: Snapshot) -> bool:
        """Whether no byte of any storage differs from the snapshot."""
        return not self.changed(before)

    def _record(self, name: str, storage: Tensor) -> tuple[Tensor, ...]:
        flat = storage.reshape(-1).view(torch.uint8)
        if name == "pool" and self.windows is not None:
            return tuple(_record_bytes(flat[start:stop]) for start, stop in self.windows)
        return (_record_bytes(flat),)


@dataclass(frozen=True, eq=False)
class Operands(_Stored):
    """Operands of a logits function. q [B, next_n, H, 128]; kv_cache a view of pool, uint8 [pages, page stride];
    weights float32 [T, H]; context_lens int32 [B, next_n]; block_table int32 [B, width]."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int
    clean_logits: bool
    pool: Tensor

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a logits function, without schedule_meta."""
        names = ("q", "kv_cache", "weights", "context_lens", "block_table", "max_context_len", "clean_logits")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, eq=False)
class TopkOperands(_Stored):
    """Operands of a top-k function: logits float32 [T, W], context_lens int32 [B, next_n], block_table, k."""

    logits: Tensor
    context_lens: Tensor
    block_table: Tensor
    k: int

    def kwargs(self) -> dict[str, Any]:
        """Keyword arguments of a top-k function."""
        return {name: getattr(self, name) for name in ("logits", "context_lens", "block_table", "k")}


def operand_bytes(case: Case, device: str | torch.device = "cpu") -> int:
    """About how many bytes the operands and the result of a case take on a device; what judging takes comes on top."""
    heads = case.rows * case.heads
    own = 4 * heads * DIM + 16 * heads  # queries drawn and then joined, weights and the words that they are drawn from
    pool = pool_bytes(case, count_pages(case)[1], torch.device(device))
    return placement_bytes(case) + own + pool + memory.result_bytes(case.rows, case.max_context_len)


def topk_operand_bytes(case: Case, device: str | torch.device = "cpu") -> int:
    """The same for a case of top-k: logits and the coordinates of their columns, slots and positions."""
    columns, rows = case.max_context_len, case.rows
    return placement_bytes(case) + 4 * rows * columns + 40 * columns + 8 * rows * case.k


def build(case: Case, device: str | torch.device = "cpu") -> "Operands | TopkOperands":
    """The operands of a case on a device, the same bits on every device; new storages at every call."""
    device = torch.device(device)
    if case.stage == "store":
        from parity.ops.store.operands import build_store

        return build_store(case, device)  # type: ignore
    if case.stage == "compressor":
        from parity.ops.compressor.case import build_compressor

        return build_compressor(case, device)  # type: ignore
    return build_topk(case, device) if case.stage == "topk" else build_logits(case, device)


def moved(operands: Any, device: str | torch.device) -> Any:
    """The same operands (of any stage) on another device: every storage copied as it is, every view laid over its copy.

    The storages are those that the operands name, else their tensors, of which kv_cache is a view of the pool. Of one
    that the operands call sparse only the rows in use are copied, for its zeros may be mapped and not there.
    """
    device = torch.device(device)
    tensors = {part.name: getattr(operands, part.name) for part in fields(operands)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    named = getattr(operands, "storages", None)
    storages = {name: value for name, value in tensors.items() if name != "kv_cache"} if named is None else named
    sparse = operands.sparse() if hasattr(operands, "sparse") else {}
    copies = {
        name: _rows_alone(storage, sparse[name], device) if name in sparse else storage.to(device, copy=True)
        for name, storage in storages.items()
    }
    homes = {storage.untyped_storage().data_ptr(): (storage, copies[name]) for name, storage in storages.items()}

    def view(tensor: Tensor) -> Tensor:
        if tensor.numel() == 0:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        storage, copy = homes[tensor.untyped_storage().data_ptr()]
        assert storage.is_contiguous()
        start = tensor.storage_offset() * tensor.itemsize - storage.storage_offset() * storage.itemsize
        start += copy.storage_offset() * copy.itemsize
        home = copy.untyped_storage()
        empty: Any = torch.empty(0, dtype=tensor.dtype, device=device)
        return empty.set_(home, start // tensor.itemsize, tensor.shape, tensor.stride())

    views: dict[str, Any] = {name: view(value) for name, value in tensors.items()}
    return replace(operands, **views, **({} if named is None else {"storages": copies}))


def _rows_alone(table: Tensor, rows: Tensor, device: torch.device) -> Tensor:
    """A table on the device that holds the given rows (int64) of another, and zeros elsewhere."""
    copy = torch.zeros(table.shape, dtype=table.dtype, device=device)
    copy[rows.to(device)] = table[rows].to(device)
    return copy


def build_logits(case: Case, device: str | torch.device = "cpu") -> Operands:
    """Operands of a case of stage logits. ValueError for another stage."""
    if case.stage != "logits":
        raise ValueError(f"build_logits needs a case of stage=logits, got stage={case.stage}")
    device = torch.device(device)
    memory.require(operand_bytes(case, device), device)
    plan = placement.place(case)
    storages: dict[str, Tensor] = {}
    q = _build_queries(case, device, storages)
    weights = _build_weights(case, device, storages)
    pool, windows = build_pool(case, plan, device)
    storages["pool"] = pool
    lens, table = _build_lens_and_table(case, plan, device, storages)
    return Operands(
        case,
        plan,
        storages,
        q,
        cache_view(pool, case.layout),
        weights,
        lens,
        table,
        case.max_context_len,
        case.clean,
        pool,
        windows=windows,
    )


def build_topk(case: Case, device: str | torch.device = "cpu") -> TopkOperands:
    """Operands of a case of stage topk. ValueError for another stage."""
    if case.stage != "topk":
        raise ValueError(f"build_topk needs a case of stage=topk, got stage={case.stage}")
    device = torch.device(device)
    memory.require(topk_operand_bytes(case, device), device)
    plan = placement.place(case)
    storages: dict[str, Tensor] = {}
    logits = _build_logits(case, plan, device, storages)
    lens, table = _build_lens_and_table(case, plan, device, storages)
    return TopkOperands(case, plan, storages, logits, lens, table, case.k)


def _names(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    requests, rows = row_names(case)
    return torch.from_numpy(requests).to(device), torch.from_numpy(rows).to(device)


def _build_queries(case: Case, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    requests, rows = _names(case, device)
    shape = (case.requests, case.next_n, case.heads, DIM)
    dtype = torch.float8_e4m3fn if case.layout == "fp8" else torch.bfloat16
    step = max(1, pools.CHUNK_ELEMENTS // (case.heads * DIM))
    parts = [
        values.draw_queries(
            case.data, case.layout, case.seed, requests[at : at + step], rows[at : at + step], case.heads
        )
        for at in range(0, max(1, case.rows), step)
    ]
    q = (parts[0] if len(parts) == 1 else torch.cat([p.view(torch.uint8) for p in parts]).view(dtype)).view(shape)
    if "q" in case.strides:  # an extra row a request, an extra head, and 16 more elements a head
        base = torch.full((shape[0], shape[1] + 1, shape[2] + 1, 16 + DIM), 0xFF, dtype=torch.uint8, device=device)
        base = base.repeat_interleave(dtype.itemsize, -1).view(dtype)
        view = base[:, : shape[1], : shape[2], :DIM]
        view.view(torch.uint8).copy_(q.view(torch.uint8))
        storages["q"] = base
        return view
    storages["q"] = q
    return q


def _build_weights(case: Case, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    requests, rows = _names(case, device)
    weights = values.draw_weights(case.data, case.seed, requests, rows, case.heads)
    if case.only_heads is not None:
        dropped = torch.ones(case.heads, dtype=torch.bool)
        dropped[list(case.only_heads)] = False
        weights.masked_fill_(dropped.to(device), 0.0)
    if "weights" in case.strides:
        base = torch.full((case.rows, case.heads + 4), torch.nan, device=device)
        view = base[:, : case.heads]
        view.copy_(weights)
        storages["weights"] = base
        return view
    storages["weights"] = weights
    return weights


def _build_lens_and_table(
    case: Case, plan: Placement, device: torch.device, storages: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    lens = torch.from_numpy(plan.lengths).to(torch.int32)
    table = torch.from_numpy(block_table(case))
    if "lens" in case.strides:  # the gap holds the longest legal length, so that a reader of it stops
        base = torch.full((case.requests, case.next_n + 1), case.table_width * PAGE, dtype=torch.int32)
        base[:, : case.next_n] = lens
        storages["context_lens"] = base.to(device)
        lens = storages["context_lens"][:, : case.next_n]
    else:
        storages["context_lens"] = lens = lens.to(device)
    if "table" in case.strides:
        base = torch.full((case.requests, case.table_width + 5), HUGE_ID, dtype=torch.int32)
        base[:, : case.table_width] = table
        storages["block_table"] = base.to(device)
        table = storages["block_table"][:, : case.table_width]
    else:
        storages["block_table"] = table = table.to(device)
    return lens, table


def _build_logits(case: Case, plan: Placement, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    """Scores at readable places; past each length -inf (clean), NaN, 3e38 or larger-looking leftovers, by poison."""
    requests, rows = _names(case, device)
    width = case.max_context_len
    pages = torch.from_numpy(placement.ids_of(case.page_ids, max(case.table_width, -(-width // PAGE)))).to(device)
    columns = torch.arange(width, dtype=torch.int64, device=device)
    known = columns < len(pages) * PAGE  # page_ids may name fewer pages than the result is wide
    keys = torch.where(known, pages[(columns // PAGE).clamp(max=max(len(pages) - 1, 0))], 0) if len(pages) else columns
    keys = keys * PAGE + columns % PAGE
    gap, start = (7, 3) if "logits" in case.strides else (0, 0)
    fill = {"nan": torch.nan, "huge": MOST, "canary": MOST}[case.poison]
    base = torch.full((case.rows, width + gap), fill, device=device)
    view = base[:, start : start + width]
    lens = torch.from_numpy(plan.lengths).to(device).view(-1, 1)
    step = max(1, pools.CHUNK_ELEMENTS // max(1, width))
    for at in range(0, case.rows, step):
        part = slice(at, at + step)
        drawn = scores.draw_scores(case.data, case.seed, requests[part], rows[part], keys.to(torch.int32))
        if case.only_keys is not None:
            drawn.masked_fill_(~chosen_keys(keys, case.only_keys), 0.0)
        if case.clean:
            stale = torch.full_like(drawn, -torch.inf)
        elif case.poison == "canary":
            stale = scores.draw_stale(case.seed, requests[part], rows[part], columns.to(torch.int32))
        else:
            stale = torch.full_like(drawn, fill)
        view[part] = torch.where(columns < lens[part], drawn, stale)
    storages["logits"] = base
    return view


DIGEST_BYTES = 1 << 26  # above this a snapshot keeps a digest instead of a copy


def _record_bytes(data: Tensor) -> Tensor:
    if data.numel() <= DIGEST_BYTES:
        return data.clone()
    sums = []
    usable = data.numel() // 8 * 8
    for at in range(0, usable, DIGEST_BYTES):
        words = data[at : min(at + DIGEST_BYTES, usable)].view(torch.int64)
        places = torch.arange(len(words), dtype=torch.int64, device=data.device)
        sums.append(counter.row_keys(at, 23, (words, places)).sum())
    return torch.cat([torch.stack(sums), data[usable:].to(torch.int64)])

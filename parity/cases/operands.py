"""From a case to the tensors a kernel is called with: pages written, everything unreadable poisoned."""

import mmap
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.cases import counter, placement, scores, values
from parity.cases.case import DIM, PAGE, SLOT_BYTES, Case
from parity.cases.placement import Placement, block_table, row_names

POISON_BYTE = {"nan": 0xFF, "huge": 0x7E, "canary": 0x44}  # 0x44..: 3.0 in e4m3, 785 in bf16 and float32
LAZY_BYTES = 1 << 28  # a CPU pool above this is mapped lazily and poisoned around the pages in use alone
CHUNK_ELEMENTS = 1 << 23  # drawn at a time; the largest temporary is int64 [elements / 64] or int32 [elements]
HUGE_ID = 0x7EEEEEEE  # in the gaps of a strided table
LEAST, MOST = -3.0e38, 3.0e38

Snapshot = dict[str, tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class _Stored:
    """What every stage's operands have: the case, and the storages behind the views, to prove them unwritten."""

    case: Case
    placement: Placement
    storages: dict[str, Tensor]
    windows: tuple[tuple[int, int], ...] | None = field(default=None, kw_only=True)

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


def build(case: Case, device: str | torch.device = "cpu") -> "Operands | TopkOperands":
    """The operands of a case on a device, the same bits on every device; new storages at every call."""
    device = torch.device(device)
    if case.stage == "store":
        from parity.cases.store_operands import build_store

        return build_store(case, device)  # type: ignore
    if case.stage == "compressor":
        from parity.cases.compressor import build_compressor

        return build_compressor(case, device)  # type: ignore
    return build_topk(case, device) if case.stage == "topk" else build_logits(case, device)


def moved(operands: Any, device: str | torch.device) -> Any:
    """The same operands (of any stage) on another device: every storage copied as it is, every view laid over its copy.

    The storages are those that the operands name, else their tensors, of which kv_cache is a view of the pool."""
    device = torch.device(device)
    tensors = {part.name: getattr(operands, part.name) for part in fields(operands)}
    tensors = {name: value for name, value in tensors.items() if isinstance(value, Tensor)}
    named = getattr(operands, "storages", None)
    storages = {name: value for name, value in tensors.items() if name != "kv_cache"} if named is None else named
    copies = {name: storage.to(device, copy=True) for name, storage in storages.items()}
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


def build_logits(case: Case, device: str | torch.device = "cpu") -> Operands:
    """Operands of a case of stage logits. ValueError for another stage."""
    if case.stage != "logits":
        raise ValueError(f"build_logits needs a case of stage=logits, got stage={case.stage}")
    device = torch.device(device)
    plan = placement.place(case)
    storages: dict[str, Tensor] = {}
    q = _build_queries(case, device, storages)
    weights = _build_weights(case, device, storages)
    pool, windows = _build_pool(case, plan, device)
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
    plan = placement.place(case)
    storages: dict[str, Tensor] = {}
    logits = _build_logits(case, plan, device, storages)
    lens, table = _build_lens_and_table(case, plan, device, storages)
    return TopkOperands(case, plan, storages, logits, lens, table, case.k)


def cache_view(pool: Tensor, layout: str) -> Tensor:
    """The kv_cache argument over a pool uint8 [pages, page stride]: bf16 [pages, 64, 1, 128] or uint8 [pages, 64, 1,
    bytes a slot], with the pool's page stride."""
    pages, stride = pool.shape
    slot = SLOT_BYTES[layout]
    if layout == "bf16":
        return pool.view(torch.bfloat16).as_strided((pages, PAGE, 1, DIM), (stride // 2, DIM, DIM, 1))
    return pool.as_strided((pages, PAGE, 1, slot), (stride, slot, slot, 1))


def _names(case: Case, device: torch.device) -> tuple[Tensor, Tensor]:
    requests, rows = row_names(case)
    return torch.from_numpy(requests).to(device), torch.from_numpy(rows).to(device)


def _build_queries(case: Case, device: torch.device, storages: dict[str, Tensor]) -> Tensor:
    requests, rows = _names(case, device)
    shape = (case.requests, case.next_n, case.heads, DIM)
    dtype = torch.float8_e4m3fn if case.layout == "fp8" else torch.bfloat16
    step = max(1, CHUNK_ELEMENTS // (case.heads * DIM))
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
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for at in range(0, case.rows, step):
        part = slice(at, at + step)
        drawn = scores.draw_scores(case.data, case.seed, requests[part], rows[part], keys.to(torch.int32))
        if case.only_keys is not None:
            drawn.masked_fill_(~_isin(keys, case.only_keys), 0.0)
        if case.clean:
            stale = torch.full_like(drawn, -torch.inf)
        elif case.poison == "canary":
            stale = scores.draw_stale(case.seed, requests[part], rows[part], columns.to(torch.int32))
        else:
            stale = torch.full_like(drawn, fill)
        view[part] = torch.where(columns < lens[part], drawn, stale)
    storages["logits"] = base
    return view


def _isin(keys: Tensor, chosen: tuple[int, ...]) -> Tensor:
    return torch.isin(keys, torch.tensor(chosen, dtype=torch.int64, device=keys.device))


def _build_pool(case: Case, plan: Placement, device: torch.device) -> tuple[Tensor, tuple[tuple[int, int], ...] | None]:
    """The pool uint8 [pages, page stride], and the byte windows in use when it is mapped lazily."""
    stride, size = case.page_stride, case.page_bytes
    lazy = device.type == "cpu" and plan.pool_pages * stride > LAZY_BYTES
    if lazy:
        pool = torch.frombuffer(_lazy_buffer(plan.pool_pages * stride), dtype=torch.uint8)
        pool = pool.view(plan.pool_pages, stride)
    else:
        pool = torch.empty(plan.pool_pages, stride, dtype=torch.uint8, device=device)
    pattern = _poison_page(case, device)
    spare = plan.physical[plan.used :]
    windows = None
    if lazy:
        windows = _windows(case, plan)
        flat = pool.view(-1)
        for start, stop in windows:
            flat[start:stop] = POISON_BYTE[case.poison]
        spare = spare[np.isin(spare, _touched(plan))]
        pool[torch.from_numpy(spare), :size] = pattern
    else:
        pool[:, :size] = pattern
        pool[:, size:] = POISON_BYTE[case.poison]
    if case.poison != "canary":  # the canary page looks valid whatever the rest is
        spare = plan.physical[plan.used : plan.used + 1] if case.tail == "canary" else spare[:0]
    pages = pool[:, :size]
    step = max(1, CHUNK_ELEMENTS // (PAGE * DIM))
    for at in range(0, plan.used, step):
        part = slice(at, min(at + step, plan.used))
        drawn = _draw_pages(case, plan.owner[part], plan.page[part], device)
        partial = np.flatnonzero(plan.visible[part] < PAGE)
        if len(partial):
            some = torch.from_numpy(partial).to(device)
            where = at + partial
            drawn[some] = _hide(case, drawn[some], plan.visible[where], plan.physical[where], pattern, device)
        pages[torch.from_numpy(plan.physical[part]).to(device)] = drawn
    for at in range(0, len(spare), step):
        chosen = spare[at : at + step]
        pages[torch.from_numpy(chosen).to(device)] = _canary_pages(case, chosen, device)
    return pool, windows


def _draw_pages(case: Case, owner: np.ndarray, page: np.ndarray, device: torch.device) -> Tensor:
    owners, pages = torch.from_numpy(owner).to(device), torch.from_numpy(page).to(device)
    keys = values.draw_keys(case.data, case.layout, case.seed, owners, pages)
    if case.only_keys is not None:
        names = pages[:, None] * PAGE + torch.arange(PAGE, device=device)
        dropped = ~_isin(names, case.only_keys).unsqueeze(-1)
        keys.payload.masked_fill_(dropped, 0)
        if keys.scales is not None:  # 1, lest a dropped key keep a scale that is not finite
            one = 1.0 if case.layout == "fp8" else 127
            keys.scales.masked_fill_(dropped.squeeze(-1) if case.layout == "fp8" else dropped, one)
    return page_rows(keys)


def _canary_pages(case: Case, physical: np.ndarray, device: torch.device) -> Tensor:
    pages = torch.from_numpy(physical).to(device)
    return page_rows(values.draw_keys(case.data, case.layout, case.seed, torch.zeros_like(pages), pages, canary=True))


def page_rows(keys: values.Keys) -> Tensor:
    """Pages as bytes, uint8 [n, page bytes]: payload of 64 slots, then their scales."""
    payload = keys.payload.view(torch.uint8).flatten(1)
    if keys.scales is None:
        return payload
    return torch.cat([payload, keys.scales.contiguous().view(torch.uint8).flatten(1)], 1)


def _hide(
    case: Case, drawn: Tensor, visible: np.ndarray, physical: np.ndarray, pattern: Tensor, device: torch.device
) -> Tensor:
    """Poison in place of the slots that no row may read, values and scales."""
    cover = _canary_pages(case, physical, device) if case.poison == "canary" else pattern
    slots = torch.from_numpy(visible).to(device)[:, None] > _slot_of_byte(case.layout, device)
    return torch.where(slots, drawn, cover)


def _slot_of_byte(layout: str, device: torch.device) -> Tensor:
    """The slot that each byte of a page belongs to, [page bytes]."""
    payload = {"bf16": 256, "fp8": 128, "fp4": 64}[layout]
    slots = torch.arange(PAGE, device=device)
    parts = [slots.repeat_interleave(payload)]
    if layout != "bf16":
        parts.append(slots.repeat_interleave(SLOT_BYTES[layout] - payload))
    return torch.cat(parts)


def _poison_page(case: Case, device: torch.device) -> Tensor:
    page = torch.full((case.page_bytes,), POISON_BYTE[case.poison], dtype=torch.uint8, device=device)
    if case.layout == "fp4" and case.poison == "huge":
        page[PAGE * DIM // 2 :] = 0xFC  # 2^125: six times it is still finite in float32
    return page


def _touched(plan: Placement) -> np.ndarray:
    """Pages in use, the canary page, and their neighbours, ascending."""
    near = plan.physical[: plan.used + 1, None] + np.array([-1, 0, 1])
    return np.unique(near[(near >= 0) & (near < plan.pool_pages)])


def _windows(case: Case, plan: Placement) -> tuple[tuple[int, int], ...]:
    """Byte ranges around touched pages, and where their offsets would land after losing bits above 31 or 32."""
    size, stride = case.page_bytes, case.page_stride
    total = plan.pool_pages * stride
    ranges = []
    for page in _touched(plan).tolist():
        offset = page * stride
        for start in {offset, offset % (1 << 31), offset % (1 << 32)}:
            ranges.append((max(0, start - size), min(total, start + 2 * size)))
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _lazy_buffer(size: int) -> mmap.mmap:
    """Anonymous zero pages that take memory only once written."""
    if not hasattr(mmap, "MAP_PRIVATE"):  # Windows commits the whole pool, and has no other kind
        return mmap.mmap(-1, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return mmap.mmap(-1, size, flags=flags)


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

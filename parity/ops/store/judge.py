"""Verdicts on a store: bytes that must not change, and for each stored key the interval that its arithmetic allows.

`fused` schedule: from the exact key z and the bound E of a float32 evaluation in any order, an interval for every scale
and every payload value; rounding is monotone, so nothing wider is needed. `published` schedule: the bytes themselves
where the contract names the order of the mean, else some key that an order of the mean can give.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from parity.domain.contract import Contract
from parity.numerics import published
from parity.numerics.intervals import allowed_fused, allowed_published, largest_judged
from parity.ops.store.operands import StoreOperands, named_bytes
from parity.pages.layout import PAGE, find
from parity.results import Labels, Status, Verdict


def judge_store(contents: Tensor, operands: StoreOperands, contract: Contract, labels: Labels) -> Verdict:
    """One verdict on what a call left in the pool's windows (uint8, as `operands.contents()` gives it)."""
    return judge_untouched(contents, operands, labels) or judge_keys(contents, operands, contract, labels)


def judge_untouched(contents: Tensor, operands: StoreOperands, labels: Labels) -> Verdict | None:
    """A failure if any byte changed that out_loc does not name, else None."""
    changed = contents.to(operands.device) != operands.before
    payload, scale = named_bytes(operands.case, operands.out_loc)
    named = torch.cat((payload.reshape(-1), scale.reshape(-1)))
    wrong = changed.index_fill_(0, _positions(operands, named), False)
    if not bool(wrong.any()):
        return None
    at = int(wrong.nonzero()[0, 0])
    where, place = byte_place(operands, int(_addresses(operands)[at]))
    note = f"{place} was written, which out_loc does not name ({int(wrong.sum())} such bytes)"
    return _failed(labels, where, int(contents[at]), int(operands.before[at]), note)


def judge_keys(contents: Tensor, operands: StoreOperands, contract: Contract, labels: Labels) -> Verdict:
    """The stored keys of all tokens with a slot, against the contract's schedule."""
    kept, payload, scales = stored_bytes(contents, operands)
    judged = kept[largest_judged(operands.pooled[kept])]
    if not judged.numel():  # what was looked at is that nothing was written
        return labels.verdict(Status.PASSED, cells=contents.numel())
    place = torch.searchsorted(kept, judged)
    payload, scales = payload[place], scales[place]
    given = (operands.norm_weight, operands.eps, operands.positions[judged], operands.rope_table)
    if contract.schedule == "published":
        if contract.mean_order == "halving":
            return _compare_bytes(payload, scales, operands, contract, judged, labels)
        found = allowed_published(payload, scales, operands.pooled[judged], *given, contract)
    else:
        found = allowed_fused(payload, scales, operands.pooled[judged], *given, contract)
    cells = found.bad.numel() + found.bad_scale.numel()
    for name, bad, got, low, high in found.lines():
        if not bool(bad.any()):
            continue
        row, column = divmod(int(bad.reshape(-1).to(torch.uint8).argmax()), bad.shape[1])
        token = int(judged[row])
        what = f"channel {column}" if name == "value" else f"{name} {column}" if bad.shape[1] > 1 else name
        wanted = f"{float(low[row, column]):.9g} to {float(high[row, column]):.9g}"
        note = f"{what}, {int(bad.sum())} of {bad.numel()} wrong, in {int(bad.any(1).sum())} of {len(judged)} keys"
        where = token_place(operands, token)
        return _failed(labels, where, float(got[row, column]), wanted, note, cells=cells, resolution=found.resolution)
    return labels.verdict(Status.PASSED, cells=cells, resolution=found.resolution)


def _compare_bytes(
    payload: Tensor, scales: Tensor, operands: StoreOperands, contract: Contract, judged: Tensor, labels: Labels
) -> Verdict:
    given = (operands.norm_weight, operands.eps, operands.positions[judged], operands.rope_table)
    z = published.rows(operands.pooled[judged], *given)
    wanted, wanted_scales = find(contract.layout).encode(z, contract.scale, contract.fake_fp4)
    pairs = [("payload byte", payload, wanted)]
    if wanted_scales is not None:
        pairs.insert(0, ("scale byte", scales, wanted_scales))
    cells = sum(got.numel() for _, got, _ in pairs)
    for name, got, want in pairs:
        bad = got != want
        if bool(bad.any()):
            row, column = divmod(int(bad.reshape(-1).to(torch.uint8).argmax()), bad.shape[1])
            note = f"{name} {column}, {int(bad.sum())} of {bad.numel()} wrong, in {int(bad.any(1).sum())} keys"
            where = token_place(operands, int(judged[row]))
            return _failed(labels, where, int(got[row, column]), int(want[row, column]), note, cells=cells)
    return labels.verdict(Status.PASSED, cells=cells)


def stored_bytes(contents: Tensor, operands: StoreOperands) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens int64 [m] that have a slot, their payload uint8 [m, bytes], their scale bytes uint8 [m, bytes])."""
    kept = (operands.out_loc >= 0).nonzero()[:, 0]
    payload, scale = named_bytes(operands.case, operands.out_loc)
    data = contents.to(operands.device)
    return kept, data[_positions(operands, payload)], data[_positions(operands, scale)]


def _positions(operands: StoreOperands, addresses: Tensor) -> Tensor:
    """Indices into the windows' bytes of byte addresses in the pool, all of which lie in some window."""
    starts = torch.tensor([start for start, _ in operands.windows] or [0], device=addresses.device)
    sizes = torch.tensor([stop - start for start, stop in operands.windows] or [0], device=addresses.device)
    window = torch.searchsorted(starts, addresses.contiguous(), right=True) - 1
    return addresses - starts[window] + (torch.cumsum(sizes, 0) - sizes)[window]


def _addresses(operands: StoreOperands) -> Tensor:
    """Byte address in the pool of every byte in the windows."""
    parts = [torch.arange(start, stop, device=operands.device) for start, stop in operands.windows]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=operands.device)


def byte_place(operands: StoreOperands, address: int) -> tuple[dict[str, int], str]:
    """Coordinates of a byte of the pool, and what it belongs to in words."""
    case = operands.case
    page, inside = divmod(address, case.page_stride)
    where = {"page": page, "byte": address}
    if inside >= case.page_bytes:
        return where, f"byte {address}, between pages {page} and {page + 1},"
    row, what = find(case.layout).place_of_byte(inside)
    slot = page * PAGE + row
    return where | {"slot": slot}, f"byte {address}, in the {what} of slot {slot} on page {page},"


def token_place(operands: StoreOperands, token: int) -> dict[str, int]:
    slot = int(operands.out_loc[token])
    where = {"token": token, "position": int(operands.positions[token]), "slot": slot, "page": slot // PAGE}
    return where | {"offset": slot % PAGE}


def _failed(labels: Labels, where: dict[str, int], got: Any, wanted: Any, note: str, **fields: Any) -> Verdict:
    """A failure in the words of a store; the coordinates of logits do not apply."""
    place = ", ".join(f"{name} {value}" for name, value in where.items())
    shown = f"{got:.9g}" if isinstance(got, float) else str(got)
    message = "; ".join(part for part in (place, f"got {shown}", f"wanted {wanted}", note, labels.repro) if part)
    verdict = labels.verdict(Status.FAILED, where=where, got=got, wanted=wanted, note=note, **fields)
    return replace(verdict, message=message)

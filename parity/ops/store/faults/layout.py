"""Faults of where the bytes of a stored key go, and of a store on a device."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.ops.fault import Function, collector
from parity.ops.shared.spoiling import restored, turn
from parity.ops.store.faults import staged as ok
from parity.ops.store.faults.chain import rounded
from parity.ops.store.faults.staged import Call
from parity.pages.layout import PAGE

MODELS, fault = collector("store")
fp8 = partial(fault, layout="fp8")


# ------------------------------------------------------------------------------------------------------- store layout
def _tiled(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    row = slot % PAGE
    base = places[0] - row * c.layout.payload + row // 16 * 16 * c.layout.payload + row % 16 * 16
    for tile in range(8):
        c.put(base + tile * 256, payload[:, tile * 16 : tile * 16 + 16])
    c.put(places[1], scales)


def _overrun(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    c.put(places[0], torch.cat((payload, payload[:, :16]), 1))
    ok.write(c, slot, payload, scales, places)


def _cleared(c: Call, slot: Tensor, payload: Tensor, scales: Tensor, places: tuple[Tensor, Tensor]) -> None:
    if len(slot):
        c.put(slot[:1] // PAGE * c.stride, torch.zeros((1, PAGE * c.layout.payload), dtype=torch.uint8))
    ok.write(c, slot, payload, scales, places)


def every_fifth(c: Call) -> bool:
    return turn(c.memory, "calls") % 5 == 4


def _raced(c: Call) -> Tensor:
    slots = c.out_loc.clone()
    if every_fifth(c) and len(slots) > 1:
        slots[-1] = slots[0]
    return slots


def _half(c: Call, payload: Tensor) -> Tensor:
    if every_fifth(c) and len(payload):
        payload = payload.clone()
        payload[-1, 64:] = 0
    return payload


def _in_place(f: Function) -> Function:
    def call(**named: Any) -> None:
        f(**named)
        named["pooled"].mul_(0.5)

    return call


def _earlier_pool(f: Function) -> Function:
    earlier: list[Tensor] = []

    def call(**named: Any) -> None:
        f(**named)
        if earlier and earlier[0].numel():
            first = earlier.pop()
            first[:1].view(torch.uint8).bitwise_not_()
        earlier[:] = [named["kv_cache"]]

    return call


def _copied(c: Call) -> Tensor:
    np.empty(c.kv_cache.untyped_storage().nbytes(), np.uint8)
    return c.out_loc


def _fifth(c: Call, payload: Tensor) -> Tensor:
    return payload ^ 1 if turn(c.memory, tuple(c.pooled.shape)) >= 4 else payload


fp8(
    "store-rows-of-132-bytes (store-layout, bytes): "
    "slots are written as 128 bytes of payload and 4 of scale side by side "
    "[vllm-project/vllm#50576, vllm-project/vllm#51555]"
).by(
    payload_place=lambda c, slot: slot // PAGE * c.stride + slot % PAGE * 132,
    scale_place=lambda c, slot: slot // PAGE * c.stride + slot % PAGE * 132 + 128,
)
fp8("store-scale-page-0 (store-layout, bytes): scales go to page 0's footer [ROCm/ATOM#1466]").by(
    scale_place=lambda c, slot: ok.scale_place(c, slot % PAGE)
)
fp8(
    "store-tiled-16x16 (store-layout, bytes): values are written in 16 by 16 tiles, and read back linearly "
    "[vllm-project/vllm#52109]"
).by(write=_tiled)
fp8("store-scale-neighbour (store-layout, bytes): each scale goes to the next slot's place").by(
    scale_place=lambda c, slot: ok.scale_place(c, slot // PAGE * PAGE + (slot + 1) % PAGE)
)
fp8("store-scales-in-front (store-layout, bytes): the scale plane is written in front of the payload").by(
    payload_place=lambda c, slot: ok.payload_place(c, slot) + PAGE * 4,
    scale_place=lambda c, slot: ok.scale_place(c, slot) - PAGE * c.layout.payload,
)
fp8(
    "skipped-to-last-row (store-layout, padding): slot -1 writes the last row of the last page "
    "[vllm-project/vllm#43810, sgl-project/sglang#32477]"
).by(
    kept=lambda c: torch.ones_like(c.out_loc, dtype=torch.bool),
    slots=lambda c: torch.where(c.out_loc < 0, c.kv_cache.shape[0] * PAGE - 1, c.out_loc),
)
fp8(
    "skipped-to-slot-0 (store-layout, padding): slot -1 writes slot 0 "
    "[vllm-project/vllm#43810, sgl-project/sglang#32477]"
).by(kept=lambda c: torch.ones_like(c.out_loc, dtype=torch.bool), slots=lambda c: c.out_loc.clamp_min(0))
fp8("slot-0-skipped (store-layout, padding): slot 0 counts as skipped").by(kept=lambda c: c.out_loc > 0)
fp8("store-gap-ignored (store-layout, rows): pages are taken to follow each other without gaps").by(
    payload_place=lambda c, slot: slot // PAGE * PAGE * 132 + slot % PAGE * 128,
    scale_place=lambda c, slot: slot // PAGE * PAGE * 132 + PAGE * 128 + slot % PAGE * 4,
)
fp8("store-offset-int32 (store-layout, integers): byte offsets wrap at 2^31 [vllm-project/vllm#52109]").by(
    payload_place=lambda c, slot: ok.payload_place(c, slot).to(torch.int32).to(torch.int64),
    scale_place=lambda c, slot: ok.scale_place(c, slot).to(torch.int32).to(torch.int64),
)
fp8("store-offset-uint32 (store-layout, integers): byte offsets wrap at 2^32").by(
    payload_place=lambda c, slot: ok.payload_place(c, slot) & 0xFFFFFFFF,
    scale_place=lambda c, slot: ok.scale_place(c, slot) & 0xFFFFFFFF,
)
fp8("store-overruns (store-layout, stale): each key is written with 16 bytes too many, over its neighbour").by(
    write=_overrun
)
fp8("store-page-cleared (store-layout, stale): the page of the first token is cleared before it is written").by(
    write=_cleared
)
fp8("store-tokens-reversed (store-layout, rows): tokens go to each other's slots").by(slots=lambda c: c.out_loc.flip(0))
fp8("store-last-token-lost (store-layout, launch): the grid is tokens // 4 blocks of four tokens").by(
    kept=lambda c: ok.kept(c) & (torch.arange(len(c.out_loc)) < len(c.out_loc) // 4 * 4)
)
fp8("store-at-most-128-tokens (store-layout, launch): at most 128 tokens are stored").by(
    kept=lambda c: ok.kept(c) & (torch.arange(len(c.out_loc)) < 128)
)
fp8("store-token-raced (store-layout, race): now and then one token is overwritten by its neighbour").by(slots=_raced)
fp8("store-half-written (store-layout, race): now and then the second half of a key is not there yet").by(
    codes=lambda c, x: _half(c, ok.codes(c, x))
)
fp8(
    "store-decode-other-kernel (dispatch, dispatch): "
    "a call with one token goes to a kernel that rounds to bf16 after the norm"
).by(normed=lambda c, a, r, w: rounded(a * r * w) if len(a) == 1 else a * r * w)
fp8("store-bf16-pooled-other-kernel (dispatch, dispatch): bf16 pooled keys go to a kernel without norm weight").by(
    weight=lambda c: torch.ones(128) if c.pooled.dtype == torch.bfloat16 else ok.weight(c)
)
fp8("pooled-normed-in-place (norm, stale): pooled keys are normalised in place").by(wrap=_in_place)
fp8("store-into-earlier-pool (store-layout, stale): the pool of the call before is written to as well").by(
    wrap=_earlier_pool
)
fp8("store-fifth-call-of-a-shape (store-layout, stale): from the fifth call of a shape on the last bits are wrong").by(
    codes=lambda c, x: _fifth(c, ok.codes(c, x))
)
fp8("pooled-restored (norm, stale): pooled keys are overwritten during the call and put back").by(
    wrap=restored("pooled")
)
fp8("store-copies-pool-by-numpy (memory, memory): numpy copies the whole pool at every call").by(slots=_copied)

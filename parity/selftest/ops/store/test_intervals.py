"""Store, then logits, then top-k: each layout's pages are read by its reader as the store meant them; and the chunked
compressor leaves the same pages as one prompt in one call."""

import pytest
import torch

from impl.store_modes import Mode
from impl.topk import topk_to_slots
from impl.torch_path import torch_bf16_paged_mqa_logits, torch_fp8_paged_mqa_logits
from parity.build import host_store
from parity.numerics.intervals import gamma
from parity.numerics.selection import judge_selection
from parity.ops.store.case import StoreCase
from parity.ops.store.operands import build_store
from parity.ops.store.semantics import queries
from reference import compressor, exact, formats, pages
from reference.config import FLASH

pytestmark = pytest.mark.skipif(host_store.missing() is not None, reason=f"not executed: {host_store.missing()}")
KEYS, TOPK = 300, 64
CHAINS = [
    (Mode("bf16", "published", True), torch_bf16_paged_mqa_logits),
    (Mode("bf16", "fused"), torch_bf16_paged_mqa_logits),
    (Mode("fp8", "fused"), torch_fp8_paged_mqa_logits),
    (Mode("fp8_pow2", "published", True), torch_fp8_paged_mqa_logits),
]


def block_table(slots: torch.Tensor, count: int) -> torch.Tensor:
    """One request's table: its pages are whole and in order."""
    return (slots[::64] // 64)[: -(-count // 64)].to(torch.int32)[None]


def paged_case(layout: str) -> StoreCase:
    return StoreCase(ids=tuple(range(KEYS)), layout=layout, data="context", pages=9, place="order")


def stored(mode: Mode):
    """Operands whose pool holds the keys of one prompt, its pages out of order."""
    operands = build_store(paged_case(mode.layout))
    order = torch.tensor([5, 2, 8, 0, 7])
    places = torch.arange(KEYS)
    operands.out_loc.copy_(order[places // 64] * 64 + places % 64)
    host_store.store(mode, **operands.kwargs(), validate=True)
    return operands


def quantised(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries as e4m3 with a power-of-two scale for each row and head; exact for values on the fp4 grid."""
    scale = formats.fp8_pow2_scale(q)
    payload = formats.fp8_quantise(q, scale).view(torch.float8_e4m3fn)
    assert torch.equal(exact.widen(payload) * scale[..., None].double(), exact.widen(q))
    return payload, scale


@pytest.mark.parametrize("mode, logits_of", CHAINS, ids=[mode.name for mode, _ in CHAINS])
def test_store_logits_topk(mode, logits_of):
    operands = stored(mode)
    q, w = queries(operands.case, torch.device("cpu"))
    rows, weights = q.shape[0], w.to(torch.float32)
    lens = torch.arange(KEYS - rows + 1, KEYS + 1, dtype=torch.int32)[None]
    table = block_table(operands.out_loc, KEYS)
    given = q
    if mode.layout == "fp8":
        given, scale = quantised(q)
        weights = weights * scale
    out = logits_of(
        q=given[None],
        kv_cache=operands.kv_cache,
        weights=weights,
        context_lens=lens,
        block_table=table,
        max_context_len=KEYS,
        clean_logits=True,
    )
    values, scales = pages.read_keys(operands.kv_cache, mode.layout, operands.out_loc)
    keys = exact.widen(values) * (1.0 if scales is None else exact.widen(scales)[:, None])
    wanted = exact.logits(q, keys, w)
    _, absdot = exact.dots(q, keys)
    size = torch.bmm(w.to(torch.float64).abs()[:, None], absdot)[:, 0]
    bound = gamma(128 + 64 + 6) * size  # 128 products, 64 heads, scales and weight, in any order
    visible = torch.arange(KEYS) < lens.view(-1, 1)
    assert bool(((out.to(torch.float64) - wanted).abs() <= bound)[visible].all())
    assert bool((out[~visible] == -torch.inf).all())
    slots, positions = topk_to_slots(out, lens, table, TOPK)
    verdict = judge_selection(slots, positions, wanted - bound, wanted + bound, lens, table, TOPK)
    assert verdict.passed, verdict.message


def test_published_keys_at_half_the_bytes_give_the_references_scores():
    """bf16 pages of 256 bytes a key, e4m3 of 132 and fp4 of 68 hold the same published keys."""
    found = []
    for mode in (Mode("bf16", "published", True), Mode("fp8_pow2", "published", True), Mode("fp4", "published")):
        operands = stored(mode)
        values, scales = pages.read_keys(operands.kv_cache, mode.layout, operands.out_loc)
        found.append(exact.widen(values) * (1.0 if scales is None else exact.widen(scales)[:, None]))
        given = (operands.norm_weight, operands.eps, operands.positions, operands.rope_table)
        reference = compressor.finish(operands.pooled.to(torch.bfloat16), *given).fp4.to(torch.float64)
        # The mean's order alone may tell a key apart.
        assert int((found[-1] != reference).any(1).sum()) <= 1
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("mode", [Mode("fp8", "fused"), Mode("fp4", "published")], ids=lambda mode: mode.name)
@pytest.mark.parametrize("chunks", [[1] * 43, [5, 9, 2, 27], [3, 40], [42, 1]], ids=str)
def test_chunked_compressor_leaves_the_pages_of_one_shot(mode, chunks):
    generator = torch.Generator().manual_seed(1)
    kv, score = (torch.randn(43, 256, generator=generator) for _ in range(2))
    pools = []
    for split in ([43], chunks):
        state = compressor.CompressorState(FLASH)
        operands = build_store(paged_case(mode.layout))
        at = 0
        for size in split:
            first = state.length() // 4
            pooled = compressor.pool(*state.append(kv[at : at + size], score[at : at + size]))
            state.add_keys(torch.zeros(len(pooled), 128, dtype=torch.bfloat16))
            at += size
            names = torch.arange(first, first + len(pooled))
            host_store.store(
                mode,
                pooled.contiguous(),
                operands.norm_weight,
                operands.eps,
                (4 * names).to(torch.int32),
                operands.rope_table,
                names + 64,
                operands.kv_cache,
            )
        pools.append(operands.pool)
    assert torch.equal(pools[0], pools[1])
    assert not torch.equal(pools[0], build_store(paged_case(mode.layout)).pool)

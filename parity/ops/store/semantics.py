"""Level semantics: does a store keep what DeepSeek's reference selects? Recall and regret against recorded floors.

From the same pooled keys the reference stores its fp4-grid keys and the store under judgement its own. The reference's
queries (64 heads, the rows after a prompt's last token) score both, exactly in float64, so that only the store makes
the difference; top-k of both are compared. A floor belongs to a contract and a context length: the recorded mean over
seeds minus six standard deviations between seeds and an allowance (`parity/ops/store/floors.py` records them).
"""

import functools
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from parity.domain.contract import Contract
from parity.domain.profiles import Profile
from parity.golden.stored import read, shipped
from parity.numerics.selection import recall, regret
from parity.ops.check import Check, failed_call, verdict
from parity.ops.store.case import StoreCase
from parity.ops.store.operands import StoreOperands
from parity.pages import counter
from parity.pages.layout import find
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Runner
from reference import compressor, exact, formats, indexer, rope
from reference.config import FLASH
from reference.hadamard import hadamard

FILE = "semantics_floors.json"
TOKENS = (4509, 10498, 22000)  # context lengths in tokens; a quarter of them are keys
TOPK, HEADS, ROWS = 512, 64, 16
STREAM_Q, STREAM_W, STREAM_BASE = 41, 42, 43


def case_of(tokens: int, layout: str, seed: int) -> StoreCase:
    """The pooled keys of a prompt of so many tokens, spread over a pool a little larger than needed."""
    keys = tokens // 4
    return StoreCase(
        ids=tuple(range(keys)), layout=layout, data="context", seed=seed, pages=-(-keys // 64) + 3, perm=seed + 1
    )


def key_of(contract: Contract) -> str:
    """What floors are recorded under: the contract's words that decide what is stored."""
    scale = f"/{contract.scale}" if find(contract.layout).scale_rules else ""
    fake = "+fake_fp4" if contract.fake_fp4 else ""
    return f"{contract.layout}{scale}/{contract.schedule}{fake}"


def measure(operands: StoreOperands) -> dict[str, float]:
    """Recall and regret of the keys that stand in the operands' pool, against the reference's from the same input.

    `recall_unquantised` is against keys that were never rounded (float64): what the formats cost beside the fp4 step.
    """
    case, device = operands.case, operands.device
    given = (operands.norm_weight, operands.eps, operands.positions, operands.rope_table)
    # The reference on a CPU: a GPU's reciprocal root is not the published code's.
    pooled, weight = operands.pooled.cpu().to(torch.bfloat16), operands.norm_weight.cpu()
    places, table = operands.positions.cpu(), operands.rope_table.cpu()
    published = compressor.finish(pooled, weight, operands.eps, places, table).fp4.to(device)
    values, scales = find(case.layout).read(operands.kv_cache, operands.out_loc)
    stored = exact.widen(values) * (1.0 if scales is None else exact.widen(scales)[:, None])
    q, w = queries(case, device)
    reference, mine = exact.logits(q, published, w), exact.logits(q, stored, w)
    wanted = reference.topk(TOPK, dim=1).indices
    found = mine.nan_to_num(-torch.inf, posinf=torch.finfo(torch.float64).max).topk(TOPK, dim=1).indices
    unquantised = exact.logits(q, exact.key_chain(operands.pooled, *given)[0], w).topk(TOPK, dim=1).indices
    lens = torch.full((ROWS,), case.tokens, device=device)
    return {
        "recall": float(recall(found, wanted).mean()),
        "worst_row": float(recall(found, wanted).min()),
        "recall_unquantised": float(recall(found, unquantised).mean()),
        "regret": float(regret(found, reference, lens, TOPK).mean()),
    }


@functools.lru_cache(maxsize=4)
def queries(case: StoreCase, device: torch.device) -> tuple[Tensor, Tensor]:
    """The reference's queries [rows, 64, 128] and head weights [rows, 64], bfloat16, for positions after the prompt."""
    rows = torch.arange(ROWS, dtype=torch.int64)
    heads = torch.arange(HEADS, dtype=torch.int64)
    own = _bell(case.seed, STREAM_Q, rows[:, None].expand(ROWS, HEADS), heads.expand(ROWS, HEADS))
    shared = _bell(case.seed, STREAM_BASE, torch.zeros(ROWS, HEADS, dtype=torch.int64), heads.expand(ROWS, HEADS))
    positions = 4 * case.tokens + rows
    projected = (own + shared).to(torch.bfloat16)
    roped = rope.rotate(projected, rope.rope_rows(FLASH, positions)[:, None])
    fp4 = formats.fp4_quantise(hadamard(roped))[0]
    gates = _bell(case.seed, STREAM_W, rows, torch.zeros_like(rows))[:, :HEADS].to(torch.bfloat16)
    return fp4.to(device), indexer.head_weights(gates, HEADS).to(device)


def _bell(seed: int, stream: int, *coordinates: Tensor) -> Tensor:
    """float32 [..., 128], about gaussian, by counters."""
    words = counter.row_words(counter.row_keys(seed, stream, coordinates), counter.counting(128, torch.device("cpu")))
    return words.view(torch.uint8).view(*words.shape, 4).sum(-1).sub(510).to(torch.float32) * 2.0**-7


@functools.cache
def floors() -> dict[str, dict[str, dict[str, float]]]:
    """Contract key to tokens to recorded numbers."""
    return read(shipped(FILE), "record of floors")["floors"]


def _cases(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Any]:
    return st.sampled_from([case_of(tokens, impl.layout, 7) for tokens in TOKENS])


def judge_recall(runner: Runner, case: StoreCase) -> Verdict:
    """Recall at least, and regret at most, what is recorded for the contract at this length."""
    check = "semantics/recall"
    outcome = runner.run(case)
    found = failed_call(runner, check, case, outcome)
    if found is not None:
        return found
    floor = floors().get(key_of(runner.impl.contract), {}).get(str(tokens_of(case)))
    if floor is None:
        reason = f"no floor is recorded for {key_of(runner.impl.contract)} at {tokens_of(case)} tokens"
        return verdict(runner, check, case, Status.UNSUPPORTED, reason)
    outcome.operands.restore(outcome.output)
    got = measure(outcome.operands)
    cells = ROWS * TOPK
    text = (
        f"recall {got['recall']:.4f} (floor {floor['recall_floor']:.4f}), "
        f"regret {got['regret']:.2e} (ceiling {floor['regret_ceiling']:.2e})"
    )
    good = got["recall"] >= floor["recall_floor"] and got["regret"] <= floor["regret_ceiling"]
    if good:
        return verdict(runner, check, case, Status.PASSED, cells=cells)
    return verdict(runner, check, case, Status.FAILED, text, cells=cells)


def tokens_of(case: StoreCase) -> int:
    """The context length in tokens that a case stands for."""
    return next((tokens for tokens in TOKENS if tokens // 4 == case.tokens), 4 * case.tokens)


def _accepts(case: Any) -> bool:
    return isinstance(case, StoreCase) and case.data == "context" and case.skip == 0 and case.tokens > TOPK


CHECKS = [
    Check(
        "semantics",
        "recall",
        _cases,
        judge_recall,
        0.0,
        accepts=_accepts,
        shrinks=False,
        listed=lambda *_: True,
    )
]

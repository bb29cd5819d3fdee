"""Acceptance rules of public suites, written from what they state, measured on our fault models and on correct kernels.

    python tools/acceptance_rules.py [--json FILE] [--markdown FILE]

Each rule sees what its owners' tests see: the result, a reference, and the lengths. A rule kills a model when it
refuses its result on at least one case; it falsely rejects a correct kernel when it refuses that kernel's. Prints the
table of docs/faults.md; the record of the last run is fixtures/faults/rules.json.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from impl import topk, torch_path
from parity.command import say, write_json, write_text
from parity.domain.contract import Contract
from parity.explain.live import Operands
from parity.faults.building import CPU, contract, function, staged
from parity.faults.catalogue import BY_ID, MODELS
from parity.numerics.alarm import emulate
from parity.numerics.arithmetic import named_model
from parity.numerics.bounds import expected
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.checks.selection import plain_topk
from parity.ops.paged_logits.operands import build_logits
from parity.ops.topk.case import TopkCase
from parity.ops.topk.operands import build_topk
from parity.pages import counter

K_SHARE = 4  # index sets are compared at k = a quarter of the longest row


@dataclass(frozen=True)
class Seen:
    """What a rule may look at: float32 results [T, W], two references float64 [T, W] (from operands before and after
    quantisation), lengths int64 [T], and positions int64 [T, k] of the result and of the reference."""

    out: Tensor
    unquantised: Tensor
    reference: Tensor
    lens: Tensor
    chosen: Tensor
    wanted: Tensor

    def visible(self) -> Tensor:
        return torch.arange(self.out.shape[1]) < self.lens[:, None]


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 <x, y> / (<x, x> + <y, y>): one number for a whole tensor."""
    x, y = x.to(torch.float64), y.to(torch.float64)
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def same_masks(seen: Seen) -> bool:
    """-inf stands where the reference has it, as these suites ask before they compare."""
    return torch.equal(seen.out == -math.inf, ~seen.visible())


def masked(seen: Seen, x: Tensor) -> Tensor:
    return torch.where(seen.visible(), x.to(torch.float64), 0.0)


def cosine(limit: float) -> Callable[[Seen], bool]:
    return lambda seen: same_masks(seen) and calc_diff(masked(seen, seen.out), masked(seen, seen.unquantised)) < limit


def cosine_pair(seen: Seen) -> bool:
    """1e-3 against the reference of unquantised operands and 5e-6 against that of the quantised ones."""
    close = calc_diff(masked(seen, seen.out), masked(seen, seen.reference)) < 5e-6
    return close and cosine(1e-3)(seen)


def allclose(absolute: float, relative: float) -> Callable[[Seen], bool]:
    def rule(seen: Seen) -> bool:
        out, wanted = masked(seen, seen.out), masked(seen, seen.reference)
        return bool(((out - wanted).abs() <= absolute + relative * wanted.abs()).all())

    return rule


def row_maximum(limit: float) -> Callable[[Seen], bool]:
    """Largest error of each row over the row's largest magnitude."""

    def rule(seen: Seen) -> bool:
        out, wanted = masked(seen, seen.out), masked(seen, seen.reference)
        size = wanted.abs().amax(1).clamp_min(1e-12)
        return bool(((out - wanted).abs().amax(1) / size <= limit).all())

    return rule


def shares(seen: Seen) -> tuple[Tensor, Tensor]:
    """(overlap, Jaccard) of each row's index sets, float64 [T]; 1 where nothing is to be selected."""
    found = []
    for mine, theirs in zip(seen.chosen.tolist(), seen.wanted.tolist(), strict=True):
        a, b = {x for x in mine if x >= 0}, {x for x in theirs if x >= 0}
        found.append((len(a & b) / max(1, len(b)) if b else 1.0, len(a & b) / max(1, len(a | b)) if a | b else 1.0))
    both = torch.tensor(found, dtype=torch.float64).view(-1, 2)
    return both[:, 0], both[:, 1]


def overlap(limit: float) -> Callable[[Seen], bool]:
    return lambda seen: not len(seen.lens) or float(shares(seen)[0].min()) >= limit


def mean_jaccard(limit: float) -> Callable[[Seen], bool]:
    return lambda seen: not len(seen.lens) or float(shares(seen)[1].mean()) >= limit


@dataclass(frozen=True)
class Rule:
    """A rule: name, whose it is, the judgement (True: accepted), and the ops whose results it can look at."""

    name: str
    owner: str
    accepts: Callable[[Seen], bool]
    ops: tuple[str, ...] = ("paged_logits",)


SETS = ("paged_logits", "topk")
RULES = (
    Rule("cosine 1e-3", "DeepGEMM, vLLM, TensorRT-LLM", cosine(1e-3)),
    Rule("cosine 1e-3 and 5e-6", "DeepGEMM", cosine_pair),
    Rule("allclose 5e-5 / 1e-5", "SGLang", allclose(5e-5, 1e-5)),
    Rule("allclose 1.0 / 0.2", "vLLM", allclose(1.0, 0.2)),
    Rule("row maximum 1e-2", "aiter and others", row_maximum(1e-2)),
    Rule("overlap of index sets 0.95", "several", overlap(0.95), SETS),
    Rule("overlap of index sets 0.9", "several", overlap(0.9), SETS),
    Rule("mean Jaccard 0.95", "several", mean_jaccard(0.95), SETS),
)


# -------------------------------------------------------------------------------------------------------- measurement

STREAM = 61
SIZES = {"small": ((2, 2, 100), (1, 1, 64), (3, 1, 160)), "large": ((8, 2, 2048),)}
"""(requests, next_n, mean length) of each size's cases."""
GROUPS = tuple(f"{whose} {size}" for whose in ("owners", "ours") for size in SIZES)


@dataclass(frozen=True, eq=False)
class Plain(Operands):
    """Operands of an owner's test, with the exact logits float64 [T, W] from before quantisation."""

    unquantised: Tensor = field(kw_only=True)


def bell(seed: int, stream: int, *shape: int) -> Tensor:
    """Standard-normal-like numbers float32: sums of eight bytes, the same bits everywhere."""
    rows = torch.arange(max(1, torch.Size(shape[:-1]).numel()), dtype=torch.int64)
    words = counter.row_words(counter.row_keys(seed, stream, (rows,)), counter.counting(2 * shape[-1], CPU))
    total = words.view(torch.uint8).view(-1, shape[-1], 8).to(torch.float32).sum(-1) - 1020
    return (total / 209.0).view(*shape)


def owners_operands(layout: str, requests: int, next_n: int, mean: int, seed: int) -> Plain:
    """Gaussian queries, keys and weights, lengths within 30 % of the mean, shuffled pages, no poison, 64 heads."""
    heads, dim = 64, 128
    spread = counter.field(counter.row_keys(seed, STREAM, (torch.arange(requests),)), 8, 12).to(torch.float32) / 4096
    ends = (mean * (0.7 + 0.6 * spread)).to(torch.int64)
    lens = (ends[:, None] - torch.arange(next_n - 1, -1, -1)).clamp_min(1).to(torch.int32)
    pages = -(-int(lens.max()) // 64)
    order = counter.row_keys(seed, STREAM + 1, (torch.arange(requests * pages),)).argsort()
    table = order.view(requests, pages).to(torch.int32)
    q = bell(seed, STREAM + 2, requests, next_n, heads, dim).to(torch.bfloat16)
    kv = bell(seed, STREAM + 3, requests * pages, 64, dim).to(torch.bfloat16)
    weights = bell(seed, STREAM + 4, requests * next_n, heads)
    plain = Operands(q, kv[:, :, None], weights, lens, table, int(lens.max()))
    exact = expected(plain, contract("paged_logits", "bf16")).logits
    if layout == "bf16":
        return Plain(**plain.kwargs(), unquantised=exact)
    wide = kv.to(torch.float32)
    scales = wide.abs().amax(-1).clamp_min(1e-4) / 448
    payload = (wide / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    cache = torch.cat((payload.flatten(1), scales.contiguous().view(torch.uint8).flatten(1)), 1)
    quantised = {"q": q.to(torch.float8_e4m3fn), "kv_cache": cache.view(-1, 64, 1, 132)}
    return Plain(**plain.kwargs() | quantised, unquantised=exact)


def our_case(layout: str, requests: int, next_n: int, mean: int, seed: int) -> Case:
    """Ragged lengths, poison, shuffled pages, gaps, views; exact data and octaves in turn."""
    edges = (0, 1, 63, 64, 65, mean, mean - 1, 2 * mean + 1)
    lengths = tuple(
        tuple(max(0, edges[(seed + 3 * b + 2 * n + 5) % len(edges)]) for n in range(next_n)) for b in range(requests)
    )
    longest = max(max(row) for row in lengths)
    return Case(
        lengths=lengths,
        layout=layout,
        data=("exact", "octaves", "exact_wide")[seed % 3],
        seed=seed,
        perm=seed + 1,
        spare=4,
        gap=(0, 48)[seed % 2],
        width=-(-longest // 64) + 2 if longest else 2,
        max_len=longest + 40,
        tail=("canary", "huge", "minus1")[seed % 3],
        poison=("nan", "canary", "huge")[seed % 3],
        strides=("q", "table", "weights") if seed % 2 else (),
    )


def topk_case(size: str, ours: bool, seed: int) -> TopkCase:
    """Owners: random scores, lengths above k. Ours: ties, negatives, narrow bands, short rows, stale tails."""
    length = 600 if size == "small" else 4000
    data = ("negative", "narrow", "few")[seed % 3] if ours else "random"
    lengths = ((length, length - 7), (3 if ours else length - 40, length // 2))
    return TopkCase(
        lengths=lengths,
        k=256,
        data=data,
        seed=seed,
        perm=seed + 1,
        clean=not ours,
        poison="canary" if ours else "nan",
        max_len=length + (50 if ours else 0),
        tail="canary" if ours else "minus1",
    )


def groups_of(layout: str) -> dict[str, list[Any]]:
    """Operands of each group, built once a process."""
    found: dict[str, list[Any]] = {}
    for size, shapes in SIZES.items():
        found[f"owners {size}"] = [owners_operands(layout, *shape, seed=i) for i, shape in enumerate(shapes)]
        found[f"ours {size}"] = [build_logits(our_case(layout, *shape, seed=i)) for i, shape in enumerate(shapes)]
        if size == "large":
            found["ours large"].append(build_logits(our_case(layout, 8, 2, 1024, seed=2)))
    return found


_CACHE: dict[Any, Any] = {}


def cached(key: Any, make: Callable[[], Any]) -> Any:
    if key not in _CACHE:
        _CACHE[key] = make()
    return _CACHE[key]


def look(call: Callable[..., Any], operands: Any, key: Any, layout: str) -> Seen:
    """Run a logits function on operands and collect what rules may see."""
    exact = cached(("exact", key), lambda: expected(operands, contract("paged_logits", layout)).logits)
    out = call(**operands.kwargs())
    wide = torch.full((out.shape[0], out.shape[1]), 0.0, dtype=torch.float64)
    wide[:, : exact.shape[1]] = exact
    unquantised = operands.unquantised if isinstance(operands, Plain) else wide
    lens = operands.context_lens.reshape(-1).to(torch.int64)
    k = max(1, int(lens.max()) // K_SHARE) if len(lens) else 1
    chosen = plain_topk(out, lens, k).to(torch.int64)
    return Seen(out, unquantised, wide, lens, chosen, plain_topk(wide, lens, k).to(torch.int64))


def look_topk(call: Callable[..., Any], operands: Any) -> Seen:
    """Run a top-k function and collect what rules of index sets may see."""
    _, positions = call(**operands.kwargs())
    lens = operands.context_lens.reshape(-1).to(torch.int64)
    wanted = plain_topk(operands.logits, lens, operands.k).to(torch.int64)
    wide = operands.logits.to(torch.float64)
    return Seen(operands.logits, wide, wide, lens, positions.to(torch.int64), wanted)


def refused(call: Callable[..., Any], op: str, layout: str) -> dict[str, list[str]]:
    """Group: names of the rules that refuse the function on at least one of the group's cases."""
    result: dict[str, list[str]] = {}
    for group in GROUPS:
        names: set[str] = set()
        for at, operands in enumerate(_operands(group, op, layout)):
            before = operands.kwargs()
            try:
                seen = look_topk(call, operands) if op == "topk" else look(call, operands, (layout, group, at), layout)
            except (RuntimeError, IndexError, ValueError):
                names |= {rule.name for rule in RULES if op in rule.ops}  # any test dies of a crash
                continue
            finally:
                _restored(group, op, layout, at, before)
            names |= {rule.name for rule in RULES if op in rule.ops and not rule.accepts(seen)}
        result[group] = sorted(names)
    return result


def _operands(group: str, op: str, layout: str) -> list[Any]:
    if op == "topk":
        whose, size = group.split()
        return cached(group, lambda: [build_topk(topk_case(size, whose == "ours", seed)) for seed in range(3)])
    return cached(("groups", layout), lambda: groups_of(layout))[group]


def _restored(group: str, op: str, layout: str, at: int, named: dict[str, Any]) -> None:
    """Models that write their inputs must not spoil the next one's: operands that changed are built again."""
    digest = tuple(
        int(x.contiguous().view(torch.uint8).to(torch.int64).sum()) for x in named.values() if isinstance(x, Tensor)
    )
    if cached(("digest", group, op, layout, at), lambda: digest) != digest:
        for key in [key for key in _CACHE if key == group or key == ("groups", layout)]:
            del _CACHE[key]


def judge_model(id: str) -> tuple[str, dict[str, list[str]]]:
    """A model's id and the rules that refuse it, by group."""
    torch.set_num_threads(1)
    fault = BY_ID[id]
    _operands(GROUPS[0], fault.op, fault.layout)
    return id, refused(function(fault), fault.op, fault.layout)


def correct_functions(op: str, layout: str) -> dict[str, Callable[..., Any]]:
    """Correct functions: staged float32, our torch path, sequential float32, and the tensor cores' arithmetic."""
    if op == "topk":
        return {"staged": staged("topk", layout), "ours": topk.topk_to_slots}
    model = named_model("sm_90 e4m3" if layout == "fp8" else "sm_90 bf16").arithmetic

    def emulated(made: Contract) -> Callable[..., Tensor]:
        def call(**named: Any) -> Tensor:
            out = torch.full((named["weights"].shape[0], named["max_context_len"]), -torch.inf)
            found = emulate(Operands(**named), made).logits.to(torch.float32)
            out[:, : found.shape[1]] = found
            return out

        return call

    plain = contract("paged_logits", layout)
    return {
        "staged": staged("paged_logits", layout),
        "ours": getattr(torch_path, f"torch_{layout}_paged_mqa_logits"),
        "sequential": emulated(plain),
        "tensor cores": emulated(replace(plain, arithmetic=model)),
    }


def judge_correct(which: tuple[str, str, str]) -> tuple[str, dict[str, list[str]]]:
    """The rules that refuse one correct function, by group."""
    torch.set_num_threads(1)
    op, layout, name = which
    return f"{op} {layout}: {name}", refused(correct_functions(op, layout)[name], op, layout)


def judged_models() -> list[str]:
    """Models that rules of logits or of index sets can look at: no equivalent ones, none that a compiler judges."""
    return [m.id for m in MODELS if m.op in SETS and not m.equivalent and not {"compile", "route"} & set(m.extra)]


def measure() -> dict[str, Any]:
    """Kill rates and false rejections of every rule in every group."""
    started = time.monotonic()
    ids = judged_models()
    correct = [
        (p, layout, n)
        for p, layout in (("paged_logits", "bf16"), ("paged_logits", "fp8"), ("topk", "bf16"))
        for n in correct_functions(p, layout)
    ]
    # Models that build wide or keep memory come from one process each, so that a crash would name itself.
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    models: dict[str, dict[str, list[str]]] = {}
    with concurrent.futures.ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=context) as pool:
        correct_rows = pool.map(judge_correct, correct)
        for at, (id, row) in enumerate(pool.map(judge_model, ids, chunksize=4), 1):
            models[id] = row
            if at % 20 == 0:
                say(f"{at} of {len(ids)} models")
        good = dict(correct_rows)
    return {
        "kind": "indexer-parity/rules",
        "format": 1,
        "models": models,
        "correct": good,
        "rules": [rate(rule.name, rule.owner, rule.ops, models, good) for rule in RULES],
        "duration": round(time.monotonic() - started, 1),
    }


def rate(name: str, owner: str, ops: tuple[str, ...], models: dict[str, Any], good: dict[str, Any]) -> dict[str, Any]:
    """One rule's row: of how many models it kills how many, and how many correct functions it refuses, by group."""
    mine = {id: row for id, row in models.items() if BY_ID[id].op in ops}
    just = {id: row for id, row in good.items() if id.split()[0] in ops}
    groups = {
        group: {
            "killed": sum(name in row[group] for row in mine.values()),
            "models": len(mine),
            "refused": [id for id, row in just.items() if name in row[group]],
            "correct": len(just),
        }
        for group in GROUPS
    }
    return {"rule": name, "owner": owner, "groups": groups}


def table(report: dict[str, Any]) -> str:
    """Markdown: share of models killed (correct functions refused) for each rule and group."""
    lines = ["| rule | whose | " + " | ".join(GROUPS) + " |", "|---|---" + "|--:" * len(GROUPS) + "|"]
    for row in report["rules"]:
        cells = []
        for group in GROUPS:
            found = row["groups"][group]
            share = f"{found['killed'] / max(1, found['models']):.0%}"
            cells.append(share + (f" ({len(found['refused'])} of {found['correct']})" if found["refused"] else ""))
        lines.append(f"| {row['rule']} | {row['owner']} | " + " | ".join(cells) + " |")
    logits, chosen = (sum(BY_ID[id].op == op for id in report["models"]) for op in SETS)
    lines += ["", f"Share of {logits} logits models killed (rules of index sets: and of {chosen} top-k models); in"]
    return "\n".join(lines) + " brackets correct functions refused.\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too")
    parser.add_argument("--markdown", metavar="FILE", help="write the table")
    options = parser.parse_args()
    report = measure()
    write_json(options.json, report)
    if options.markdown:
        write_text(options.markdown, table(report))
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())

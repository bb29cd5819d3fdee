"""The peers' rules measured: every logits and top-k model, and correct kernels, on owners' data and on ours."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parity.command import say
from parity.domain.contract import Contract
from parity.faults.building import CPU, contract, function, staged
from parity.faults.catalogue import BY_ID, MODELS
from parity.faults.rules import K_SHARE, RULES, Seen
from parity.numerics.alarm import emulate
from parity.numerics.arithmetic import named_model
from parity.numerics.bounds import expected
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.checks.selection import plain_topk
from parity.ops.paged_logits.operands import build_logits as build
from parity.pages import counter

STREAM = 61
SIZES = {"small": ((2, 2, 100), (1, 1, 64), (3, 1, 160)), "large": ((8, 2, 2048),)}
"""(requests, next_n, mean length) of each size's cases."""
GROUPS = tuple(f"{whose} {size}" for whose in ("owners", "ours") for size in SIZES)


@dataclass(frozen=True, eq=False)
class Plain:
    """Operands of the calling convention without a case behind them."""

    q: Tensor
    kv_cache: Tensor
    weights: Tensor
    context_lens: Tensor
    block_table: Tensor
    max_context_len: int
    unquantised: Tensor
    clean_logits: bool = True

    def kwargs(self) -> dict[str, Any]:
        names = ("q", "kv_cache", "weights", "context_lens", "block_table", "max_context_len", "clean_logits")
        return {name: getattr(self, name) for name in names}


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
    common = (weights, lens, table, int(lens.max()))
    plain = Plain(q, kv[:, :, None], *common, unquantised=torch.empty(0))
    exact = expected(plain, contract("paged_logits", "bf16")).logits
    if layout == "bf16":
        return Plain(q, kv[:, :, None], *common, unquantised=exact)
    wide = kv.to(torch.float32)
    scales = wide.abs().amax(-1).clamp_min(1e-4) / 448
    payload = (wide / scales[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    cache = torch.cat((payload.flatten(1), scales.contiguous().view(torch.uint8).flatten(1)), 1)
    return Plain(q.to(torch.float8_e4m3fn), cache.view(-1, 64, 1, 132), *common, unquantised=exact)


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


def topk_case(size: str, ours: bool, seed: int) -> Case:
    """Owners: random scores, lengths above k. Ours: ties, negatives, narrow bands, short rows, stale tails."""
    length = 600 if size == "small" else 4000
    data = ("negative", "narrow", "few")[seed % 3] if ours else "random"
    lengths = ((length, length - 7), (3 if ours else length - 40, length // 2))
    return Case(
        lengths=lengths,
        stage="topk",
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
        found[f"ours {size}"] = [build(our_case(layout, *shape, seed=i)) for i, shape in enumerate(shapes)]
        if size == "large":
            found["ours large"].append(build(our_case(layout, 8, 2, 1024, seed=2)))
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
    unquantised = wide
    if isinstance(operands, Plain):
        unquantised = operands.unquantised
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
        return cached(group, lambda: [build(topk_case(size, whose == "ours", seed)) for seed in range(3)])
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


def honest(op: str, layout: str) -> dict[str, Callable[..., Any]]:
    """Correct functions: staged float32, our torch path, sequential float32, and the tensor cores' arithmetic."""
    if op == "topk":
        from impl.topk import topk_to_slots

        return {"staged": staged("topk", layout), "ours": topk_to_slots}
    from impl import torch_path

    model = named_model("sm_90 e4m3" if layout == "fp8" else "sm_90 bf16").arithmetic

    def emulated(made: Contract) -> Callable[..., Tensor]:
        def call(**named: Any) -> Tensor:
            out = torch.full((named["weights"].shape[0], named["max_context_len"]), -torch.inf)
            found = emulate(Plain(**named, unquantised=torch.empty(0)), made).logits.to(torch.float32)
            out[:, : found.shape[1]] = found
            return out

        return call

    import dataclasses

    plain = contract("paged_logits", layout)
    return {
        "staged": staged("paged_logits", layout),
        "ours": getattr(torch_path, f"torch_{layout}_paged_mqa_logits"),
        "sequential": emulated(plain),
        "tensor cores": emulated(dataclasses.replace(plain, arithmetic=model)),
    }


def judge_correct(which: tuple[str, str, str]) -> tuple[str, dict[str, list[str]]]:
    """The rules that refuse one correct function, by group."""
    torch.set_num_threads(1)
    op, layout, name = which
    return f"{op} {layout}: {name}", refused(honest(op, layout)[name], op, layout)


def judged_models() -> list[str]:
    """Models that rules of logits or of index sets can look at: no equivalent ones, none that a compiler judges."""
    return [
        m.id
        for m in MODELS
        if m.op in ("paged_logits", "topk") and not m.equivalent and not {"compile", "route"} & set(m.extra)
    ]


def measure(workers: int | None = None) -> dict[str, Any]:
    """Kill rates and false rejections of every rule in every group."""
    started = time.monotonic()
    ids = judged_models()
    correct = [
        (p, layout, n)
        for p, layout in (("paged_logits", "bf16"), ("paged_logits", "fp8"), ("topk", "bf16"))
        for n in honest(p, layout)
    ]
    count = workers or min(8, os.cpu_count() or 1)
    # Models that build wide or keep memory come from one process each, so that a crash would name itself.
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else "spawn")
    models: dict[str, dict[str, list[str]]] = {}
    with concurrent.futures.ProcessPoolExecutor(count, mp_context=context) as pool:
        honest_rows = pool.map(judge_correct, correct)
        for at, (id, row) in enumerate(pool.map(judge_model, ids, chunksize=4), 1):
            models[id] = row
            if at % 20 == 0:
                say(f"parity mutants --rules: {at} of {len(ids)} models")
        good = dict(honest_rows)
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
    counts = {p: sum(BY_ID[id].op == p for id in report["models"]) for p in ("paged_logits", "topk")}
    lines += [
        "",
        f"Share of {counts['paged_logits']} logits models killed (rules of index sets: and of {counts['topk']} top-k",
    ]
    lines[-1] += " models); in brackets correct functions refused."
    return "\n".join(lines) + "\n"

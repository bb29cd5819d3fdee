"""Random cases on which a fault shows, for measuring the diagnosis: at least two rows and two pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parity.faults.building import staged
from parity.faults.explaining import Problem, Ruler, distance, observe, problem_of
from parity.ops.compressor.case import CompressorCase
from parity.ops.fault import Fault
from parity.ops.paged_logits.case import POISONS, TAILS, Case
from parity.ops.paged_logits.strategies import BIG_BYTES
from parity.ops.store.case import StoreCase
from parity.pages.layout import find

DATA = ("exact", "exact_wide", "octaves", "outliers", "near_ties", "saturating", "nonfinite", "subnormal", "zeros")
TOPK_DATA = ("random", "negative", "narrow", "large", "neginf", "ulps", "zeros", "few", "nan")
TRIES = 60
RACING = 8  # runs in which a race has to show


def draw_case(fault: Fault, source: random.Random) -> Any:
    """One case of a fault's operation and layout, by a source of randomness; of a size at which its kind shows."""
    if fault.op == "compressor":
        return _script(source)
    if fault.op == "store":
        return _store(fault, source)
    return _logits(fault, source) if fault.op == "paged_logits" else _topk(fault, source)


def _lengths(source: random.Random, longest: int, least: int) -> tuple[tuple[int, ...], ...]:
    """Ragged lengths of at least two rows, one of them at least `least`."""
    requests, next_n = source.choice(((2, 1), (2, 2), (3, 2), (2, 3), (1, 3)))
    lengths = [
        [source.choice((source.randint(0, longest), 64 * source.randint(0, 4))) for _ in range(next_n)]
        for _ in range(requests)
    ]
    lengths[0][-1] = max(lengths[0][-1], least + source.randint(0, 120))
    return tuple(map(tuple, lengths))


def _placed(source: random.Random, lengths: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    long = max(map(max, lengths))
    return {
        "lengths": lengths,
        "seed": source.randrange(1 << 16),
        "perm": source.randrange(1, 1 << 16),
        "width": -(-long // 64) + source.randint(0, 3),
        "max_len": long + source.choice((0, 7, 130)),
        "tail": source.choice(TAILS),
        "poison": source.choice(POISONS),
        "clean": source.choice((True, True, False)),
    }


def _logits(fault: Fault, source: random.Random) -> Case:
    fields = _placed(source, _lengths(source, 320, 4100 if fault.kind == "launch" and source.random() < 0.3 else 70))
    fields |= {"spare": source.choice((2, 5, 40)), "gap": source.choice((0, 16, 4096))}
    if fault.kind == "integers" and source.random() < 0.5:
        fields |= {"spare": BIG_BYTES // find(fault.layout).page_bytes, "gap": 16}
    strides = source.sample(("q", "table", "weights", "lens"), source.randint(0, 3))
    return Case(
        layout=fault.layout,
        heads=source.choice((8, 64)),
        data=source.choice(DATA),
        strides=tuple(sorted(strides)),
        **fields,
    )


def _topk(fault: Fault, source: random.Random) -> Case:
    return Case(
        stage="topk",
        data=source.choice(TOPK_DATA),
        k=source.choice((1, 64, 512, 1100, 2048)),
        spare=source.choice((3, 1200, 1 << 19)),
        strides=source.choice(((), ("logits",), ("table",), ("logits", "table"))),
        **_placed(source, _lengths(source, 4400, 4300 if source.random() < 0.3 else 70)),
    )


def _store(fault: Fault, source: random.Random) -> StoreCase:
    tokens = source.choice((2, 5, 40, 150))
    return StoreCase(
        ids=tuple(range(tokens)),
        layout=fault.layout,
        data=source.choice(("bell", "octaves", "zeros", "onehot", "tiny", "pairs")),
        seed=source.randrange(1 << 16),
        pooled=source.choice(("f32", "bf16")),
        weights=source.choice(("real", "ties")),
        positions=source.choice(("near", "far")),
        pages=6,
        place=source.choice(("spread", "order", "last")),
        perm=source.randrange(1 << 16),
        skip=source.choice((0, 3)),
        gap=BIG_BYTES // 5 // 16 * 16 if fault.kind == "integers" else source.choice((0, 48)),
    )


def _script(source: random.Random) -> CompressorCase:
    calls, length = [], {0: 0, 1: 0}
    for _ in range(source.randint(3, 7)):
        call = []
        for request in source.sample((0, 1), source.randint(1, 2)):
            undone = source.randint(1, min(3, length[request])) if length[request] and source.random() < 0.2 else 0
            count = source.choice((1, 3, 4, 5, 9, 13))
            if undone:
                count = max(count, undone + 1)
            call.append((request, count, undone))
            length[request] += count - undone
        calls.append(tuple(call))
    data, poison = source.choice(("exact", "random")), source.choice(("nan", "stale"))
    return CompressorCase(
        tuple(calls), data=data, seed=source.randrange(1 << 16), poison=poison, perm=source.randint(0, 2)
    )


def reordered(fault: Fault) -> Callable[..., Any]:
    """The faulty function as somebody else would have written it: where the fault leaves the dot alone, its sum runs
    backwards, and so does the sum over heads. Real kernels do not add in the order of the models."""
    change = dict(fault.change)
    if fault.op == "paged_logits":
        from parity.ops.paged_logits.faults import staged as ok

        change.setdefault("dot", lambda c, q, k: ok.dot(c, q.flip(-1).contiguous(), k.flip(-1).contiguous()))
        change.setdefault("head_sum", lambda c, x: ok.head_sum(c, x.flip(1).contiguous()))
    function = staged(fault.op, fault.layout, fault.extra.get("contract"), change)
    return function if fault.wrap is None else fault.wrap(function)


def visible_case(fault: Fault, seed: int = 0, tries: int = TRIES) -> tuple[Problem, list[Any], Any] | None:
    """(problem, observed results, case) of the first drawn case on which the fault shows, or None."""
    source = random.Random(f"{fault.id} {seed}")
    for _ in range(tries):
        case = draw_case(fault, source)
        problem = problem_of(case, fault.extra.get("contract"))
        problem = replace(problem, runs=RACING) if fault.kind == "race" else problem
        observed = observe(problem, reordered(fault))
        right = observe(problem, staged(fault.op, fault.layout, fault.extra.get("contract")))
        if distance(Ruler(problem), observed, right).wrong:
            return problem, observed, case
    return None

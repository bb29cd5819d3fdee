"""The checks of store functions, at levels layout, rounding and invariance; the same questions as for logits.

layout      every byte of every key at its place, every other byte of the pool untouched
rounding    every scale and payload value inside the interval of the contract's schedule
invariance  a token's bytes do not depend on the run, on its slot, on what stood there, or on the other tokens: a
            prefill of many and decode steps of one give the same bytes
resources   a few tokens in a large pool, within the budget of memory
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from parity.domain.dimensions import mostly
from parity.domain.profiles import Profile
from parity.ops.check import Check, failed_call, labels, verdict
from parity.ops.shared.history import History
from parity.ops.shared.resources import SLACK, no_graph, over_budget
from parity.ops.store.case import DATA, StoreCase
from parity.ops.store.digests import digest_of, known_digests
from parity.ops.store.domain import at_tokens, borders, reach, stretched
from parity.ops.store.judge import judge_store, stored_bytes, token_place
from parity.ops.store.semantics import CHECKS as SEMANTICS
from parity.ops.store.strategies import store_cases
from parity.pages.layout import find
from parity.results import Status, Verdict
from parity.run.implementation import Implementation
from parity.run.runner import Outcome, Runner

REPEATS = {"cpu": 2, "cuda": 20}
DECODE_STEPS = 4  # tokens of a case that are stored again one by one
LARGE = 20000
FAR_EVERY = 12  # one case in so many goes far in one dimension

Strategy = Callable[[Implementation, Profile, torch.device], st.SearchStrategy[StoreCase]]
Change = Callable[[StoreCase], StoreCase]


def _drawn(**options: Any) -> Strategy:
    def strategy(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[StoreCase]:
        plain = store_cases(layout=impl.layout, **options)
        if options.get("big") or "max_tokens" in options:
            return plain
        far = mostly(plain, stretched(plain, reach(impl, profile, device)[0]), FAR_EVERY)
        if device.type != "cuda" or not profile.large:
            return far
        return mostly(far, plain.map(lambda case: at_tokens(case, LARGE)), 8)

    return strategy


def _borders(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[StoreCase]:
    return st.sampled_from(borders(impl.layout, reach(impl, profile, device)[0]))


def _listed(*cases: dict[str, Any]) -> Strategy:
    def strategy(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[StoreCase]:
        return st.sampled_from([StoreCase(layout=impl.layout, **fields) for fields in cases])

    return strategy


def judge_call(runner: Runner, case: StoreCase, check: str) -> Verdict:
    """One call, judged byte by byte and key by key."""
    outcome = runner.run(case)
    found = failed_call(runner, check, case, outcome)
    return found or _judge(runner, case, check, outcome)


def _judge(runner: Runner, case: StoreCase, check: str, outcome: Outcome) -> Verdict:
    made = labels(runner, check, case)
    return judge_store(outcome.output, outcome.operands, runner.impl.contract, made)


# --------------------------------------------------------------------------------------------------------- invariance


def judge_repeats(runner: Runner, case: StoreCase, check: str) -> Verdict:
    """The same call again and again leaves the same bytes."""
    outcome = runner.run(case, repeats=REPEATS[runner.device.type])
    found = failed_call(runner, check, case, outcome)
    if found is not None:
        return found
    if outcome.differing is not None:
        run, other = outcome.differing
        count = int((outcome.output != other).sum())
        return _failed(runner, check, case, f"run {run + 1} left {count} other bytes than the first")
    return _judge(runner, case, check, outcome)


def judge_pair(runner: Runner, case: StoreCase, check: str, change: Change) -> Verdict:
    """Tokens that both calls store have the same bytes; without `batch_invariant` only while the batch is the same."""
    other = change(case)
    outcome = runner.run(case)
    again = runner.run(other)
    for each, result in ((case, outcome), (other, again)):
        found = failed_call(runner, check, each, result)
        found = found or _judge(runner, each, check, result)
        if found.status is not Status.PASSED:
            return replace(found, case=str(case))
    if case.ids != other.ids and not runner.impl.contract.batch_invariant:
        return verdict(runner, check, case, Status.PASSED, cells=_cells(outcome))
    return _compare(runner, case, check, outcome, [again])


def judge_decode(runner: Runner, case: StoreCase, check: str) -> Verdict:
    """Some tokens are stored again, each in a call of its own, as decode steps store what a prefill may have stored."""
    if not runner.impl.contract.batch_invariant:
        reason = "the contract does not promise batch invariance"
        return verdict(runner, check, case, Status.UNSUPPORTED, reason)
    outcome = runner.run(case)
    found = failed_call(runner, check, case, outcome)
    if found is not None:
        return found
    step = max(1, case.tokens // DECODE_STEPS)
    singles = []
    for name in case.ids[::step][:DECODE_STEPS]:
        single = replace(case, ids=(name,), pages=1, gap=0, place="order")
        result = runner.run(single)
        found = failed_call(runner, check, single, result)
        if found is not None:
            return found
        singles.append(result)
    return _compare(runner, case, check, outcome, singles)


def _compare(runner: Runner, case: StoreCase, check: str, outcome: Outcome, others: Sequence[Outcome]) -> Verdict:
    """Bytes of every token, by name, in one outcome and in the others."""
    kept, *parts = stored_bytes(outcome.output, outcome.operands)
    place = {case.ids[int(token)]: row for row, token in enumerate(kept)}
    cells = 0
    for other in others:
        tokens, *found = stored_bytes(other.output, other.operands)
        ids = other.operands.case.ids
        pairs = [(place[name], row) for row, token in enumerate(tokens.tolist()) if (name := ids[token]) in place]
        if not pairs:
            continue
        here, there = (torch.tensor(side, device=kept.device) for side in zip(*pairs, strict=True))
        for what, mine, theirs in zip(
            ("payload", "scale"), parts, (part.to(kept.device) for part in found), strict=True
        ):
            wrong = mine[here] != theirs[there]
            cells += wrong.numel()
            if bool(wrong.any()):
                row, column = divmod(int(wrong.reshape(-1).to(torch.uint8).argmax()), wrong.shape[1])
                token = int(kept[here[row]])
                text = (
                    f"token {case.ids[token]}, {what} byte {column}: {int(mine[here[row], column])} in the one call, "
                    f"{int(theirs[there[row], column])} in the other ({other.operands.case})"
                )
                return _failed(runner, check, case, text, token_place(outcome.operands, token))
    return verdict(runner, check, case, Status.PASSED, cells=cells)


def judge_graph(runner: Runner, case: StoreCase, check: str) -> Verdict:
    """Captured on one case and replayed on another of the same shapes, a call leaves what a plain call leaves."""
    wide = replace(case, seed=case.seed + 1, perm=case.perm + 1, fill=case.fill + 1, skip=0, data="bell")
    outcome = runner.replay(wide, case)
    found = failed_call(runner, check, case, outcome)
    return found or _judge(runner, case, check, outcome)


def judge_memory(runner: Runner, case: StoreCase, check: str) -> Verdict:
    """Peak bytes of the call against the declared workspace: it may not copy the pool that it writes into."""
    runner.run(replace(case, base=0))  # what a first call imports is no part of what a call takes
    outcome = runner.run(case, measure=True)
    found = failed_call(runner, check, case, outcome)
    if found is not None:
        return found
    text = over_budget(outcome, runner.impl.workspace + SLACK[runner.device.type])
    if text is None:
        return verdict(runner, check, case, Status.PASSED, cells=1)
    return _failed(runner, check, case, f"{text} (the pool takes {case.pool_pages * case.page_stride})")


def judge_digest(runner: Runner, case: StoreCase, check: str) -> Verdict:
    """The bytes are those recorded for our own store, on whatever device they were computed."""
    outcome = runner.run(case)
    found = failed_call(runner, check, case, outcome)
    if found is not None:
        return found
    wanted = known_digests().get(case, {}).get(runner.impl.name)
    if wanted is None:
        reason = "no bytes are recorded for this case"
        return verdict(runner, check, case, Status.UNSUPPORTED, reason)
    if digest_of(outcome.output) != wanted:
        return _failed(runner, check, case, "the pool's bytes are not those recorded for this mode")
    return _judge(runner, case, check, outcome)


def _cells(outcome: Outcome) -> int:
    return int(outcome.output.numel())


def _failed(runner: Runner, check: str, case: StoreCase, message: str, where: dict[str, int] | None = None) -> Verdict:
    return verdict(runner, check, case, Status.FAILED, message, where=where or {})


# ------------------------------------------------------------------------------------------------------------- checks


def _move(case: StoreCase) -> StoreCase:
    """The same tokens elsewhere, in a larger pool."""
    return replace(case, perm=case.perm + 1, place="spread", pages=case.pages + 3, gap=0 if case.gap else 48)


def _refill(case: StoreCase) -> StoreCase:
    """Another pool content before the call."""
    return replace(case, fill=case.fill + 1)


def _fewer(case: StoreCase) -> StoreCase:
    """Every second token, backwards."""
    return replace(case, ids=case.ids[::-2])


def _check(
    level: str,
    name: str,
    share: float,
    strategy: Strategy,
    judge: Callable[[Runner, StoreCase, str], Verdict] = judge_call,
    **more: Any,
) -> Check:
    def judged(runner: Runner, case: Any) -> Verdict:
        return judge(runner, case, f"{level}/{name}")

    return Check(level, name, strategy, judged, share, **more)


def _pair(change: Change) -> Callable[[Runner, StoreCase, str], Verdict]:
    return lambda runner, case, check: judge_pair(runner, case, check, change)


def _bases(impl: Implementation) -> list[StoreCase]:
    common: dict[str, Any] = {"layout": impl.layout, "seed": 4, "perm": 5, "skip": 5}
    return [
        StoreCase(ids=tuple(range(33)), **common),
        StoreCase(ids=tuple(range(7, 70)), data="octaves", pooled="bf16", gap=48, **common | {"seed": 7}),
    ]


def _relatives(impl: Implementation, case: StoreCase) -> list[StoreCase]:
    """Many tokens, one, operands of the other types, a larger pool, far positions, and no token."""
    other = {"f32": "bf16", "bf16": "f32"}
    return [
        replace(case, ids=tuple(range(130)), pages=5, place="spread"),
        replace(case, ids=case.ids[:1], skip=0),
        replace(case, pooled=other[case.pooled], weight=other[case.weight]),
        _move(case),
        replace(case, positions="far" if case.positions == "near" else "near"),
        replace(case, ids=()),
    ]


def _large_pool(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[StoreCase]:
    """A few tokens in a pool of twice the workspace; on a CPU it is mapped lazily. At least tens of megabytes."""
    pages = max(64 << 20, 2 * impl.workspace) // find(impl.layout).page_bytes
    return st.just(StoreCase(ids=(0, 1, 2, 3, 4), layout=impl.layout, seed=4, perm=5, base=pages))


def _large(case: Any) -> bool:
    return isinstance(case, StoreCase) and case.base * case.page_stride >= 60 << 20


def _few(case: Any) -> bool:
    return isinstance(case, StoreCase) and 0 < case.tokens <= 130 and case.pool_pages * case.page_stride <= 1 << 22


def _recorded(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Any]:
    return st.sampled_from([case for case in known_digests() if case.layout == impl.layout])


def _needs_digest(impl: Implementation, device: torch.device) -> str | None:
    if any(impl.name in found for found in known_digests().values()):
        return None
    return "bytes are recorded for the built-in stores only"


def _always(impl: Implementation) -> bool:
    return True


EMPTY = ({"ids": ()}, {"ids": (), "pages": 0}, {"ids": (0, 1, 2), "skip": 1}, {"ids": (5,), "pages": 1})

CHECKS = [
    _check("layout", "keys", 4.0, _drawn(data=("bell", "onehot"))),
    _check("layout", "places", 2.0, _drawn(data=("bell",), places=("edges", "last", "order"))),
    _check("layout", "beyond_2gib", 0.5, _drawn(data=("bell",), big=True, max_tokens=64), shrinks=False),
    _check("layout", "borders", 0.0, _borders, listed=_always),
    _check("layout", "empty", 0.0, _listed(*EMPTY), listed=_always),
    _check("rounding", "values", 4.0, _drawn(data=("bell", "octaves"))),
    _check("rounding", "special", 3.0, _drawn(data=("zeros", "onehot", "pairs", "tiny", "large"))),
    _check("rounding", "weights", 2.0, _drawn(weights=("real", "ties"), dtypes=("f32",))),
    _check("rounding", "positions", 1.0, _drawn(positions=("far",), data=("bell",))),
    _check("invariance", "repeat", 2.0, _drawn(), judge_repeats),
    _check("invariance", "slots", 2.0, _drawn(min_tokens=1), _pair(_move)),
    _check("invariance", "pool", 1.0, _drawn(min_tokens=1), _pair(_refill)),
    _check("invariance", "tokens", 1.0, _drawn(min_tokens=2), _pair(_fewer)),
    _check("invariance", "decode", 1.0, _drawn(min_tokens=1, max_tokens=40), judge_decode),
    _check("invariance", "graph", 0.5, _drawn(min_tokens=1, max_tokens=40), judge_graph, needs=no_graph),
    _check("invariance", "recorded", 0.0, _recorded, judge_digest, needs=_needs_digest, listed=_always),
    *History(bases=_bases, relatives=_relatives, judge=_judge, accepts=_few).checks(),
    *SEMANTICS,
    _check("resources", "memory", 0.0, _large_pool, judge_memory, listed=_always, accepts=_large, shrinks=False),
]
assert set(DATA) >= {"bell", "octaves", "zeros", "onehot", "pairs", "tiny", "large"}

"""One check on one implementation: draw cases, stop at the first fault, shrink it, and say what was found."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import find
from hypothesis.database import ExampleDatabase
from hypothesis.errors import NoSuchExample

from parity.domain.profiles import Profile
from parity.domain.reducer import reduce_case
from parity.ops.check import LEAST, Check, examples_of, fitted
from parity.results import Status, Verdict, merge
from parity.run.frames import roomy
from parity.run.operation import parse_case
from parity.run.runner import Runner

BAD = (Status.FAILED, Status.ERROR)


LISTED = 1000
"""More than any list of cases holds."""


class _Stop(BaseException):
    """Leaves Hypothesis at once; it lets pass what is no Exception."""


@dataclass
class Finding:
    """What a check found out: its verdict, the number of cases judged, the worst case that passed, the time it took."""

    verdict: Verdict
    examples: int
    worst_case: str = ""
    seconds: float = 0.0
    first_case: str = field(default="")


@roomy
def run_check(
    check: Check,
    runner: Runner,
    profile: Profile,
    *,
    seconds: float | None = None,
    note: Callable[[Any, Verdict], None] | None = None,
) -> Finding:
    """Draw the check's cases until one fails, the examples are used up, or `seconds` have passed.

    A failure is shrunk by Hypothesis and then by the reducer of cases, each within the profile's limits; a crash or a
    time-out is reported as it is, since every repetition of it may cost a process. `note` sees every case judged.
    """
    impl, started = runner.impl, time.monotonic()
    reason = impl.absent or check.needs(impl, runner.device)
    if reason:
        return Finding(Verdict(Status.NOT_RUN, check.level, check.name, message=reason), 0)
    strategy = check.strategy(impl, profile, runner.device).map(lambda case: fitted(impl, case))
    verdicts: list[Verdict] = []
    memory: dict[str, bool] = {}
    bad: list[tuple[Any, Verdict]] = []
    limit = started + seconds if seconds is not None else None
    wanted = examples_of(check, profile.examples, impl, runner.device)

    def fails(case: Any) -> bool:
        key = str(case)
        if key in memory:
            if memory[key]:  # the last of `bad` is what a reduction has come to, also by a case judged before
                bad.append(next(pair for pair in bad if str(pair[0]) == key))
            return memory[key]
        now = time.monotonic()
        late = limit is not None and now > limit and len(verdicts) >= LEAST
        if not bad and verdicts and (len(verdicts) == wanted or late):
            raise _Stop
        found = check.judge(runner, case)
        if note is not None:
            note(case, found)
        if not bad:
            verdicts.append(found)
            memory[key] = found.status in BAD
        else:
            memory[key] = found.status is bad[0][1].status
        if memory[key]:
            bad.append((case, found))
            if found.status is Status.ERROR or not check.shrinks:
                raise _Stop
        return memory[key]

    deadline: list[float] = []

    def condition(case: Any) -> bool:
        if bad and not deadline:
            deadline.append(time.monotonic() + profile.shrink_seconds)
        if deadline and time.monotonic() > deadline[0]:
            raise _Stop
        return fails(case)

    key, store = "/".join((impl.name, check.level, check.name)).encode(), profile.store()
    with contextlib.suppress(NoSuchExample, _Stop):
        if store is not None and _replay(store, key, impl.op, check, fails):
            raise _Stop
        find(
            strategy,
            condition,
            # Hypothesis also counts cases that it has drawn before, and a list of cases ends by itself.
            settings=profile.settings(2 * wanted if wanted else LISTED, listed=wanted is None),
            # Without the folders of a file: the same cases wherever it lies.
            random=profile.source(impl.short, check.level, check.name),
        )
    if not bad:
        worst = max((v for v in verdicts if v.ratio is not None), key=lambda v: v.ratio or 0.0, default=None)
        return Finding(
            merge(verdicts, impl.contract.coarse),
            len(verdicts),
            worst.case if worst is not None else "",
            time.monotonic() - started,
        )
    first = str(bad[0][0])
    case, final = min(bad, key=lambda pair: pair[0].size)
    if final.status is Status.FAILED and check.shrinks:
        limit, deadline[:] = None, [time.monotonic() + profile.shrink_seconds]
        with contextlib.suppress(_Stop):
            (impl.operation.reduce or reduce_case)(case, condition, profile.reduce_calls)
        case, final = bad[-1]  # every success of the reducer is a smaller case than the one before
    if store is not None:
        store.save(key, str(case).encode())
    total = merge(verdicts, impl.contract.coarse)
    return Finding(
        replace(final, resolution=total.resolution), len(verdicts), final.case, time.monotonic() - started, first
    )


def _replay(store: ExampleDatabase, key: bytes, op: str, check: Check, fails: Callable[[Any], bool]) -> bool:
    """Whether a case that failed before still fails; those that do not, or that nobody can read now, are dropped."""
    for text in sorted(store.fetch(key), key=len):
        try:
            case = parse_case(text.decode())
        except ValueError:  # written by a version with other case strings
            case = None
        if case is not None and case.op == op and check.accepts(case) and fails(case):
            return True
        store.delete(key, text)
    return False

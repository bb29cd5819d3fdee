"""The suite's jobs in a pool of processes: every process opens the same session once, then judges what it is given."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from parity.domain.profiles import Profile
from parity.ops.check import Check, find_check
from parity.results import Row, Verdict
from parity.run.implementation import Implementation
from parity.run.processes import SCRATCH
from parity.suite.clock import Clock
from parity.suite.pool import Job, Lost
from parity.suite.search import Finding
from parity.suite.session import Session, open_session, row
from parity.tensorcore.verification import Verification
from parity.vocabulary import Grounds, Status

Pair = tuple[Implementation, Check]
_sessions: list[Session] = []


def setup(chosen: Mapping[str, Any], session: Session, processes: int) -> Job:
    """The job that opens in a process what `session` is here: the same seed, one clock for all, the GPU checked once.

    chosen: impl, layout, op and contract, as `open_session` takes them."""
    clock = session.clock
    shared = None if clock is None else (clock.seconds, processes, clock.started)
    arguments = (dict(chosen), str(session.device), session.profile, shared, session.arithmetic.as_dict())
    return Job("parity.suite.jobs:open_here", arguments)


def open_here(
    chosen: Mapping[str, Any],
    device: str,
    profile: Profile,
    clock: tuple[Any, ...] | None,
    examined: Mapping[str, Any],
) -> None:
    """In the process: its session, closed when the process ends."""
    _sessions[:] = [
        open_session(
            **chosen,
            device=torch.device(device),
            profile=profile,
            clock=_clock(*clock) if clock is not None else None,
            examined=Verification.from_dict(examined),
        )
    ]


def _clock(seconds: float, count: int, started: float) -> Clock:
    """The clock that the processes of a pool share, through a file in the pool's folder."""
    return Clock(seconds, count, os.path.join(os.environ[SCRATCH], "ended"), started)


def jobs(pairs: Sequence[Pair], total: float) -> list[Job]:
    """One job per implementation and check; `total` is what all of them weigh in a time budget."""
    return [Job("parity.suite.jobs:judge_here", (impl.name, check.id, total)) for impl, check in pairs]


def judge_here(name: str, check: str, total: float) -> Row:
    """In the process: the row of one check on one implementation."""
    impl = _sessions[0].implementations[name]
    return _sessions[0].judge(impl, find_check(check, impl.operation), total)


def lost_row(pair: Pair, lost: Lost) -> Row:
    """The row of a check that ended without one."""
    return row(*pair, Finding(Verdict(Status.ERROR, message=lost.message, grounds=Grounds.CRASH), 0))

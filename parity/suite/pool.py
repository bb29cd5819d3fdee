"""A pool of processes, one job at a time each: a process that dies costs its own job and is replaced.

Standard library only, so that a process can set its environment before anything imports torch. The calling process
only waits: it may be interrupted at any time, and then ends its processes and removes their temporary files.
"""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from parity.run import processes
from parity.run.frames import roomy

GRACE_SECONDS = 5.0
"""For a process to end by itself, closing what it has opened, before it is killed."""

SPAWN = multiprocessing.get_context("spawn")  # a forked process would share torch's threads and a CUDA context


@dataclass(frozen=True)
class Job:
    """A call to be made in one of the processes: `module:function`, with arguments that can be pickled."""

    function: str
    arguments: tuple[Any, ...] = ()

    def __call__(self) -> Any:
        module, _, name = self.function.partition(":")
        return getattr(importlib.import_module(module), name)(*self.arguments)


@dataclass(frozen=True)
class Lost:
    """A job without a result, and why: its process died, or the framework itself raised an exception."""

    message: str


class Pool(AbstractContextManager["Pool"]):
    """`workers` processes, started as jobs need them, each of which calls `setup` once.

    environment  variables of the processes besides this one's own
    folder       for temporary files, removed at the end; also what a killed process leaves is in it
    """

    def __init__(self, workers: int, setup: Job | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.workers, self.setup, self.environment = workers, setup, dict(environment or {})
        self._members: list[_Member] = []
        self._temporary = tempfile.TemporaryDirectory(prefix=f"parity-pool-{os.getpid()}-", dir=processes.scratch())
        self.folder = self._temporary.name

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[int, Any | Lost]]:
        """(index of the job, its result or Lost) as jobs end; they are begun in the order given.

        A process that cannot be set up ends the pool: all jobs that are left are lost for the same reason."""
        waiting = list(enumerate(jobs))[::-1]
        while waiting or any(member.index is not None for member in self._members):
            idle = [member for member in self._members if member.index is None]
            while waiting and (idle or len(self._members) < self.workers):
                if not idle:
                    idle.append(self._start())
                idle.pop().begin(*waiting.pop())
            busy = {member.connection: member for member in self._members if member.index is not None}
            for connection in wait(list(busy)):
                member = busy[connection]  # type: ignore[index]
                index, result = member.answer()
                if member.ended:
                    self._members.remove(member)
                    member.process.join()
                    if not member.ready:
                        yield from ((left, result) for left, _ in reversed(waiting))
                        waiting = []
                if index is not None:
                    yield index, result

    def _start(self) -> _Member:
        ours, theirs = SPAWN.Pipe()
        environment = processes.child_environment(os.environ) | self.environment
        environment[processes.SCRATCH] = self.folder
        process = SPAWN.Process(target=_serve, args=(theirs, self.setup, processes.search_path()), daemon=False)
        with _changed(environment), _uninterrupted():
            process.start()
        theirs.close()
        self._members.append(_Member(process, ours))
        return self._members[-1]

    def __exit__(self, *_: object) -> None:
        """End the processes, with what they have started; wait for them, and remove their temporary files."""
        for member in self._members:
            if member.index is None:
                member.connection.close()  # it waits for a job, and ends where there is none
            else:
                member.end(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        for member in self._members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            member.end(signal.SIGKILL)
            member.process.join()
        self._members.clear()
        self._temporary.cleanup()


@dataclass(frozen=True)
class Part:
    """Jobs of a command that share a pool.

    read   (index of a job, its result or Lost) -> rows
    show   called with the rows of every job as it ends
    """

    jobs: Sequence[Job]
    read: Callable[[int, Any], list[Any]]
    show: Callable[[list[Any]], None]
    workers: int = 1
    setup: Job | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


def collect(part: Part, rows: list[Any]) -> None:
    """Append the rows of a part, in the order of its jobs; also of an interrupted one, which then raises again."""
    found: dict[int, list[Any]] = {}
    try:
        with Pool(min(part.workers, len(part.jobs)), part.setup, part.environment) as pool:
            for index, result in pool.run(part.jobs):
                found[index] = part.read(index, result)
                part.show(found[index])
    finally:
        rows += [row for index in sorted(found) for row in found[index]]


class _Member:
    """One process, the pipe to it, and the index of the job that it is at."""

    def __init__(self, process: Any, connection: Connection) -> None:
        self.process, self.connection = process, connection
        self.index: int | None = None
        self.ready = self.ended = False

    def begin(self, index: int, job: Job) -> None:
        self.index = index
        with suppress(BrokenPipeError, ConnectionResetError):  # it has died; `answer` reads that
            self.connection.send(job)

    def answer(self) -> tuple[int | None, Any]:
        """(index of the job that ended, result), None for a process that has just been set up."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            kind, value = "ended", Lost(f"its process {processes.describe_exit(self.process.exitcode)}")
        if kind == "ready":
            self.ready = True
            return None, None
        self.ended = kind == "ended"
        index, self.index = self.index, None
        return index, Lost(value) if kind == "raised" else value

    def end(self, number: int) -> None:
        """Signal the process, and whatever it has started in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        with suppress(ProcessLookupError):
            if self.process.is_alive():  # it may not have made its group yet
                os.kill(self.process.pid, number)


@contextmanager
def _changed(environment: Mapping[str, str]) -> Iterator[None]:
    """os.environ as given, for a process that is started inside of the block."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C is ignored inside of the block, and by a process that is started there: it is ended by us."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# ------------------------------------------------------------------------------------------------------ in the process


class _Ended(KeyboardInterrupt):
    """The process is to end: an exception, so that `finally` and atexit close what is open.

    Not SystemExit, which Hypothesis would take for a failure of what is judged."""


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt what the first one started
    raise _Ended


@roomy
def _serve(connection: Connection, setup: Job | None, path: list[str]) -> None:
    """Answer jobs until there are no more."""
    os.setpgid(0, 0)
    os.dup2(2, 1)  # stdout belongs to the result
    warnings.simplefilter("ignore")  # data are extreme on purpose
    signal.signal(signal.SIGTERM, _leave)
    faulthandler.enable()
    processes.claim_packages()
    sys.path[:] = path
    with suppress(_Ended, EOFError, BrokenPipeError):
        kind, value = _attempt(setup) if setup is not None else ("done", None)
        if kind == "raised":
            connection.send(("ended", Lost(str(value))))
            return
        connection.send(("ready", None))
        while True:
            connection.send(_attempt(connection.recv()))


def _attempt(call: Callable[[], Any]) -> tuple[str, Any]:
    """("done", result), or ("raised", the traceback), which the report shows in the job's row."""
    try:
        return "done", call()
    except Exception:
        return "raised", traceback.format_exc()

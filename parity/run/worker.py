"""A child process that loads and calls a user's function, so that a crash, a hang or a sticky CUDA error ends one case.

The case goes over as its string; the child builds the operands itself. Control messages are JSON lines on two pipes of
their own (the function may print, read stdin, or close both), results travel in a file.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from parity.run import runner as running
from parity.run.implementation import Implementation
from parity.run.loading import SpecError
from parity.run.processes import ROOT, scratch, search_path

START_SECONDS = 180.0
"""For the child to import torch on a loaded machine; not part of any case's time-out."""

CASE_SECONDS = 60.0
"""Default time-out of one case: enough for kernels that compile at their first call."""

# Our packages come from where they lie here, whatever files of the same names the module path leads to.
_BOOT = (
    "import sys, json; sys.path[:] = [sys.argv[1]]; import parity; sys.path[:] = json.loads(sys.argv[2]); "
    "from parity.run.processes import claim_packages; claim_packages(); "
    "from parity.run.serving import serve; serve(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])"
)


class WorkerDied(Exception):
    """The child ended or did not answer; the message is a sentence for the report."""


class Child:
    """One child process and the pipes to it. Starts on first use, and again after it has been stopped."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._send = self._receive = -1

    def start(self) -> None:
        """Start the process unless it runs; raises WorkerDied if it does not come up."""
        if self._process is not None and self._process.poll() is None:
            return
        self.stop()
        self._folder = tempfile.TemporaryDirectory(prefix="parity-", dir=scratch())
        child_reads, self._send = os.pipe()
        self._receive, child_writes = os.pipe()
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-X", "faulthandler", "-c", _BOOT, str(ROOT), json.dumps(search_path())]
                + [str(child_reads), str(child_writes), self._folder.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(child_reads, child_writes),
                start_new_session=True,  # what the function starts (compilers) ends with it
            )
        os.close(child_reads)
        os.close(child_writes)
        self.ask({"do": "hello"}, START_SECONDS)

    @property
    def pid(self) -> int | None:
        """Process id, None while it does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def log(self) -> Path:
        """File with what the child printed."""
        assert self._folder is not None
        return Path(self._folder.name) / "log"

    def ask(self, message: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a message and wait for its answer; WorkerDied if the child ends or `timeout` seconds pass."""
        try:
            os.write(self._send, json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise WorkerDied(self._obituary()) from error
        deadline, text = time.monotonic() + timeout, b""
        while not text.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._receive], [], [], left)[0]:
                self.stop()
                raise WorkerDied(f"no answer within {timeout:g} s, the process was stopped")
            part = os.read(self._receive, 1 << 16)
            if not part:
                raise WorkerDied(self._obituary())
            text += part
        return json.loads(text)

    def _obituary(self) -> str:
        assert self._process is not None
        try:
            code = self._process.wait(10)
        except subprocess.TimeoutExpired:
            code = None
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        self.stop()
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                what = f"the process was killed by {signal.Signals(-code).name}"
                return what + (f" ({' | '.join(lines[:3])[:400]})" if lines else "")
        return f"the process ended with code {code}" + (f" ({lines[-1][:300]})" if lines else "")

    def stop(self) -> None:
        """End the process, with whatever it started, and remove its folder."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
            os.close(self._send)
            os.close(self._receive)
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def result_path(self) -> str:
        """File that a result may be written to."""
        assert self._folder is not None
        return str(Path(self._folder.name) / "result.pt")


_shared: Child | None = None


def shared() -> Child:
    """The one child of this process, started on first use and stopped at exit; it can serve any number of functions."""
    global _shared
    if _shared is None:
        _shared = Child()
        atexit.register(_shared.stop)
    return _shared


def describe(spec: str, timeout: float = 120.0) -> dict[str, Any]:
    """Load a function in the child: its parameter names and its `parity_contract`. SpecError says why it cannot be."""
    child = shared()
    try:
        child.start()
        answer = child.ask({"do": "describe", "spec": spec}, timeout)
    except WorkerDied as error:
        raise SpecError(f"impl: importing {spec} failed: {error}") from error
    if "problem" in answer:
        raise SpecError(answer["problem"])
    return answer


class Worker:
    """Runs an implementation in the child process; the same interface as `runner.InProcess`."""

    def __init__(self, impl: Implementation, device: torch.device, timeout: float = CASE_SECONDS) -> None:
        if impl.spec is None:
            raise ValueError(f"{impl.name} is a built-in; a worker needs module:function or path/to/file.py:function")
        self.impl, self.device, self.timeout = impl, device, timeout
        self._child = shared()
        self._virgin: Child | None = None

    def companion(self) -> "Worker | None":
        """The runner of the function that the contract names for the dots of every head, or None."""
        if self.impl.contract.dots is None:
            return None
        return Worker(self.impl.accompanied(spec=self.impl.contract.dots), self.device, self.timeout)

    def run(self, case: Any, *, measure: bool = False, repeats: int = 1, dry: bool = False) -> running.Outcome:
        """One case in the child. The operands of the outcome are built here, after the function has answered."""
        outcome = self._ask(
            {"do": "run", "case": str(case), "measure": measure, "repeats": repeats, "dry": dry}, repeats
        )
        outcome.operands = self.impl.operation.build(case, self.device)
        return outcome

    def sequence(self, cases: Sequence[Any]) -> list[running.Outcome]:
        """Calls that follow each other in the child."""
        return self._many(self._child, [cases])[0]

    def fresh(self, sequences: Sequence[Sequence[Any]]) -> list[list[running.Outcome]]:
        """Each sequence in a process of its own: copies of a child that has loaded the function and never called it."""
        if self._virgin is None:
            self._virgin = Child()
            atexit.register(self._virgin.stop)
        return self._many(self._virgin, sequences, fresh=True)

    def _many(
        self, child: Child, sequences: Sequence[Sequence[Any]], fresh: bool = False
    ) -> list[list[running.Outcome]]:
        found = []
        for cases in sequences:
            message = {"do": "sequence", "cases": [str(case) for case in cases], "fresh": fresh}
            answer, tensors = self._answer(message, len(cases), child)
            results = answer["outcomes"] if answer else [{"error": str(tensors), "variants": ()} for _ in cases]
            outcomes = []
            for at, (case, fields) in enumerate(zip(cases, results, strict=False)):
                fields["variants"] = tuple(fields["variants"])
                output = tensors.get(str(at)) if answer else None
                operands = self.impl.operation.build(case, self.device)
                outcomes.append(running.Outcome(**fields, output=output, operands=operands))
            found.append(outcomes)
        return found

    def replay(self, wide: Any, narrow: Any) -> running.Outcome:
        """CUDA graph captured on one case and replayed on another, in the child."""
        outcome = self._ask({"do": "replay", "wide": str(wide), "narrow": str(narrow)}, 2)
        outcome.operands = self.impl.operation.build(narrow, self.device)
        return outcome

    def _ask(self, message: dict[str, Any], calls: int) -> running.Outcome:
        answer, tensors = self._answer(message, calls, self._child)
        if not answer:
            return running.Outcome(error=str(tensors))
        fields = answer["outcome"]
        fields["variants"] = tuple(fields["variants"])
        outcome = running.Outcome(**fields, output=tensors.get("output"))
        if tensors.get("differing") is not None:
            outcome.differing = (tensors["run"], tensors["differing"])
        if outcome.error is not None and self.device.type == "cuda":
            self._child.stop()  # a CUDA error stays with its process
        return outcome

    def _answer(self, message: dict[str, Any], calls: int, child: Child) -> tuple[dict[str, Any], Any]:
        """(what the child says, the tensors that it wrote); ({}, the reason) where it says nothing."""
        try:
            child.start()
            path = child.result_path()
            answer = child.ask(
                message
                | {"spec": self.impl.spec, "device": str(self.device), "path": path}
                | {"op": self.impl.op, "layout": self.impl.layout}
                | {"schedule_meta": self.impl.contract.schedule_meta},
                self.timeout + calls,
            )
        except WorkerDied as error:
            return {}, error
        return answer, torch.load(path, weights_only=True, map_location=self.device) if answer["tensors"] else {}

    def close(self) -> None:
        """Stop the child; the next use of any worker starts a new one."""
        self._child.stop()
        if self._virgin is not None:
            self._virgin.stop()
            self._virgin = None


def runner_for(impl: Implementation, device: torch.device, timeout: float = CASE_SECONDS) -> running.Runner:
    """The runner that suits an implementation: in process for a function at hand, else the worker."""
    return running.InProcess(impl, device) if impl.function is not None else Worker(impl, device, timeout)


@contextlib.contextmanager
def opened(impl: Implementation, device: torch.device, timeout: float = CASE_SECONDS) -> Iterator[running.Runner]:
    """`runner_for` as a context manager that closes what it opened."""
    found = runner_for(impl, device, timeout)
    try:
        yield found
    finally:
        found.close()

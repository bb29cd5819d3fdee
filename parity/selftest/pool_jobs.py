"""Jobs for the tests of the pool: its processes import this module, and nothing of pytest."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

OPENED: list[str] = []


def set_up(text: str) -> None:
    OPENED.append(text)


def crash_at_once() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def double(number: int) -> int:
    return 2 * number


def about() -> dict[str, object]:
    """What the process knows of itself."""
    names = ("OMP_NUM_THREADS", "PYTHONSAFEPATH", "PARITY_TEST", "PYTEST_ADDOPTS")
    import json

    print("this is not the result")
    return {
        "pid": os.getpid(),
        "opened": list(OPENED),
        "environment": {name: os.environ.get(name) for name in names},
        "last": sys.path[-1],
        "json": str(Path(json.__file__).parent),
        "torch": "torch" in sys.modules,
    }


def crash(number: int) -> int:
    """Killed by a signal, ended by a call of exit, or ended by an exception."""
    if number == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 2:
        os._exit(7)
    if number == 3:
        raise ZeroDivisionError("the framework's own fault")
    return number


def leave_traces(folder: str, clean: bool) -> None:
    """A temporary folder and a process of its own, then busy for long; `clean`: ends as a process should."""
    place = tempfile.TemporaryDirectory(prefix="parity-trace-", dir=os.environ["PARITY_SCRATCH"])
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "traces").write_text(f"{place.name}\n{child.pid}\n{os.getpid()}\n")
    if not clean:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        time.sleep(600)
    finally:
        Path(folder, "closed").write_text("yes")

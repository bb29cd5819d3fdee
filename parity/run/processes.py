"""What all processes that this software starts share: environment, module path, how their end is described."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRATCH = "PARITY_SCRATCH"
"""Environment variable: the folder of temporary files that whoever started the process will remove."""


def search_path() -> list[str]:
    """This process's module path with the current folder moved to its end, where it shadows nothing."""
    here = {"", ".", os.getcwd()}
    return [entry for entry in sys.path if entry not in here] + [os.getcwd()]


def claim_packages() -> None:
    """Import `reference` and `impl` from where this package lies, before anything else can go by their names: a user's
    `impl.py` may lie in the current folder, or beside the function that is judged."""
    for name in ("reference", "impl"):
        if name not in sys.modules:
            spec = PathFinder.find_spec(name, [str(ROOT)])
            assert spec is not None and spec.loader is not None
            sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])


def child_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """One thread per process, no foreign pytest options or plugins, this very package.

    The current folder must not come first on the path, or a user's `json.py` there would shadow a module. PYTHONPATH
    stays, with the place of this package behind it for a checkout that is not installed.
    """
    kept = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if (ROOT / "pyproject.toml").is_file():  # never site-packages: PYTHONPATH would put it before the stdlib
        paths.append(str(ROOT))
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def scratch() -> str | None:
    """Where large temporary files belong: the folder that the starter named, else shared memory where there is some."""
    return os.environ.get(SCRATCH) or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


def describe_exit(code: int | None) -> str:
    """`was killed by SIGSEGV` or `ended with exit code 3`."""
    if code is None:
        return "does not end"
    if code < 0 and -code in set(signal.Signals):
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def call(command: Sequence[str], output: int = 2) -> int:
    """Run a child to its end, its output on our stderr (1: our stdout); its exit code. It ends where we are ended."""
    sys.stderr.flush()
    environment = child_environment(os.environ)
    with subprocess.Popen(command, env=environment, stdout=output, stdin=subprocess.DEVNULL) as child:
        try:
            return child.wait()
        finally:
            child.terminate()  # nothing, where it has ended

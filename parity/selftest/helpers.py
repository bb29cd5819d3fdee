"""What self-tests of several rooms share: places, tables of mistakes and their sentences, other processes."""

import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
OFFICIAL = ROOT / "fixtures" / "official"
FAULTY = Path(__file__).with_name("faulty.py")
CPU = torch.device("cpu")


def refuses(error: type[BaseException], sentence: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """Asserts that the call raises `error` with a message in which the pattern `sentence` is found."""
    with pytest.raises(error, match=sentence):
        call(*arguments, **named)


def refusals(table: dict[str, Callable[..., Any]], error: type[BaseException] = ValueError) -> Callable[[str], None]:
    """A test per row of sentence (a pattern) and call: the call raises `error` with that sentence."""

    @pytest.mark.parametrize("sentence", table)
    def test(sentence: str) -> None:
        refuses(error, sentence, table[sentence])

    return test


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, for comparisons that see NaN payloads and signs of zero."""
    return x.contiguous().view(torch.uint8)


def python(code: str, **environment: str) -> str:
    """What the code prints when a new Python runs it, compiled kernels and not Triton's interpreter."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_INTERPRET")}
    kept |= {"PYTHONPATH": str(ROOT), "TRITON_DEFAULT_FP_FUSION": "1"} | environment
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_COMMANDS = """
import json, os, sys, tempfile
from parity.cli.main import main
answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    words, folder = json.loads(line)
    os.chdir(folder)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        os.dup2(out.fileno(), 1), os.dup2(err.fileno(), 2)
        try:
            code = main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        sys.stdout.flush(), sys.stderr.flush()
        texts = [file.seek(0) or file.read() for file in (out, err)]
    if "parity.run.worker" in sys.modules:  # the next function may be one of another folder
        sys.modules["parity.run.worker"].shared().stop()
    print(json.dumps([code, *texts]), file=answers, flush=True)
"""


class Commands:
    """Runs `parity` with given words in a process that is none of pytest's: one for all, since torch's import takes
    longer than most commands. It knows the modules of the folders `path`, and no setting of the tests' own."""

    def __init__(self, *path: Path) -> None:
        hidden = ("PYTEST_", "TRITON_", "GITHUB_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden) and name != "CI"}
        kept |= {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT))), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-c", _COMMANDS]
        self._process = subprocess.Popen(command, env=kept, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, *words: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """What `parity` answers when it is started in that folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps([words, str(folder)]), file=self._process.stdin, flush=True)
        assert select.select([self._process.stdout], [], [], 300)[0], f"no end of parity {' '.join(words)}"
        answer = self._process.stdout.readline()
        assert answer, f"the process ended with parity {' '.join(words)}"
        return subprocess.CompletedProcess(words, *json.loads(answer))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def tool(name: str) -> ModuleType:
    """A script of `tools/` as a module; tests of it are skipped where there is no checkout."""
    path = ROOT / "tools" / f"{name}.py"
    if not path.is_file():
        pytest.skip("not run: tools/ belongs to a checkout", allow_module_level=True)
    spec = importlib.util.spec_from_file_location(f"tools_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def exit_code(words: list[str]) -> int:
    """How `parity` ends with these words, whether the parser or the command ends it."""
    from parity.cli.main import main

    try:
        return main(words)
    except SystemExit as end:
        return int(end.code or 0)

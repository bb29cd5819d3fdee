"""What self-tests of several rooms share: places, tables of mistakes and their sentences, Python in a new process."""

import importlib.util
import os
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

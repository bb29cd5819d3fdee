"""What self-tests of several rooms share: places, tables of mistakes and their sentences, Python in a new process."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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

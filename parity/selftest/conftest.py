"""Decides on Triton's interpreter before any test module can import triton, and gives tests room for deep calls."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

from parity.run import interpreter
from parity.run.frames import roomy

interpreter.prepare("auto")

# A shell that starts the tests in the background has them ignore Ctrl-C, and commands that they start inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def commands() -> Iterator[Any]:
    """`parity` in another process, `helpers.Commands`."""
    from parity.selftest.helpers import Commands

    found = Commands()
    yield found
    found.close()


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        item.obj = roomy(item.obj)

"""Decides on Triton's interpreter before any test module can import triton, and gives tests room for deep calls."""

import pytest

from parity.run import interpreter
from parity.run.frames import roomy

interpreter.prepare("auto")


def pytest_itemcollected(item: pytest.Item) -> None:
    if isinstance(item, pytest.Function):
        item.obj = roomy(item.obj)

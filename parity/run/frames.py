"""Room on CPython's frame stack for what calls a great deal.

CPython keeps frames in chunks of 16 KB and gives a chunk back as soon as its first frame returns. A loop that happens
to stand at the end of a chunk then maps and unmaps memory at every call: 10,000 times for one interpreted kernel, more
than half of the time where two processes do it side by side.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

WORDS = 1 << 16
"""A frame of this size starts a chunk of twice as much, half of which is left to the frames above it."""


def roomy(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with half a megabyte of contiguous frame stack for all that it calls."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=WORDS)
    return wraps(function)(call)

"""Deep loops have room: no call maps memory, at whatever depth it stands."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from parity.run.frames import roomy

resource = pytest.importorskip("resource", reason="page faults are counted by this module of Unix")
pytestmark = pytest.mark.skipif(
    not hasattr(resource, "RUSAGE_THREAD"), reason="only Linux counts a thread's page faults"
)

CALLS = 400


def _leaf(a: int = 0, b: int = 0, c: int = 0, d: int = 0, e: int = 0, f: int = 0) -> int:
    return a


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def _faults_at(depth: int) -> int:
    """Page faults of CALLS calls made `depth` frames further down."""
    if depth:
        return _faults_at(depth - 1)
    before = _faults()
    for _ in range(CALLS):
        _leaf()
    return _faults() - before


def _worst() -> int:
    return max(_faults_at(depth) for depth in range(500))


def _bare() -> int:
    """The same on a new thread, whose stack of frames has no room but what CPython gives."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_worst).result()


def test_with_room_no_depth_maps_memory_at_every_call():
    assert roomy(_worst)() < CALLS / 4


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="seen on CPython 3.11 to 3.13")
def test_without_room_some_depth_does():
    assert _bare() >= CALLS / 4


def test_arguments_results_and_errors_pass_through():
    @roomy
    def quotient(a: float, *, b: float) -> float:
        """Of a and b."""
        return a / b

    assert quotient(6, b=3) == 2 and quotient.__name__ == "quotient" and quotient.__doc__ == "Of a and b."
    with pytest.raises(ZeroDivisionError):
        quotient(1, b=0)

"""A session limited in time: shares by weight, and what one check leaves goes to the others."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from parity.suite.clock import Clock


def test_shares_follow_the_weights_and_what_is_left_is_shared_again():
    clock = Clock(100.0)
    assert clock.share(1.0, 4.0) == pytest.approx(25.0, abs=0.5)
    assert clock.share(2.0, 4.0) == pytest.approx(50.0, abs=0.5)
    clock.end(1.0)
    clock.end(2.0)  # both at once: nobody has used any time
    assert clock.share(1.0, 4.0) == pytest.approx(100.0, abs=0.5)


def test_several_processes_have_their_time_each_but_none_more_than_is_left(tmp_path):
    clock = Clock(100.0, 8, str(tmp_path / "ended"))
    assert clock.share(1.0, 16.0) == pytest.approx(50.0, abs=0.5)
    assert clock.share(4.0, 16.0) == pytest.approx(100.0, abs=0.5)
    other = Clock(100.0, 8, str(tmp_path / "ended"), clock.started)
    other.end(12.0)
    assert clock.ended() == 12.0
    assert clock.share(1.0, 16.0) == pytest.approx(100.0, abs=0.5)


def test_nothing_is_left_after_the_end():
    clock = Clock(10.0, started=time.time() - 11.0)
    assert clock.share(1.0, 2.0) == 0.0
    clock.end(2.0)
    assert clock.share(0.0, 2.0) == 0.0


def test_lines_of_many_writers_stay_whole(tmp_path):
    ledger = str(tmp_path / "ended")
    clocks = [Clock(1.0, 8, ledger) for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda clock: [clock.end(0.5) for _ in range(200)], clocks))
    assert clocks[0].ended() == 8 * 200 * 0.5

"""The store's published modes give DeepSeek's recorded keys, bit for bit, and no other mode does."""

import pytest

from parity.build import host_store
from parity.selftest.helpers import CPU, OFFICIAL, tool

recorded_keys = tool("recorded_keys")
pytestmark = [
    pytest.mark.skipif(host_store.missing() is not None, reason=f"not executed: {host_store.missing()}"),
    pytest.mark.skipif(not OFFICIAL.is_dir(), reason="the recordings are not shipped with the package"),
]


@pytest.mark.parametrize("mode", recorded_keys.EQUAL, ids=lambda mode: mode.name)
def test_published_modes_equal_every_recorded_key(mode):
    counts = recorded_keys.compare(OFFICIAL, mode, CPU)
    assert counts.values >= 100_000
    assert counts.differing == 0


@pytest.mark.parametrize("mode", recorded_keys.NEAR, ids=lambda mode: mode.name)
def test_a_missing_step_shows(mode):
    counts = recorded_keys.compare(OFFICIAL, mode, CPU)
    assert counts.differing > counts.values // 200


def test_a_position_of_the_groups_last_token_shows():
    def late(pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache):
        host_store.store(recorded_keys.EQUAL[0], pooled, norm_weight, eps, positions + 3, rope_table, out_loc, kv_cache)

    assert recorded_keys.compare(OFFICIAL, recorded_keys.EQUAL[0], CPU, late).differing > 10_000


def test_recordings_hold_prefill_and_decode_keys():
    files = {keys.file for keys in recorded_keys.recorded_keys(OFFICIAL)}
    assert any(name.startswith("prefill") for name in files) and any(name.startswith("decode") for name in files)

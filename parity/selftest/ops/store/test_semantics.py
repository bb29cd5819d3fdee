"""Recall floors of stores: recorded for every mode, kept by it, and not by a store that does something else."""

import pytest
import torch

from impl.store_modes import MODES, Mode
from parity.build import host_store
from parity.domain.contract import Contract
from parity.ops.store import floors, semantics
from parity.ops.store.builtin import implementations
from parity.results import Status
from parity.run.implementation import Implementation
from parity.run.runner import InProcess
from parity.selftest.helpers import CPU

executed = pytest.mark.skipif(host_store.missing() is not None, reason=f"not executed: {host_store.missing()}")


def judged(mode: Mode, function=None):
    contract = Contract.from_dict(mode.contract, CPU)
    impl = Implementation("mine", "store", mode.layout, contract, function or host_store.function(mode))
    return semantics.judge_recall(InProcess(impl, CPU), semantics.case_of(4509, mode.layout, 7))


def test_floors_are_recorded_for_every_mode_and_length():
    found = semantics.floors()
    for mode in MODES:
        rows = found[semantics.key_of(Contract.from_dict(mode.contract, CPU))]
        assert sorted(map(int, rows)) == list(semantics.TOKENS)
        for row in rows.values():
            assert 0.8 < row["recall_floor"] < row["recall"] <= 1.0
            assert 0.0 <= row["regret"] < row["regret_ceiling"] < 0.05


def test_published_modes_lose_nothing():
    for name in ("bf16/published+fake_fp4", "fp8/pow2/published+fake_fp4", "fp4/published"):
        assert all(row["recall"] == 1.0 and row["regret"] == 0.0 for row in semantics.floors()[name].values())


@executed
def test_a_mode_keeps_its_floor_and_says_how_much_it_looked_at():
    verdict = judged(Mode("fp8_pow2", "published", True))
    assert verdict.passed and verdict.cells == semantics.ROWS * semantics.TOPK


@executed
@pytest.mark.parametrize("done", ["fused_fake_fp4", "published"])
def test_another_mode_does_not_keep_the_published_floor(done):
    other = next(mode for mode in MODES if mode.name == f"store_bf16_{done}")
    verdict = judged(Mode("bf16", "published", True), host_store.function(other))
    assert verdict.status is Status.FAILED
    assert "recall 0.9" in verdict.message and "floor 0.99" in verdict.message


@executed
def test_keys_at_the_position_of_the_groups_last_token_fall_below_any_floor():
    def late(pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache):
        table = torch.cat((rope_table[3:], rope_table[-3:]))
        from reference import rope
        from reference.config import FLASH

        table[positions.long()] = rope.rope_rows(FLASH, positions + 3)
        host_store.store(Mode("bf16", "fused"), pooled, norm_weight, eps, positions, table, out_loc, kv_cache)

    assert judged(Mode("bf16", "fused"), late).status is Status.FAILED


@executed
def test_nan_keys_are_no_selection():
    def nothing(kv_cache, **_):
        kv_cache.fill_(float("nan"))

    assert judged(Mode("bf16", "fused"), nothing).status is Status.FAILED


@executed
def test_recorded_floors_are_those_that_are_measured_here(monkeypatch):
    """One mode at one length, over all seeds; the others are regenerated the same way."""
    wanted = "bf16/fused"
    monkeypatch.setattr(floors, "TOKENS", (4509,))
    every = implementations(CPU)
    chosen = {name: impl for name, impl in every.items() if semantics.key_of(impl.contract) == wanted}
    monkeypatch.setattr("parity.ops.store.digests.implementations", lambda device: chosen)
    found = floors.record(CPU)["floors"]
    recorded = semantics.floors()[wanted]["4509"]
    assert found.keys() == {wanted} and found[wanted]["4509"].keys() == recorded.keys()
    for name, value in recorded.items():
        assert found[wanted]["4509"][name] == pytest.approx(value, abs=floors.ALLOWANCE["recall"]), name

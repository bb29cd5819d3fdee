"""Every planted fault of the store's source is rejected by the suite's checks, and the unchanged source is not."""

from dataclasses import replace

import pytest

from impl.store_modes import Mode
from parity.build import host_store
from parity.domain.contract import Contract
from parity.domain.profiles import profile
from parity.ops.check import checks_of, find_check
from parity.ops.store.case import StoreCase
from parity.ops.store.operands import build_store
from parity.results import Status
from parity.run.implementation import Implementation
from parity.run.operation import find
from parity.run.runner import InProcess
from parity.selftest.helpers import CPU
from parity.selftest.ops.store.faulty_source import FAULTS, MISSED_SHUFFLE, OVERRUN, StoreFault, faulty_source
from parity.suite.search import run_check

pytestmark = pytest.mark.skipif(host_store.missing() is not None, reason=f"not executed: {host_store.missing()}")
STORE = find("store")


def implementation(mode: Mode, built=None) -> Implementation:
    contract = Contract.from_dict(mode.contract, CPU)
    function = host_store.function(mode, built)
    return Implementation("store", "store", mode.layout, contract, function, kernel="cuda source on cpu")


def rejected_by(impl: Implementation, levels=("layout", "rounding")) -> str:
    """The first check that fails it, in the smoke profile, with its message; empty if none does."""
    smoke = replace(profile("smoke"), shrink_seconds=0.5, reduce_calls=20)
    for check in checks_of(STORE, levels):
        if check.name == "beyond_2gib":
            continue
        verdict = run_check(check, InProcess(impl, CPU), smoke).verdict
        assert verdict.status in (Status.PASSED, Status.FAILED, Status.ERROR, Status.NOT_RUN), verdict
        if verdict.status is not Status.PASSED:
            return f"{check.id}: {verdict.message}"
    return ""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_planted_fault_is_rejected(fault: StoreFault, tmp_path):
    built = host_store.build(faulty_source(fault, tmp_path), mode=fault.mode)
    found = rejected_by(implementation(fault.mode, built))
    assert found
    print(found)


@pytest.mark.parametrize("mode", dict.fromkeys(fault.mode for fault in FAULTS), ids=lambda mode: mode.name)
def test_unchanged_source_is_not(mode):
    assert rejected_by(implementation(mode)) == ""


def test_lanes_that_miss_a_shuffle_are_reported(tmp_path):
    built = host_store.build(faulty_source(MISSED_SHUFFLE, tmp_path), mode=MISSED_SHUFFLE.mode)
    found = rejected_by(implementation(MISSED_SHUFFLE.mode, built), ("layout",))
    assert "that lane" in found and "which has returned" in found


def test_the_machine_works_again_after_such_a_report(tmp_path):
    test_lanes_that_miss_a_shuffle_are_reported(tmp_path)
    assert rejected_by(implementation(MISSED_SHUFFLE.mode), ("layout",)) == ""


def test_failures_shrink_to_one_token(tmp_path):
    fault = next(fault for fault in FAULTS if fault.name == "scale one slot off")
    built = host_store.build(faulty_source(fault, tmp_path), mode=fault.mode)
    check = find_check("layout/keys", STORE)
    verdict = run_check(check, InProcess(implementation(fault.mode, built), CPU), profile("ci")).verdict
    assert verdict.status is Status.FAILED
    assert "ids=0 " in verdict.case + " " and "op=store" in verdict.case
    assert "out_loc does not name" in verdict.message and "scale of slot" in verdict.message


def test_overrun_is_seen_by_the_sanitizer(tmp_path):
    built = host_store.build(faulty_source(OVERRUN, tmp_path), mode=OVERRUN.mode, sanitised=True)
    operands = build_store(StoreCase(ids=tuple(range(8)), layout="fp8", pages=1))
    with pytest.raises(host_store.HostStoreError, match="AddressSanitizer"):
        host_store.store_sanitised(OVERRUN.mode, **operands.kwargs(), built=built)

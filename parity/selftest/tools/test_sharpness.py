"""What the verified model is worth, on a GPU that the stored models play."""

from parity.results import Status, Verdict
from parity.selftest.helpers import CPU, tool

sharpness = tool("sharpness")


def test_three_faults_that_only_the_model_sees():
    said: list[str] = []
    found = sharpness.report(CPU, said.append, requests=1)
    assert found["exit"] == 0 and found["simulated"], said
    table = found["tables"][0]
    assert table["before"] > 1e-2 and table["after"] < 1e-4
    faults = {trial["name"]: trial for trial in table["trials"] if trial["wrong"]}
    assert len(faults) == 3
    for name, trial in faults.items():
        assert (trial["bound"]["status"], trial["verified"]["status"]) == ("passed", "failed"), name


def test_a_kernel_that_is_wrong_for_both_is_no_evidence():
    failed, passed = (Verdict(status, "rounding", "x") for status in (Status.FAILED, Status.PASSED))
    assert not sharpness.Trial("x", True, failed, failed).shown
    assert not sharpness.Trial("x", True, passed, passed).shown
    assert sharpness.Trial("x", True, passed, failed).shown

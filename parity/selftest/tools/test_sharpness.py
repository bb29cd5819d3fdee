"""What the verified model is worth, on a GPU that the stored models play; and which contracts it may sharpen."""

from parity.domain.contract import Contract
from parity.numerics.arithmetic import Grouped
from parity.results import Status, Verdict
from parity.selftest.helpers import CPU, tool
from parity.tensorcore.probe import Verified

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


def test_only_a_verified_model_sharpens_a_contract():
    contract = Contract.default("fp8", "cuda", capability=(9, 0))
    good = Verified("e4m3", Grouped(32, 13, 13), True, 65_536, 0, "sm_90 e4m3")
    sharp = sharpness.verified_contract(contract, [good])
    assert sharp.dot_verified and sharp.describe_dot() == "sm_90 e4m3 grouped(32, 13, 13), verified"
    for bad in (
        good._replace(verified=False),
        good._replace(operand="bf16"),
        good._replace(model=Grouped(32, 14, 13)),
    ):
        assert sharpness.verified_contract(contract, [bad]) == contract
    assert sharpness.verified_contract(Contract("fp8"), [good]) == Contract("fp8")

"""Level resources: does it stay in memory, and run at every size? One test per (implementation, check)."""


def test_resources(parity_judge):
    parity_judge()

"""Level resources: does it stay in memory, and run at every size? A test an implementation and check."""


def test_resources(parity_judge):
    parity_judge()

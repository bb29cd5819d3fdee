"""Level rounding: is every logit as exact as its declared arithmetic allows? One test per (implementation, check)."""


def test_rounding(parity_judge):
    parity_judge()

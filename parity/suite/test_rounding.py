"""Level rounding: is every logit as exact as its declared arithmetic allows? A test an implementation and check."""


def test_rounding(parity_judge):
    parity_judge()

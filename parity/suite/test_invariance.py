"""Level invariance: is the result the same when it must not change? A test an implementation and check."""


def test_invariance(parity_judge):
    parity_judge()

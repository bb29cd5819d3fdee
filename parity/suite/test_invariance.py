"""Level invariance: is the result the same when it must not change? One test per (implementation, check)."""


def test_invariance(parity_judge):
    parity_judge()

"""Level layout: does every byte come from, and go to, the right place? One test per (implementation, check)."""


def test_layout(parity_judge):
    parity_judge()

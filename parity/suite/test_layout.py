"""Level layout: does every byte come from, and go to, the right place? A test an implementation and check."""


def test_layout(parity_judge):
    parity_judge()

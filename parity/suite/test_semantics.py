"""Level semantics: does it select what DeepSeek's reference selects? A test an implementation and check."""


def test_semantics(parity_judge):
    parity_judge()

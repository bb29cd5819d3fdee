"""Level selection: are the chosen slots a correct top-k? One test per (implementation, check)."""


def test_selection(parity_judge):
    parity_judge()

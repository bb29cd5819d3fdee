"""Level selection: are the chosen slots a correct top-k? A test an implementation and check."""


def test_selection(parity_judge):
    parity_judge()

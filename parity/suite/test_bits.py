"""Level bits: are dots and logits what the card's verified arithmetic predicts? A test an implementation and check."""


def test_bits(parity_judge):
    parity_judge()

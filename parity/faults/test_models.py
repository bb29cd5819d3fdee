"""Every fault model that was asked for must be rejected by the suite, and every correct implementation accepted."""


def test_model(parity_model: str, parity_score) -> None:  # type: ignore[no-untyped-def]
    parity_score(parity_model)

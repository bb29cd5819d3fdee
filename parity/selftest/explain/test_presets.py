"""Every preset at a real shape, under `pytest --parity-profile nightly`: stable over seeds, complete, and in time."""

import pytest

from parity.explain.choices import PRESETS, preset
from parity.explain.explain import Settings, explain

SECONDS = 120.0  # on two cores without a card


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "published"])
def test_presets_give_stable_shares(name: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--parity-profile", None) != "nightly":
        pytest.skip("two minutes a preset: runs under --parity-profile nightly")
    first, second = (explain(preset("published"), preset(name), Settings(seed=seed)) for seed in (0, 1))
    by_name = {entry["choice"]: entry["share"]["loss"] for entry in second["choices"]}
    for entry in first["choices"]:
        a, b = entry["share"]["loss"], by_name[entry["choice"]]
        assert abs(a["mean"] - b["mean"]) <= a["half"] + b["half"], entry["choice"]
    for report in (first, second):
        total = sum(entry["share"]["loss"]["mean"] for entry in report["choices"])
        assert total == pytest.approx(report["total"]["loss"]["mean"])
        assert report["seconds"] < SECONDS

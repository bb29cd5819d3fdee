"""What a run says about where it ran."""

import re

import pytest
import torch

from parity.run import device


@pytest.fixture(autouse=True)
def asked_anew():
    device.commit.cache_clear()
    yield
    device.commit.cache_clear()


def test_the_commit_is_the_checkouts_unless_it_is_named(monkeypatch):
    monkeypatch.delenv("PARITY_COMMIT", raising=False)
    found = device.commit()
    assert found is None or re.fullmatch(r"[0-9a-f]{40}\+?", found)
    device.commit.cache_clear()
    monkeypatch.setenv("PARITY_COMMIT", "0123abc")
    assert device.provenance(torch.device("cpu"))["commit"] == "0123abc"

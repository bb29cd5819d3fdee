"""Counting bytes, choosing a device, and saying where numbers come from."""

import json
import re

import torch

from parity.run import device, memory
from parity.selftest.helpers import CPU, refuses


def test_the_peak_is_what_lives_at_once():
    with memory.peak_bytes(CPU) as peak:
        a = torch.empty(1000)
        del a
        b, c = torch.empty(500), torch.empty(700)
        b[0] = c[0]
    assert peak.bytes == 4 * 1200
    assert "4000 bytes" in peak.largest and "[1000]" in peak.largest


def test_views_and_inputs_cost_nothing():
    given = torch.zeros(1 << 20)
    with memory.peak_bytes(CPU) as peak:
        given.view(1024, 1024)[::2].t().add_(1)
    assert peak.bytes == 0 and peak.largest == ""


def test_the_gather_of_the_seed_story_is_named_by_its_formula():
    assert memory.gather_bytes(4096, 344, 64 * 256) == 23_085_449_216
    assert memory.result_bytes(4096, 344 * 64) == 360_710_144


def test_devices_are_chosen_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.resolve("auto") == device.resolve("cpu") == CPU
    refuses(ValueError, "no CUDA device", device.resolve, "cuda")
    refuses(ValueError, "expected one of auto, cpu, cuda, got 'tpu'", device.resolve, "tpu")


def test_provenance_is_plain_json_with_the_checkouts_commit_unless_it_is_named(monkeypatch):
    monkeypatch.setattr(device, "commit", device.commit.__wrapped__)  # without the cache
    monkeypatch.delenv("PARITY_COMMIT", raising=False)
    found = device.provenance(CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__ and found["architecture"] == "cpu" and found["driver"] is None
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{40}\+?", found["commit"])
    monkeypatch.setenv("PARITY_COMMIT", "0123abc")
    assert device.provenance(CPU)["commit"] == "0123abc"

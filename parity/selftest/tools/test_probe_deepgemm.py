"""DeepGEMM's kernel as a unit, on a stand-in that computes its logits through a known model."""

import pytest
import torch

from parity.numerics.arithmetic import Grouped
from parity.selftest.helpers import tool
from parity.tensorcore.probe_check import probe

probe_deepgemm = tool("probe_deepgemm")
MODEL = Grouped(32, 13, 13)


def stand_in(model):
    """``fp8_mqa_logits`` on the CPU: keys outside a row's range hold NaN, and the result is wider than the keys."""

    def logits(q, keys, weights, starts, ends):
        k, scales = keys
        out = torch.full((q.shape[0], k.shape[0] + 8), float("nan"))
        for row in range(q.shape[0]):
            span, heads = slice(int(starts[row]), int(ends[row])), weights[row].nonzero()[:, 0]
            dots = model.exact_dot(q[row, heads][None], k[span][None])[0]
            out[row, span] = (dots.relu() * weights[row, heads][:, None]).sum(0) * scales[span]
        return out

    return logits


@pytest.mark.parametrize("tiles", [1, 3])
def test_every_dot_comes_back_with_its_sign(tiles, monkeypatch):
    monkeypatch.setattr(probe_deepgemm, "TILES", 2)
    unit = probe_deepgemm.deepgemm_unit(stand_in(MODEL), "cpu")
    generator = torch.Generator().manual_seed(1)
    a = unit.cast(torch.randn(tiles, probe_deepgemm.KEYS, 128, generator=generator))
    b = unit.cast(torch.randn(tiles, probe_deepgemm.HEADS, 128, generator=generator))
    got = unit.dot(a, b)
    assert torch.equal(got, MODEL.exact_dot(a, b)) and (got < 0).any() and (got > 0).any()


@pytest.mark.parametrize("model", [MODEL, Grouped(32, 13, 13, running=False)])
def test_the_probe_finds_the_model_behind_the_logits(model):
    finding = probe(probe_deepgemm.deepgemm_unit(stand_in(model), "cpu"), tiles=1)
    assert finding.model == model, "\n".join(finding.lines())

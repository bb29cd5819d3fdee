"""DeepGEMM's kernel behind the probe, on a stand-in that computes its logits through a known model."""

import pytest
import torch

from parity.numerics.arithmetic import Grouped
from parity.selftest.helpers import seeded
from parity.tensorcore import probe_deepgemm
from parity.tensorcore.probe_check import probe
from parity.tensorcore.probe_deepgemm import HEADS, KEYS, deepgemm_card, main

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
    gpu, generator = deepgemm_card(stand_in(MODEL), "cpu"), seeded(1)
    a, b = (gpu.cast(torch.randn(tiles, rows, 128, generator=generator)) for rows in (KEYS, HEADS))
    got = gpu.dot(a, b)
    assert torch.equal(got, MODEL.exact_dot(a, b)) and (got < 0).any() and (got > 0).any()


@pytest.mark.parametrize("model", [MODEL, Grouped(32, 13, 13, running=False)])
def test_the_probe_finds_the_model_behind_the_logits(model):
    finding = probe(deepgemm_card(stand_in(model), "cpu"), tiles=1)
    assert finding.model == model, "\n".join(finding.lines())


def test_without_a_gpu_it_says_so(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err

"""Replay of recordings: they pass, each rule rejects its nearest wrong answer, what does not fit is named."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from parity import recorded
from parity.recorded import rows as rules_of
from parity.recorded.files import Recording
from parity.recorded.replay import replay_recording
from parity.selftest.helpers import OFFICIAL
from parity.selftest.recorded.recordings import ENTRIES, opened, shared_params

PLANTED = ("prefill_0005_h8_b3", "prefill_0257_h8_b3", "decode_p0001_n12_h8", "decode_p0253_n08_h8",
           "fp8wq_p0064_n05_h8", "quirk_reused_state", "unit_fp4", "unit_stages")  # fmt: skip


@pytest.fixture(scope="module")
def replayed() -> list[recorded.Row]:
    return recorded.replay(OFFICIAL)


def test_every_recording_passes_and_every_tensor_is_accounted_for(replayed: list[recorded.Row]) -> None:
    assert recorded.passed(replayed)
    listed = {(entry["file"], tensor["name"]) for entry in ENTRIES.values() for tensor in entry["tensors"]}
    assert {(row.file, row.tensor) for row in replayed} == listed and len(replayed) == len(listed)
    assert not any(row.differing for row in replayed if row.rule == rules_of.BITS)
    printed = recorded.table(replayed)
    assert "prefill.k.pooled" in printed and "0 not allowed" in printed and "0 unknown tensors" in printed


def test_the_selection_covers_every_stage_and_rule(replayed: list[recorded.Row]) -> None:
    stages = {row.tensor.partition(".")[2] for row in replayed if row.tensor.startswith(("prefill.", "decode."))}
    wanted = "k.proj_kv k.proj_score k.pooled k.normed k.roped k.hadamard k.fp4 k.fp4_exp q.proj q.roped q.hadamard"
    wanted += " q.fp4 q.fp4_exp w.proj w.scaled s.dot s.logits s.masked topk"
    assert stages >= set(wanted.split())
    judged = {value for name, value in vars(rules_of).items() if name.isupper() and isinstance(value, str)}
    assert {row.rule for row in replayed} == judged - {rules_of.UNKNOWN, rules_of.MISSING, rules_of.DAMAGED}


def test_the_selection_is_small() -> None:
    assert sum(path.stat().st_size for path in OFFICIAL.iterdir()) <= 10_000_000


def nearest_wrong(name: str, rule: str, x: torch.Tensor, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor with one value replaced by the nearest that its rule must not allow."""
    x = x.clone()
    flat = x.view(-1)
    if rule == rules_of.VALUE:
        first = x.view(-1, x.shape[-1])[-1]  # the last row sees the most keys
        masked = tensors[name.replace("topk", "s.logits" if name.startswith("decode") else "s.masked")]
        scores = masked.reshape(-1, masked.shape[-1])[-1].float().nan_to_num(nan=-torch.inf)
        left_out = scores.clone()
        left_out[first[first >= 0].long()] = -torch.inf
        best = int(left_out.argmax())
        if left_out[best] > -torch.inf and left_out[best] < scores[first[0]]:
            first[0] = best  # the best key is dropped for one outside
        else:
            first[0] = first[1] if first.numel() > 1 else -1  # one key twice, or none at all
        return x
    if not x.is_floating_point():
        flat[-1] += 1
        return x
    size = flat.abs().nan_to_num(posinf=0)
    if name == "prefill.s.logits":  # rows without a recorded query are not judged by this stage
        judged = torch.isin(tensors["prefill.logit_rows"], tensors["prefill.rows"])
        size = (size.view(x.shape) * judged[:, None]).view(-1)
    index = int(size.argmax())
    if rule == rules_of.CHAIN:
        # The nearest other stored key: the next grid value of one channel.
        flat[index] = flat[index] * 0.75 if flat[index].abs().log2() % 1 == 0 else flat[index] * 2 / 3
    elif x.dtype == torch.float32 and rule == rules_of.GEMM:
        flat[index] *= 1 + 2.0**-10  # far inside bf16's last place, far outside float32's sum of 256 products
    elif rule == rules_of.TABLE:
        step = torch.nextafter(flat[index], torch.zeros(()))
        flat[index] = torch.nextafter(torch.nextafter(step, torch.zeros(())), torch.zeros(()))
    else:
        integer = flat.view(torch.int16 if x.element_size() == 2 else torch.int32)
        integer[index] += 1
    return x


@pytest.mark.parametrize("name", PLANTED)
def test_each_stage_rejects_its_nearest_wrong_answer(name: str) -> None:
    recording = opened(name)
    params = shared_params(recording)
    judged = [row for row in replay_recording(recording, params) if row.rule != rules_of.INPUT and row.values]
    assert judged
    for row in judged:
        tensors = dict(recording.tensors)
        tensors[row.tensor] = nearest_wrong(row.tensor, row.rule, tensors[row.tensor], tensors)
        after = replay_recording(Recording(recording.entry, tensors), params)
        found = {other.tensor: other for other in after}[row.tensor]
        assert found.rejected >= 1, (row.tensor, row.rule)
        assert found.detail and not recorded.passed(after)


def test_unknown_tensors_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    recording = opened("prefill_0005_h8_b3")
    tensors = recording.tensors | {"prefill.k.extra": torch.zeros(3), "prefill.topk_all": torch.zeros(1)}
    rows = replay_recording(Recording(recording.entry, tensors), shared_params(recording))
    assert [row.tensor for row in rows if row.rule == rules_of.UNKNOWN] == ["prefill.k.extra", "prefill.topk_all"]
    assert not recorded.passed(rows)
    assert "UNKNOWN prefill_0005_h8_b3.safetensors: prefill.k.extra" in recorded.table(rows)


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.pop(name)


def having(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({name: change(tensors[name])})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("prefill_0005_h8_b3", without("prefill.q.fp4"), "lacks the tensor prefill.q.fp4, which other tensors"),
        ("prefill_0005_h8_b3", without("prefill.x"), "lacks the tensor prefill.x"),
        ("decode_p0001_n12_h8", without("state.kv_after_prefill"), "lacks the tensor state.kv_after_prefill"),
        ("prefill_0005_h8_b3", having("prefill.rows", lambda x: torch.tensor([3, 1])), "prefill.rows must hold asc"),
        ("prefill_0005_h8_b3", having("prefill.x", lambda x: x[:, :4]), r"prefill.x is \[3, 4, 256\]"),
        ("prefill_0005_h8_b3", having("prefill.topk", lambda x: x[..., :0]), "prefill.topk has shape"),
        ("prefill_0005_h8_b3", having("prefill.k.fp4", torch.Tensor.float), "prefill.k.fp4 is torch"),
        ("decode_p0001_n12_h8", having("decode.x", lambda x: x[..., :8]), "do not fit each other"),
        ("quirk_reused_state", having("x", lambda x: x[:, :9]), "tensor x must have 37 tokens"),
        ("params_h8_d256", without("param.ape"), "tensor param.ape is missing"),
    ],
)
def test_tensors_that_do_not_fit(name: str, change: Callable[[dict[str, Any]], None], words: str) -> None:
    recording = opened(name)
    tensors = dict(recording.tensors)
    params = shared_params(recording) if not name.startswith("params") else {}
    change(tensors)
    rows = replay_recording(Recording(recording.entry, tensors), params)
    assert any(re.search(words, row.detail) for row in rows if row.rule == rules_of.MISSING)
    assert {row.tensor for row in rows if row.tensor} == tensors.keys() and not any(row.rejected for row in rows)

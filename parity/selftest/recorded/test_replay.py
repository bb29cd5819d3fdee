"""`parity recorded`: recordings pass, each rule rejects its nearest wrong answer, bad folders get a sentence."""

import hashlib
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save

from parity import recorded
from parity.recorded import rows as rules_of
from parity.recorded import rules
from parity.recorded.files import Recording, RecordingError, read_file, read_index
from parity.recorded.replay import replay_recording
from parity.recorded.rules import Approximate
from parity.selftest.helpers import OFFICIAL, bits, refuses, seeded
from reference import compressor, formats, rope
from reference.config import TINY
from reference.hadamard import hadamard
from reference.indexer import IndexerParams

ENTRIES = {entry["file"].removesuffix(".safetensors"): entry for entry in read_index(OFFICIAL)}
PLANTED = ("prefill_0005_h8_b3", "prefill_0257_h8_b3", "decode_p0001_n12_h8", "decode_p0253_n08_h8",
           "fp8wq_p0064_n05_h8", "quirk_reused_state", "unit_fp4", "unit_stages")  # fmt: skip


def opened(name: str) -> Recording:
    return read_file(OFFICIAL, ENTRIES[name])


def shared_params(recording: Recording) -> dict[str, IndexerParams]:
    name = recording.entry.get("params") or recording.entry.get("config", {}).get("params")
    return {name: IndexerParams.from_tensors(opened(f"params_{name}").tensors)} if name else {}


@pytest.fixture(scope="module")
def rows() -> list[recorded.Row]:
    return list(recorded.replay(OFFICIAL))


def test_every_recording_passes_and_every_tensor_is_accounted_for(rows, capsys) -> None:
    assert recorded.passed(rows)
    listed = {(entry["file"], tensor["name"]) for entry in ENTRIES.values() for tensor in entry["tensors"]}
    assert {(row.file, row.stage) for row in rows} == listed and len(rows) == len(listed)
    for row in rows:
        assert row.rule not in (rules_of.BITS, rules_of.CHAIN) or row.rejected == 0
        assert row.rule != rules_of.BITS or row.differing == 0
    assert recorded.main_replay(OFFICIAL) == 0
    printed = capsys.readouterr().out
    assert "prefill.k.pooled" in printed and "0 not allowed" in printed and "0 unknown tensors" in printed


def test_the_selection_covers_every_stage_and_rule(rows) -> None:
    stages = {row.stage.partition(".")[2] for row in rows if row.stage.startswith(("prefill.", "decode."))}
    wanted = "k.proj_kv k.proj_score k.pooled k.normed k.roped k.hadamard k.fp4 k.fp4_exp q.proj q.roped q.hadamard"
    wanted += " q.fp4 q.fp4_exp w.proj w.scaled s.dot s.logits s.masked topk"
    assert stages >= set(wanted.split())
    used = ["BITS", "ROPE", "GEMM", "POOL", "CHAIN", "VALUE", "TABLE", "INPUT"]
    assert {row.rule for row in rows} == {getattr(rules_of, name) for name in used}
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
        tensors[row.stage] = nearest_wrong(row.stage, row.rule, tensors[row.stage], tensors)
        after = replay_recording(Recording(recording.entry, tensors), params)
        found = {other.stage: other for other in after}[row.stage]
        assert found.rejected >= 1, (row.stage, row.rule)
        assert found.detail and not recorded.passed(after)


def test_unknown_tensors_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    recording = opened("prefill_0005_h8_b3")
    tensors = recording.tensors | {"prefill.k.extra": torch.zeros(3), "prefill.topk_all": torch.zeros(1)}
    rows = replay_recording(Recording(recording.entry, tensors), shared_params(recording))
    assert [row.stage for row in rows if row.rule == rules_of.UNKNOWN] == ["prefill.k.extra", "prefill.topk_all"]
    assert not recorded.passed(rows)
    assert "UNKNOWN prefill_0005_h8_b3.safetensors: prefill.k.extra" in recorded.table(rows)


@pytest.mark.parametrize(
    ("name", "tensor", "change", "sentence"),
    [
        ("prefill_0005_h8_b3", "prefill.q.fp4", None, "lacks the tensor prefill.q.fp4, which other tensors"),
        ("prefill_0005_h8_b3", "prefill.x", None, "lacks the tensor prefill.x"),
        ("decode_p0001_n12_h8", "state.kv_after_prefill", None, "lacks the tensor state.kv_after_prefill"),
        ("prefill_0005_h8_b3", "prefill.rows", lambda x: torch.tensor([3, 1]), "prefill.rows must hold asc"),
        ("prefill_0005_h8_b3", "prefill.x", lambda x: x[:, :4], r"prefill.x is \[3, 4, 256\]"),
        ("prefill_0005_h8_b3", "prefill.topk", lambda x: x[..., :0], "prefill.topk has shape"),
        ("prefill_0005_h8_b3", "prefill.k.fp4", torch.Tensor.float, "prefill.k.fp4 is torch"),
        ("decode_p0001_n12_h8", "decode.x", lambda x: x[..., :8], "do not fit each other"),
        ("quirk_reused_state", "x", lambda x: x[:, :9], "tensor x must have 37 tokens"),
        ("params_h8_d256", "param.ape", None, "tensor param.ape is missing"),
    ],
)
def test_tensors_that_do_not_fit(name: str, tensor: str, change: Any, sentence: str) -> None:
    recording = opened(name)
    tensors = dict(recording.tensors)
    params = shared_params(recording) if not name.startswith("params") else {}
    old = tensors.pop(tensor)
    if change is not None:
        tensors[tensor] = change(old)
    sentence = rf"^{name}.safetensors: .*{sentence}"
    refuses(RecordingError, sentence, replay_recording, Recording(recording.entry, tensors), params)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder: a case, its parameters and a unit."""
    names = ["params_h8_d256", "prefill_0005_h8_b3", "unit_stages"]
    for name in names:
        shutil.copy(OFFICIAL / f"{name}.safetensors", tmp_path)
    return write_index(tmp_path, [ENTRIES[name] for name in names])


def write_index(folder: Path, entries: list[dict[str, Any]]) -> Path:
    (folder / "index.json").write_text(json.dumps({"format": 1, "files": entries}))
    return folder


def write_data(path: Path, entry: dict[str, Any], data: bytes) -> None:
    """Writes a file with an entry of the index that agrees with its digest."""
    path.write_bytes(data)
    entry["sha256"], entry["bytes"] = hashlib.sha256(data).hexdigest(), len(data)


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert recorded.main_replay(folder) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("parity recorded: ")
    return printed.err


def test_json_and_exit_codes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder / "out.json"
    assert recorded.main_replay(folder, out) == 0
    report = json.loads(out.read_text())
    assert report["passed"] is True and len(report["rows"]) == len(recorded.replay(folder))
    assert {"file", "stage", "rule", "values", "differing", "rejected"} <= report["rows"][0].keys()
    # A disagreement: the file is intact by its own index, its content is wrong.
    path = folder / "unit_stages.safetensors"
    tensors = load_file(path)
    tensors["hadamard.out"].view(torch.int16)[0, 0] += 1
    entries = read_index(folder)
    write_data(path, entries[2], save(tensors))
    for tensor in entries[2]["tensors"]:
        tensor.pop("sha256_16")
    write_index(folder, entries)
    capsys.readouterr()
    assert recorded.main_replay(str(folder), str(out)) == 1
    assert "NOT ALLOWED unit_stages.safetensors: hadamard.out: 1 values, first at [0, 0]" in capsys.readouterr().out
    assert json.loads(out.read_text())["passed"] is False
    assert recorded.main_replay(folder, folder / "absent" / "out.json") == 2
    assert "cannot be written" in capsys.readouterr().err


def test_damaged_files_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "prefill_0005_h8_b3.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"{path}: has {len(data) - 1} bytes, index.json says {len(data)}" in refused(folder, capsys)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{path}: has sha256 " in refused(folder, capsys)
    path.unlink()
    assert f"{path}: cannot be read (No such file or directory)" in refused(folder, capsys)


def test_damage_that_the_digest_agrees_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "prefill_0005_h8_b3.safetensors"
    entries = read_index(folder)

    def rewritten(data: bytes) -> str:
        write_data(path, entries[1], data)
        return refused(write_index(folder, entries), capsys)

    data = path.read_bytes()
    at = data.index(bits(load_file(path)["prefill.x"]).numpy().tobytes())
    assert f"{path}: is not a safetensors file" in rewritten(data[: len(data) // 2])
    assert f"{path}: is not a safetensors file" in rewritten(b"")
    assert f"{path}: tensor prefill.x has other bytes" in rewritten(data[:at] + bytes(16) + data[at + 16 :])
    entries[1]["tensors"] = [t for t in entries[1]["tensors"] if t["name"] != "prefill.qr"]
    assert f"{path}: holds the tensor prefill.qr, which index.json does not list" in rewritten(data)
    entries[1]["tensors"] += [{"name": "prefill.qr", "dtype": "bfloat16", "shape": [1]}]
    assert f"{path}: tensor prefill.qr is bfloat16 [3, 5, 128], index.json says bfloat16 [1]" in rewritten(data)
    entries[1]["tensors"][-1]["name"] = "prefill.z"
    assert f"{path}: lacks the tensor prefill.z that index.json lists" in rewritten(data)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda entries: entries.pop(0), "params_h8_d256.safetensors: is not listed in index.json"),
        (lambda entries: entries.append(entries[0]), "lists params_h8_d256.safetensors more than once"),
        (lambda entries: entries[0].pop("sha256"), "an entry of 'files' lacks the field sha256"),
        (lambda entries: entries[0].update(kind="sound"), "has kind 'sound', expected one of params"),
        (lambda entries: entries[1].pop("config"), "prefill_0005_h8_b3.safetensors: its entry .* lacks the field conf"),
        (lambda entries: entries[1].update(config=[]), "field config of its entry must be an object"),
        (lambda entries: entries[1]["config"].pop("dim"), "its config in index.json lacks the field 'dim'"),
        (lambda entries: entries[1]["config"].update(index_head_dim=64), "head_dim must be 128, got 64"),
        (lambda entries: entries[1]["config"].update(params="none"), "wants the parameters 'none', which no file"),
        (lambda entries: entries[1].update(prefill_len="5"), "field prefill_len of its entry must be a count"),
        (lambda entries: entries.clear(), "must list at least one file"),
    ],
)
def test_bad_index_entries(folder: Path, change: Any, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    entries = json.loads((folder / "index.json").read_text())["files"]
    change(entries)
    assert re.search(words, refused(write_index(folder, entries), capsys))


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ('{"format": 2}', "must be an object of format 1"), (None, "cannot be read")],
)
def test_bad_index(folder: Path, text: str | None, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "index.json"
    path.unlink() if text is None else path.write_text(text)
    assert f"{path}: {words}" in refused(folder, capsys)


# The rules by themselves.


def test_bits_sees_signs_of_zero_and_pairs_nan() -> None:
    x = torch.tensor([0.0, torch.nan, 1.0])
    assert rules.bits(x, x.clone()) == rules.Judged(3, 0, 0)
    assert rules.bits(x, torch.tensor([-0.0, torch.nan, 1.0])).rejected == 1
    assert rules.bits(x, torch.tensor([0.0, 2.0, torch.nextafter(torch.tensor(1.0), x[0])])).rejected == 2
    refuses(ValueError, r"expected torch.float32 \[2\]", rules.bits, x, x[:2])


def test_interval_allows_the_roundings_of_its_ends_only() -> None:
    one, place = torch.tensor([1.0], dtype=torch.float64), 2.0**-7
    tie, near = (Approximate(one + place / 2 - less, one * 1e-9) for less in (0.0, 1e-6))
    for known, got, rejected in (
        *((tie, 1.0, 0), (tie, 1 + place, 0), (tie, 1 - place / 2, 1), (tie, 1 + 2 * place, 1)),
        *((near, 1 + place, 1), (near, torch.nan, 1)),
    ):
        assert rules.interval(torch.tensor([got]).bfloat16(), known).rejected == rejected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20), spread=st.sampled_from([0.1, 1.0, 10.0, 60.0]))
def test_pool_and_norm_errors_hold_and_are_not_loose(seed: int, spread: float) -> None:
    generator = seeded(seed)
    kv = torch.randn(5, 8, 128, generator=generator)
    score = torch.randn(5, 8, 128, generator=generator) * spread
    score[0, :4] = -torch.inf
    kv[0, :4] = 0
    pooled = compressor.pool(kv, score)
    for blur in (0.0, 1e-4):
        given = []
        for x, error in ((kv, blur), (score, 10 * blur)):
            moved = x.double() + error * torch.randn(x.shape, generator=generator).clamp(-1, 1)
            given.append(Approximate(moved, torch.full_like(x, error).double()))
        result = rules.pool(*given)
        assert bool(((pooled.double() - result.value).abs() <= result.error).all())
        assert blur or float(result.error.max()) < 2.0**-14 * float(kv.abs().max())
    pooled = pooled.to(torch.bfloat16)
    weight = 1 + torch.randn(128, generator=generator) * 0.1
    assert rules.interval(compressor.rms_norm(pooled, weight, 1e-6), rules.norm(pooled, weight, 1e-6)).rejected == 0


def brute_topk(row: list[int], scores: list[float], limit: int, k: int) -> bool:
    count = min(k, limit)
    picked = row[:count]
    if any(not 0 <= s < limit for s in picked) or len(set(picked)) < count or row[count:] != [-1] * (len(row) - count):
        return False
    values = [scores[s] for s in picked]
    return values == sorted(scores[:limit], reverse=True)[:count]


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_topk_is_the_brute_force_rule(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 5))
    k, limit = data.draw(st.integers(1, 6)), data.draw(st.integers(0, total))
    scores = data.draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=total, max_size=total))
    scores[limit:] = [-float("inf")] * (total - limit)
    masked = torch.tensor(scores).to(torch.bfloat16)
    row = data.draw(st.lists(st.integers(-1, total), min_size=min(k, total), max_size=min(k, total)))
    first = masked.topk(min(k, total)).indices
    usual: list[int] = torch.where(torch.arange(min(k, total)) < min(k, limit), first, -1).tolist()
    for selection in [row, usual, *map(list, itertools.islice(itertools.permutations(usual), 24))]:
        got = torch.tensor(selection, dtype=torch.int32)[None]
        judged = rules.topk(got, masked[None], torch.tensor([limit]), k)
        assert (judged.rejected == 0) == brute_topk(selection, scores, limit, k), (selection, scores, limit, k)


def test_keys_reach_one_other_rounding_but_no_other_key() -> None:
    recording = opened("prefill_0257_h8_b3")
    params = next(iter(shared_params(recording).values()))
    normed, pooled = recording.tensors["prefill.k.normed"][0, :8], recording.tensors["prefill.k.pooled"][0, :8]
    table = rope.rope_table(TINY, 64)
    positions = torch.arange(8) * 4
    chain = rules.KeyChain(params.norm, 1e-6, positions, table)
    other = pooled.clone()
    for row in range(8):  # a last place up where the normed key changes most
        channel = int(other[row].abs().argmax())
        other[row, channel] = torch.nextafter(other[row, channel], other[row, channel] * 2)
    keys = compressor.finish(other.float(), params.norm, 1e-6, positions, table)
    before = formats.fp4_quantise(hadamard(rope.apply_rope(normed, positions, table)))
    changed = (keys.fp4 != before[0]).any(-1) | (keys.exponents != before[1]).any(-1)
    assert bool(changed.any())
    known = Approximate(pooled.double(), torch.zeros_like(pooled, dtype=torch.float64))
    values, exponents = rules.keys(keys.fp4, keys.exponents, known, chain)
    assert values.rejected + exponents.rejected >= int(changed.sum())
    blurred = Approximate((pooled.double() + other.double()) / 2, (other.double() - pooled.double()).abs())
    values, exponents = rules.keys(keys.fp4, keys.exponents, blurred, chain)
    assert values.rejected == exponents.rejected == 0 and values.differing + exponents.differing > 0

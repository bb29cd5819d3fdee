"""`parity recorded`: recordings pass, each rule rejects its nearest wrong answer, bad folders get a sentence."""

import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from parity import recorded
from parity.command import CommandError
from parity.recorded import rows as rules_of
from parity.recorded import rules
from parity.recorded.files import Recording, read_file, read_index
from parity.recorded.replay import replay_recording
from parity.recorded.rules import Approximate
from reference import compressor, formats, rope
from reference.config import TINY
from reference.hadamard import hadamard
from reference.indexer import IndexerParams

OFFICIAL = Path(__file__).parents[3] / "fixtures" / "official"
ENTRIES = {entry["file"].removesuffix(".safetensors"): entry for entry in read_index(OFFICIAL)}
PLANTED = ("prefill_0005_h8_b3", "prefill_0257_h8_b3", "decode_p0001_n12_h8", "decode_p0253_n08_h8",
           "fp8wq_p0064_n05_h8", "quirk_reused_state", "unit_fp4", "unit_stages")  # fmt: skip


def opened(name: str) -> Recording:
    return read_file(OFFICIAL, ENTRIES[name])


def shared_params(recording: Recording) -> dict[str, IndexerParams]:
    name = recording.entry.get("params") or recording.entry.get("config", {}).get("params")
    return {name: IndexerParams.from_tensors(opened(f"params_{name}").tensors)} if name else {}


def test_every_recording_passes_and_every_tensor_is_accounted_for(capsys: pytest.CaptureFixture[str]) -> None:
    rows = recorded.replay(OFFICIAL)
    assert recorded.passed(rows)
    listed = {(entry["file"], tensor["name"]) for entry in ENTRIES.values() for tensor in entry["tensors"]}
    assert {(row.file, row.tensor) for row in rows} == listed and len(rows) == len(listed)
    for row in rows:
        if row.rule in (rules_of.BITS, rules_of.CHAIN):
            assert row.rejected == 0 and (row.rule == rules_of.CHAIN or row.differing == 0)
    assert recorded.main_replay(OFFICIAL) == 0
    printed = capsys.readouterr().out
    assert "prefill.k.pooled" in printed and "0 not allowed" in printed and "0 unknown tensors" in printed


def test_the_selection_covers_every_stage_and_rule() -> None:
    rows = recorded.replay(OFFICIAL)
    stages = {row.tensor.partition(".")[2] for row in rows if row.tensor.startswith(("prefill.", "decode."))}
    wanted = "k.proj_kv k.proj_score k.pooled k.normed k.roped k.hadamard k.fp4 k.fp4_exp q.proj q.roped q.hadamard"
    wanted += " q.fp4 q.fp4_exp w.proj w.scaled s.dot s.logits s.masked topk"
    assert stages >= set(wanted.split())
    assert {row.rule for row in rows} == {
        rules_of.BITS, rules_of.ROPE, rules_of.GEMM, rules_of.POOL, rules_of.CHAIN, rules_of.VALUE, rules_of.TABLE,
        rules_of.INPUT,
    }  # fmt: skip


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


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("prefill_0005_h8_b3", without("prefill.q.fp4"), "lacks the tensor prefill.q.fp4, which other tensors"),
        ("prefill_0005_h8_b3", without("prefill.x"), "lacks the tensor prefill.x"),
        ("decode_p0001_n12_h8", without("state.kv_after_prefill"), "lacks the tensor state.kv_after_prefill"),
        (
            "prefill_0005_h8_b3",
            lambda t: t.update({"prefill.rows": torch.tensor([3, 1])}),
            "prefill.rows must hold asc",
        ),
        ("prefill_0005_h8_b3", lambda t: t.update({"prefill.x": t["prefill.x"][:, :4]}), r"prefill.x is \[3, 4, 256\]"),
        (
            "prefill_0005_h8_b3",
            lambda t: t.update({"prefill.topk": t["prefill.topk"][..., :0]}),
            "prefill.topk has shape",
        ),
        (
            "prefill_0005_h8_b3",
            lambda t: t.update({"prefill.k.fp4": t["prefill.k.fp4"].float()}),
            "prefill.k.fp4 is torch",
        ),
        ("decode_p0001_n12_h8", lambda t: t.update({"decode.x": t["decode.x"][..., :8]}), "do not fit each other"),
        ("quirk_reused_state", lambda t: t.update({"x": t["x"][:, :9]}), "tensor x must have 37 tokens"),
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


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small folder: two cases, their parameters and a unit."""
    return write_folder(tmp_path / "recorded", ["params_h8_d256", "prefill_0005_h8_b3", "unit_stages"])


def write_folder(folder: Path, names: list[str]) -> Path:
    folder.mkdir()
    for name in names:
        shutil.copy(OFFICIAL / f"{name}.safetensors", folder)
    write_index(folder, [dict(ENTRIES[name]) for name in names])
    return folder


def write_index(folder: Path, entries: list[dict[str, Any]]) -> None:
    (folder / "index.json").write_text(json.dumps({"format": 1, "files": entries}))


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence on stderr about a folder whose index cannot be used."""
    assert recorded.main_replay(folder) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and printed.err.startswith("parity recorded: ")
    return printed.err


def left_out(folder: Path, capsys: pytest.CaptureFixture[str], code: int) -> str:
    """What is printed about the one file that is left out while the others are replayed."""
    assert recorded.main_replay(folder) == code
    printed = capsys.readouterr()
    assert printed.err == "" and "hadamard.out" in printed.out and "0 not allowed" in printed.out
    lines = [line for line in printed.out.splitlines() if line.startswith(("UNUSABLE ", "NOT REPLAYED "))]
    return "\n".join(lines)


def test_json_and_exit_codes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recorded.main_replay(folder, tmp_path / "out.json") == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["passed"] is True and len(report["rows"]) == len(recorded.replay(folder))
    assert {"file", "tensor", "rule", "values", "differing", "rejected"} <= report["rows"][0].keys()
    # A disagreement: the file is intact by its own index, its content is wrong.
    path = folder / "unit_stages.safetensors"
    tensors = load_file(path)
    tensors["hadamard.out"].view(torch.int16)[0, 0] += 1
    save_file(tensors, path)
    entries = read_index(folder)
    entries[2]["sha256"], entries[2]["bytes"] = hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_size
    for tensor in entries[2]["tensors"]:
        tensor.pop("sha256_16")
    write_index(folder, entries)
    capsys.readouterr()
    assert recorded.main_replay(str(folder), str(tmp_path / "out.json")) == 1
    assert "NOT ALLOWED unit_stages.safetensors: hadamard.out: 1 values, first at [0, 0]" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["passed"] is False
    with pytest.raises(CommandError, match="cannot write"):
        recorded.main_replay(folder, tmp_path / "absent" / "out.json")


NAME = "prefill_0005_h8_b3.safetensors"


def rewritten(folder: Path, data: bytes, entry: dict[str, Any] | None = None) -> None:
    """Other bytes of one file, with an index that agrees with them."""
    (folder / NAME).write_bytes(data)
    entries = read_index(folder)
    entries[1] = (entry or entries[1]) | {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    write_index(folder, entries)


@pytest.mark.parametrize("listed", [True, False])
def test_one_recording_that_lacks_a_tensor_keeps_no_other_from_being_replayed(folder, listed, tmp_path, capsys) -> None:
    """Nor what else the same file holds: only what follows from the tensor is left out."""
    tensors = load_file(folder / NAME)
    del tensors["prefill.q.roped"]
    entry = dict(read_index(folder)[1])
    if not listed:
        entry["tensors"] = [tensor for tensor in entry["tensors"] if tensor["name"] in tensors]
    save_file(tensors, folder / NAME)
    rewritten(folder, (folder / NAME).read_bytes(), entry)
    said = left_out(folder, capsys, 0)
    assert "prefill.q.roped" in said and "prefill.q.hadamard" in said
    rows = {row.tensor: row for row in recorded.replay(folder) if row.file == NAME}
    for name in ("prefill.q.proj", "prefill.q.fp4", "prefill.s.logits", "prefill.topk"):
        assert rows[name].values and not rows[name].rejected, name
    # A disagreement elsewhere is one still, and a folder in which nothing can be judged is no passing one.
    tensors["prefill.w.scaled"][0, 0, 0] *= 2
    save_file(tensors, folder / NAME)
    for tensor in entry["tensors"]:
        tensor.pop("sha256_16", None)
    rewritten(folder, (folder / NAME).read_bytes(), entry)
    assert recorded.main_replay(folder, tmp_path / "out.json") == 1
    assert json.loads((tmp_path / "out.json").read_text())["exit"] == 1
    write_folder(tmp_path / "alone", ["params_h8_d256"])
    assert recorded.main_replay(tmp_path / "alone") == 2
    assert "nothing judged" in capsys.readouterr().out


def test_damaged_files_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / NAME
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    said = f"UNUSABLE {NAME}: "
    assert f"{said}has {len(data) - 1} bytes, index.json says {len(data)}" == left_out(folder, capsys, 2)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert f"{said}has sha256 " in left_out(folder, capsys, 2)
    path.unlink()
    assert f"{said}cannot be read (No such file or directory)" == left_out(folder, capsys, 2)


def test_damage_that_the_digest_agrees_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (folder / NAME).read_bytes()
    entry = read_index(folder)[1]
    others = [tensor for tensor in entry["tensors"] if tensor["name"] != "prefill.qr"]
    place = data.index(load_file(folder / NAME)["prefill.x"].view(torch.uint8).numpy().tobytes())
    for content, listed, words in (
        (data[: len(data) // 2], entry["tensors"], "is not a safetensors file"),
        (b"", entry["tensors"], "is not a safetensors file"),
        (data[:place] + bytes(16) + data[place + 16 :], entry["tensors"], "tensor prefill.x has other bytes"),
        (data, others, "holds the tensor prefill.qr, which index.json does not list"),
        (data, [*others, {"name": "prefill.qr", "dtype": "bfloat16", "shape": [1]}],
         "tensor prefill.qr is bfloat16 [3, 5, 128], index.json says bfloat16 [1]"),
    ):  # fmt: skip
        rewritten(folder, content, entry | {"tensors": listed})
        assert f"UNUSABLE {NAME}: {words}" in left_out(folder, capsys, 2)


@pytest.mark.parametrize(
    ("change", "words", "code"),
    [
        (lambda entries: entries.pop(0), "params_h8_d256.safetensors: is not listed in index.json", 2),
        (lambda entries: entries.append(entries[1]), f"{NAME}: index.json lists it more than once", 2),
        (lambda entries: entries[1].pop("sha256"), f"{NAME}: its entry in index.json lacks the field sha256", 2),
        (lambda entries: entries.append(7), "index.json: its entry in index.json lacks the field file", 2),
        (lambda entries: entries[1].update(kind="sound"), "has kind 'sound', expected one of params", 2),
        (lambda entries: entries[1].pop("config"), f"{NAME}: its entry .* lacks the field config", 0),
        (lambda entries: entries[1].update(config=[]), "field config of its entry must be an object", 0),
        (lambda entries: entries[1]["config"].pop("dim"), "its config in index.json lacks the field 'dim'", 0),
        (lambda entries: entries[1]["config"].update(index_head_dim=64), "head_dim must be 128, got 64", 0),
        (lambda entries: entries[1]["config"].update(params="none"), "wants the parameters 'none', which no file", 0),
        (lambda entries: entries[1].update(prefill_len="5"), "field prefill_len of its entry must be a count", 0),
    ],
)
def test_bad_index_entries(folder: Path, change: Any, words: str, code: int, capsys) -> None:
    entries = json.loads((folder / "index.json").read_text())["files"]
    change(entries)
    write_index(folder, entries)
    assert re.search(words, left_out(folder, capsys, code))


def test_an_index_of_no_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_index(folder, [])
    assert "must list at least one file" in refused(folder, capsys)


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
    with pytest.raises(ValueError, match="expected torch.float32 \\[2\\]"):
        rules.bits(x, x[:2])


def test_interval_allows_the_roundings_of_its_ends_only() -> None:
    one = torch.tensor([1.0], dtype=torch.float64)
    place = 2.0**-7
    tie = Approximate(one + place / 2, one * 1e-9)
    for got, allowed in ((1.0, True), (1 + place, True), (1 - place / 2, False), (1 + 2 * place, False)):
        judged = rules.interval(torch.tensor([got]).to(torch.bfloat16), tie)
        assert (judged.rejected == 0) == allowed
    near = Approximate(one + place / 2 - 1e-6, one * 1e-9)
    assert rules.interval((one + place).to(torch.bfloat16), near).rejected == 1
    assert rules.interval(torch.tensor([torch.nan]).to(torch.bfloat16), near).rejected == 1


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 20), spread=st.sampled_from([0.1, 1.0, 10.0, 60.0]))
def test_pool_and_norm_errors_hold_and_are_not_loose(seed: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(5, 8, 128, generator=generator)
    score = torch.randn(5, 8, 128, generator=generator) * spread
    score[0, :4] = -torch.inf
    kv[0, :4] = 0
    exactly = [Approximate(x.double(), torch.zeros_like(x, dtype=torch.float64)) for x in (kv, score)]
    result = rules.pool(*exactly)
    wrong = (compressor.pool(kv, score).double() - result.value).abs()
    assert bool((wrong <= result.error).all())
    assert float(result.error.max()) < 2.0**-14 * float(kv.abs().max())
    blurred = [
        Approximate(
            x.double() + e * torch.randn(x.shape, generator=generator).clamp(-1, 1), torch.full_like(x, e).double()
        )
        for x, e in ((kv, 1e-4), (score, 1e-3))
    ]
    wide = rules.pool(*blurred)
    assert bool(((compressor.pool(kv, score).double() - wide.value).abs() <= wide.error).all())
    pooled = compressor.pool(kv, score).to(torch.bfloat16)
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

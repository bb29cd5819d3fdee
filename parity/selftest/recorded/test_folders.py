"""`parity recorded` on folders that lack something: the rest is replayed, what is left out is named, exit codes."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity import recorded
from parity.command import CommandError
from parity.recorded.files import read_index
from parity.selftest.helpers import OFFICIAL
from parity.selftest.recorded.recordings import ENTRIES


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

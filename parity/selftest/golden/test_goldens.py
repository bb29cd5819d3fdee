"""Goldens: each thing that may be wrong with a file is named, nothing is written in CI, a wrong kernel is rejected."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from impl.topk import topk_to_slots
from impl.torch_path import torch_bf16_paged_mqa_logits
from parity.cli import main as cli
from parity.cli.golden import TRUTHS
from parity.command import CommandError
from parity.domain.contract import Contract
from parity.gate import goldens as golden
from parity.golden import goldens as golden_files
from parity.golden import stored
from parity.golden.changes import diff
from parity.numerics.bounds import expected
from parity.ops.paged_logits.golden import evaluate
from parity.ops.paged_logits.operands import build_logits as build
from parity.run.implementation import Implementation
from parity.run.operation import parse_case

SMALL = {
    "bf16-small": "v1 lens=66,3 heads=8 data=octaves seed=1 perm=2",
    "bf16-whole": "v1 lens=5 heads=8 data=exact seed=2",
    "topk-small": "v1 lens=66,3 stage=topk k=4 data=random seed=3",
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Goldens of the small cases, made once."""
    place = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CI", raising=False)
        stored.leave(place, golden.make(SMALL))
        stored.accept(place)
    return place


@pytest.fixture
def folder(made, tmp_path, monkeypatch) -> Path:
    """A folder of the test's own with accepted goldens of three small cases."""
    monkeypatch.setattr(golden, "cases", lambda: SMALL)
    monkeypatch.delenv("CI", raising=False)
    return Path(shutil.copytree(made, tmp_path / "fixtures" / "golden"))


def logits_of(function, name="own") -> Implementation:
    """A bf16 implementation in this process."""
    return Implementation(name, "paged_logits", "bf16", Contract.default("bf16", "cpu"), function)


def rows_of(place, *targets, names=()):
    return list(golden.verify(place, targets, CPU, names))


def bad(rows):
    return [row for row in rows if row.status != "passed"]


def topk_of(function) -> Implementation:
    return Implementation("topk", "topk", "", Contract.from_dict({"op": "topk"}, "cpu"), function)


def test_accepted_goldens_pass_for_a_correct_implementation(folder):
    rows = rows_of(folder, logits_of(torch_bf16_paged_mqa_logits), topk_of(topk_to_slots))
    assert bad(rows) == []
    assert {(row.implementation, row.check) for row in rows} == {
        *(("reference", name) for name in SMALL),
        ("own", "bf16-small"),
        ("own", "bf16-whole"),
        ("topk", "topk-small"),
    }
    ratios = {row.check: row.ratio for row in rows if row.implementation == "own"}
    assert ratios["bf16-small"] is not None


def late(**named):
    out = torch_bf16_paged_mqa_logits(**named)
    out[0, 0] *= 1 + 2.0**-10
    return out


def tail(**named):
    out = torch_bf16_paged_mqa_logits(**named)
    out[-1, -1] = 0.0
    return out


def crash(**named):
    raise RuntimeError("no")


def shape(**named):
    return torch_bf16_paged_mqa_logits(**named)[:, :-1]


@pytest.mark.parametrize(
    "function, status",
    [(late, "failed"), (tail, "failed"), (crash, "error"), (shape, "failed")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_a_wrong_implementation_is_rejected(folder, function, status):
    rows = bad(rows_of(folder, logits_of(function), names=["bf16-small"]))
    assert [(row.implementation, row.status) for row in rows] == [("own", status)]
    assert "parity golden verify bf16-small" in rows[0].repro


def test_a_wrong_selection_is_rejected(folder):
    def twice(**named):
        slots, positions = topk_to_slots(**named)
        slots[:, 1], positions[:, 1] = slots[:, 0], positions[:, 0]
        return slots, positions

    assert [row.status for row in bad(rows_of(folder, topk_of(twice)))] == ["failed"]


def test_an_absent_implementation_is_not_run_by_name(folder):
    target = replace(logits_of(None), absent="no GPU here")
    rows = bad(rows_of(folder, target))
    assert {(row.status, row.message) for row in rows} == {("not run", "no GPU here")}


def corrupt(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


SPOILT = {
    "corrupt or edited: its sha256 is": corrupt,
    "truncated, ": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "truncated, 0 of": lambda path: path.write_bytes(b""),
    "not a readable safetensors file": lambda path: path.write_bytes(b"no safetensors at all" * 10_000),
    "not a golden of this software": lambda path: save_file({"x": torch.zeros(100_000)}, path),
    "its file is missing": Path.unlink,
}


@pytest.mark.parametrize("part", SPOILT)
def test_a_spoilt_file_is_an_error_that_names_it(folder, part):
    SPOILT[part](folder / "bf16-small.safetensors")
    (row,) = bad(rows_of(folder, logits_of(torch_bf16_paged_mqa_logits)))
    assert (row.check, row.status) == ("bf16-small", "error")
    assert part in row.message and "bf16-small.safetensors" in row.message


def rewrite(folder: Path, name: str, change, metadata=None) -> None:
    """Change a golden's tensors, and the manifest with it, as an edit would that a sha256 cannot see."""
    manifest = json.loads((folder / "manifest.json").read_text())
    entry = manifest["goldens"][name]
    tensors, found = golden_files.parse(folder / entry["file"])
    change(tensors)
    content = golden_files.encode(tensors, metadata or found)
    (folder / entry["file"]).write_bytes(content)
    manifest["goldens"][name] = entry | golden_files.digest(content)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def nudge(key: str, step: float):
    def change(tensors):
        value = tensors[key].flatten()
        value[0] = value[0] * (1 + step) if value.dtype.is_floating_point else value[0] + int(step)

    return change


@pytest.mark.parametrize(
    "key, step",
    [("exact", 1e-12), ("bound", 1e-6), ("q", 2.0), ("weights", 1e-6), ("context_lens", 1), ("block_table", 1)],
)
def test_a_golden_that_its_case_does_not_give_is_rejected(folder, key, step):
    rewrite(folder, "bf16-small", nudge(key, step))
    rows = bad(rows_of(folder))
    assert [(row.check, row.status) for row in rows] == [("bf16-small", "failed")]
    assert rows[0].message.startswith(f"{key}: ")


def test_exact_results_may_differ_by_float64_rounding_and_no_more(folder):
    rewrite(folder, "bf16-small", nudge("exact", 2.0**-52))
    assert bad(rows_of(folder)) == []


def test_the_row_by_row_evaluation_is_the_oracles(folder):
    for text in (SMALL["bf16-small"], "v1 lens=66,3 layout=fp8 heads=8 data=octaves seed=1 perm=2"):
        case = parse_case(text)
        operands = build(case, CPU)
        result, loss = evaluate(operands)
        assert golden.apart("exact", result, expected(operands, Contract.default(case.layout)).logits, 2 * loss) is None
        assert float(loss.max()) > 0


@pytest.mark.parametrize(
    "change, metadata, part",
    [
        (lambda tensors: tensors.pop("bound"), None, "unknown parts: bound"),
        (dict, {"format": "9", "case": SMALL["bf16-small"]}, "golden format '9'"),
        (dict, {"case": "v1 lens=1"}, "holds the case 'v1 lens=1'"),
    ],
    ids=["part", "format", "case"],
)
def test_a_golden_with_other_parts_format_or_case_is_named(folder, change, metadata, part):
    rewrite(folder, "bf16-small", change, metadata)
    assert part in bad(rows_of(folder))[0].message


def test_unused_missing_stray_and_pending_files_fail(folder, monkeypatch):
    monkeypatch.setattr(
        golden, "cases", lambda: {"bf16-small": SMALL["bf16-small"], "new": "v1 lens=2", "bf16-whole": "v1 lens=6"}
    )
    (folder / "left.txt").write_text("x")
    (folder / "old.pending.safetensors").write_text("x")
    rows = {row.check: row for row in bad(rows_of(folder))}
    assert "unused golden" in rows["topk-small"].message
    assert "has no golden" in rows["new"].message
    assert "made from another case" in rows["bf16-whole"].message
    assert "the manifest does not list it" in rows["left.txt"].message
    assert "pending" in rows["old.pending.safetensors"].message
    assert {row.status for row in rows.values()} == {"failed"}


def manifest(*, format=golden_files.FORMAT, **goldens) -> str:
    return json.dumps({"tag": golden_files.TAG, "format": format, "goldens": goldens})


ELSEWHERE = {"bytes": 1, "sha256": "", "case": ""}


@pytest.mark.parametrize(
    "text, part",
    [
        ("{", "cannot be read"),
        ("[]", "not a manifest of goldens"),
        (manifest(format=7), "of format 7"),
        (manifest(a={"file": "a"}), "lacks bytes"),
        (manifest(a=1), "lacks bytes"),
        (manifest(a={"file": "../x.safetensors", **ELSEWHERE}), "names a file outside the folder"),
        (manifest(a={"file": "/etc/passwd", **ELSEWHERE}), "names a file outside the folder"),
    ],
)
def test_a_bad_manifest_is_an_error_that_names_it(folder, text, part):
    (folder / "manifest.json").write_text(text)
    (row,) = rows_of(folder)
    assert (row.check, row.status) == ("manifest", "error")
    assert part in row.message and "manifest.json" in row.message


def test_regenerating_writes_pending_files_and_exits_1(folder, capsys, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    words = ["--fixtures", str(folder.parent)]
    assert cli.main(["golden", "regenerate", *words]) == 1
    assert {path.name: path.read_bytes() for path in folder.iterdir() if ".pending" not in path.name} == before
    assert "4 pending files" in capsys.readouterr().out

    assert cli.main(["golden", "diff", *words]) == 1
    assert "no value differs" in capsys.readouterr().out

    assert cli.main(["golden", "accept", *words]) == 0
    assert stored.pending(folder) == []
    assert cli.main(["golden", "diff", *words]) == 0


def test_diff_speaks_in_numbers_and_accept_replaces_and_removes(folder, capsys, monkeypatch):
    cases = {"bf16-small": SMALL["bf16-small"].replace("seed=1", "seed=9"), "new": "v1 lens=2 heads=8"}
    stored.leave(folder, golden.make(cases))
    lines = diff(folder)
    assert any("bf16-small.safetensors: q: " in line and "values differ, by at most" in line for line in lines)
    assert any(line.startswith("new.safetensors: new, ") for line in lines)
    assert stored.accept(folder) == ["bf16-small", "new", "bf16-whole (removed)", "topk-small (removed)"]
    monkeypatch.setattr(golden, "cases", lambda: cases)
    assert bad(rows_of(folder)) == []


def test_accept_refuses_a_pending_file_that_was_touched(folder):
    stored.leave(folder, golden.make(SMALL))
    corrupt(folder / "bf16-small.pending.safetensors")
    with pytest.raises(CommandError, match="not the file that the pending manifest lists"):
        stored.accept(folder)
    (folder / "manifest.pending.json").unlink()
    with pytest.raises(CommandError, match="nothing is pending"):
        stored.accept(folder)


@pytest.mark.parametrize("action", ["regenerate", "accept"])
def test_nothing_is_written_in_ci(folder, action, monkeypatch, capsys):
    before = sorted(path.name for path in folder.iterdir())
    monkeypatch.setenv("CI", "true")
    assert cli.main(["golden", action, "--fixtures", str(folder.parent)]) == 2
    assert "nothing is written while CI is set" in capsys.readouterr().err
    assert sorted(path.name for path in folder.iterdir()) == before


def test_the_folder_is_found_beside_the_package_and_under_the_current_one(folder, monkeypatch, tmp_path):
    assert stored.locate("golden", str(folder.parent)) == folder
    assert stored.locate("golden", str(folder)) == folder
    monkeypatch.setattr(stored, "ROOT", tmp_path / "site-packages")
    monkeypatch.chdir(tmp_path)
    assert stored.locate("golden") == folder
    monkeypatch.chdir("/")
    assert stored.locate("golden") is None


def test_without_goldens_they_are_not_run_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(stored, "locate", lambda folder, given=None: None)
    assert cli.main(["golden", "verify", "--device", "cpu", "--json", str(tmp_path / "a.json")]) == 2
    assert "not run: golden/verify of reference: no goldens" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["rows"][0]["status"] == "not run"
    assert cli.main(["golden", "diff"]) == 2


def test_verify_takes_one_implementation_and_one_name(folder, capsys, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    words = ["golden", "verify", "--fixtures", str(folder.parent), "--device", "cpu", "--impl", "torch-bf16"]
    assert cli.main([*words, "bf16-small"]) == 0
    out = capsys.readouterr().out
    assert "1 check of 1 implementation, 1 example" in out
    assert cli.main([*words, "bf16-large"]) == 2
    assert "no golden is called 'bf16-large'" in capsys.readouterr().err


def test_the_repositorys_goldens_are_small_and_complete():
    place = stored.locate("golden")
    assert place is not None
    manifest = golden_files.read_manifest(place)
    assert {name: entry["case"] for name, entry in manifest.items()} == golden.cases()
    assert sum(entry["bytes"] for entry in manifest.values()) < 3_000_000
    for entry in manifest.values():
        assert hashlib.sha256((place / entry["file"]).read_bytes()).hexdigest() == entry["sha256"]
    assert bad(rows_of(place)) == []


def test_every_kind_of_truth_is_renewed_the_same_way(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    assert tuple(golden.truths()) == TRUTHS
    content = {"a": {"x": 1.5, "y": 2}}
    toy = stored.Truth("digests", "truth", lambda folder: [("toy.json", stored.as_json(content))])
    monkeypatch.setattr(golden, "truths", lambda: {"digests": toy})
    words = ["--fixtures", str(tmp_path)]
    path = tmp_path / "truth" / "toy.json"
    assert cli.main(["golden", "regenerate", "digests", *words]) == 1 and not path.exists()
    assert cli.main(["golden", "diff", *words]) == 1 and "truth/toy.json: new, 2 entries" in capsys.readouterr().out
    assert cli.main(["golden", "accept", *words]) == 0 and json.loads(path.read_text()) == content
    content["a"]["x"] = 2.5
    assert cli.main(["golden", "regenerate", "digests", *words]) == 1
    assert cli.main(["golden", "diff", *words]) == 1
    assert "truth/toy.json: a / x: 1.5 -> 2.5" in capsys.readouterr().out
    assert cli.main(["golden", "accept", *words]) == 0 and json.loads(path.read_text()) == content
    assert cli.main(["golden", "accept", *words]) == 2 and "nothing is pending" in capsys.readouterr().err
    assert cli.main(["golden", "regenerate", "nothing", *words]) == 2
    assert "no stored truth is called 'nothing'" in capsys.readouterr().err

"""The benchmark's arithmetic and its check of results; timing itself needs a CUDA device."""

import pytest
import torch

from impl.torch_path import torch_bf16_paged_mqa_logits, torch_fp8_paged_mqa_logits
from parity.command import CommandError
from parity.judge.contract import Contract
from parity.run import bench
from parity.run.bench import Workload

CPU = torch.device("cpu")
PATHS = {"bf16": torch_bf16_paged_mqa_logits, "fp8": torch_fp8_paged_mqa_logits}


def test_bytes_and_operations():
    one = Workload("x", "bf16", 2, 1, 128, "copy", None)
    assert one.lengths() == [128, 128]
    assert one.bytes() == 2 * 128 * 256 + 2 * 64 * (256 + 4) + 2 * 128 * 4
    assert one.operations() == 2 * 128 * 64 * 256
    assert Workload("x", "fp8", 2, 1, 100, "copy", None).bytes() == 2 * 128 * 132 + 2 * 64 * (128 + 4) + 2 * 100 * 4
    # Four tokens a key, the last row seeing them all.
    assert Workload("x", "bf16", 1, 9, 50, "matrix", None).lengths() == [48, 48, 48, 48, 49, 49, 49, 49, 50]


@pytest.mark.parametrize("layout", ["bf16", "fp8"])
def test_wrong_results_are_seen(layout):
    work = Workload("x", layout, 2, 3, 130, "copy", None)
    operands = bench.build(work, CPU)
    result = PATHS[layout](**vars(operands))
    contract = Contract.default(layout, CPU)
    assert bench.worst_ratio(operands, contract, result) <= 1
    for wrong in (result * 1.001, result.roll(1, 1), result.nan_to_num(neginf=0.0)):
        assert bench.worst_ratio(operands, contract, wrong) > 1


def test_lines_of_the_table():
    row = {
        "name": "decode",
        "layout": "bf16",
        "shape": "1 rows x 1 keys",
        "status": "met",
        "config": "c",
        "target": 0.85,
    }
    row |= {"value": 0.9, "unit": "of copy", "milliseconds": 0.5}
    assert "0.900 of copy" in bench.line(row) and "met (target 0.85)" in bench.line(row)
    bad = {key: row[key] for key in ("name", "layout", "shape")} | {"status": "failed", "reason": "why"}
    assert bench.line(bad).endswith("failed: why")


def test_command_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CommandError, match="there is no CUDA device to time"):
        bench.main([])
    with pytest.raises(CommandError, match="--rounds: expected at least 1, got 0"):
        bench.main(["--rounds", "0"])
    with pytest.raises(SystemExit) as stop:
        bench.main(["--only", "nothing"])
    assert stop.value.code == 2

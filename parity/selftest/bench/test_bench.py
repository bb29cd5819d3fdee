"""The benchmark's arithmetic and its check of results; timing itself needs a CUDA device."""

import re

import pytest
import torch

from impl.store_compile import missing
from impl.torch_path import torch_bf16_paged_mqa_logits, torch_fp8_paged_mqa_logits
from parity.bench import paged_logits as bench
from parity.bench import report, timing
from parity.bench import store as bench_store
from parity.bench.paged_logits import Workload
from parity.domain.contract import Contract

CPU = torch.device("cpu")
# Triton kernels run on a GPU where there is one, and are interpreted on the CPU only where there is none.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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
    result = PATHS[layout](**operands.kwargs())
    contract = Contract.default(layout, CPU)
    assert bench.worst_ratio(operands, contract, result) <= 1
    for wrong in (result * 1.001, result.roll(1, 1), result.nan_to_num(neginf=0.0)):
        assert bench.worst_ratio(operands, contract, wrong) > 1


class Replay:
    """Stands for a captured graph: calls on replay."""

    def __init__(self, calls):
        self.calls = calls

    def replay(self):
        for call in self.calls:
            call()


@pytest.mark.parametrize(
    ("ceiling", "target", "status"),
    [
        ("copy", None, "met"),
        ("copy", 0.1, "met"),
        ("matrix", 1e9, "missed"),
        ("latency", 2001.0, "met"),
        ("latency", 1.0, "missed"),
    ],
)
def test_a_measured_row(monkeypatch, ceiling, target, status):
    """With a clock that says 2 ms for everything, the ratio to a ceiling is that of the work done."""
    monkeypatch.setattr(bench, "graph_of", Replay)

    def two(call, times=1):
        call()
        return 2.0

    monkeypatch.setattr(timing, "milliseconds", two)
    work = Workload("x", "bf16", 1, 2, 64, ceiling, target)
    row = bench.measure(work, DEVICE, {"copy": (list, 1e4), "matrix": (list, 1e6)}, 3)
    assert row["status"] == status and row["worst_error_over_bound"] <= 1
    if ceiling != "latency":
        mine, amount, inner = (work.bytes(), 1e4, 8) if ceiling == "copy" else (work.operations(), 1e6, 3)
        assert row["value"] == pytest.approx(mine / amount * inner)
    else:
        assert row["value"] == 2000.0 and row["microseconds_back_to_back"] == 100.0
    assert row["status"] in timing.line(row)


def test_wrong_results_are_not_timed(monkeypatch):
    monkeypatch.setattr(bench, "worst_ratio", lambda *_: 1.5)
    row = bench.measure(Workload("x", "bf16", 1, 1, 64, "copy", 0.5), DEVICE, {}, 1)
    assert row["status"] == "failed" and row["reason"] == "error is 1.5 times the bound, not timed"


def test_a_line_of_a_wrong_result_says_why():
    bad = timing.row("decode", "bf16", "1 rows x 1 keys", "c", target=0.85) | {"status": "failed", "reason": "why"}
    assert timing.line(bad).endswith("failed: why")


@pytest.mark.parametrize("name, status, code", [("NVIDIA H200", "missed", 1), ("another", "measured", 0)])
def test_targets_hold_for_the_gpu_that_they_were_set_for(monkeypatch, name, status, code):
    found = timing.row(
        "decode", "bf16", "1 rows x 1 keys", "c", value=0.5, unit="of copy", target=0.85, milliseconds=1.0
    )
    monkeypatch.setattr(bench, "rows", lambda *_: [timing.judged(found, most=False)])
    monkeypatch.setattr(report.devices, "provenance", lambda device: {"device": name})
    said: list[str] = []
    made = report.report(CPU, ["decode"], say=said.append)
    assert (made["rows"][0]["status"], made["exit"]) == (status, code)
    assert "0.500 of copy" in said[0] and (f"{status} (target 0.85)" if code else status) in said[0]


def test_the_sides_of_a_comparison_take_turns(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(timing, "milliseconds", lambda call, times=1: call() or float(len(calls)))
    one, two = (lambda name=name: calls.append(name) for name in "ab")
    assert timing.in_turn([(one, 1), (two, 1)], 2) == [[3.0, 5.0], [4.0, 6.0]] and "".join(calls) == "ababab"


@pytest.mark.skipif(missing() is not None, reason=f"the store cannot be compiled: {missing()}")
@pytest.mark.parametrize("lanes", [8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", bench_store.MODES, ids=str)
def test_the_kernel_of_the_bytes_alone_moves_all_of_them(mode, dtype, lanes):
    """Or the compiler would have dropped or narrowed a load, and the floor under a small call would be too low."""
    from cuda.bindings import nvrtc

    text = bench_store.move_text(mode, dtype, lanes)
    program = nvrtc.nvrtcCreateProgram(text.encode(), b"move.cu", 0, [], [])[1]
    assert not int(nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=compute_90"])[0])
    ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    code = ptx.decode()
    sizes = {"b8": 1, "u32": 4, "b32": 4, "f32": 4, "u64": 8, "b64": 8, "f64": 8}

    def moved(instruction):
        found = re.findall(rf"{instruction}\.global(?:\.nc)?(?:\.v(\d))?\.(\w+)", code)
        return sorted(int(count or 1) * sizes[kind] for count, kind in found)

    chunks = 32 // lanes
    rotated = chunks // 2 or 1  # with a chunk a lane, one under a condition
    key = 4 * dtype.itemsize
    assert moved("ld") == sorted([8, 4] + [key] * chunks + [16] * (chunks + rotated))  # slot, position; norm weight
    assert moved("st") == sorted([8 if mode.layout == "bf16" else 4] * chunks + [4] * (mode.layout == "fp8"))

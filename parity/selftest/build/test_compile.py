"""The compile gate: every configuration for sm_90 and sm_120 fits, and what it must refuse is refused."""

import dataclasses
import json
from typing import Any

import pytest
import torch

from impl import cache, configs, dispatch
from impl.checks import Unsupported
from parity.build import compile as gate
from parity.build import compile_kernels, compile_store, golden
from parity.build.compile_kernels import kernel_rows, key_of
from parity.build.rows import kernel_row, store_row, table
from parity.build.triton_child import head_order, instruction
from parity.cli import main as cli
from parity.golden import stored
from parity.ops.paged_logits.operands import build_logits as build
from parity.run.operation import parse_case

pytest.importorskip("triton")
launch = pytest.importorskip("impl.launch")

RECORDED = stored.ROOT / "fixtures" / "compile"
TTGIR = """
#blocked = #ttg.blocked<{sizePerThread = [1, 1, 1]}>
#linear = #ttg.linear<{register = [[0, 0, 1], [8, 0, 0], [0, 1, 0], [0, 0, 8]],
 lane = [[0, 0, 2], [0, 0, 4], [1, 0, 0]],
 warp = [[16, 0, 0]], block = []}>
  %5 = "tt.reduce"(%4) <{axis = 2 : i32}> ({
    tt.reduce.return %6 : f32
  }) : (tensor<64x2x16xf32, #LAYOUT>) -> tensor<64x2xf32, #ttg.slice<{dim = 2, parent = #LAYOUT}>>
""".replace(",\n ", ", ")


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 120])
def test_every_configuration_fits(arch):
    rows = kernel_rows([arch])
    named = {str(config): config for config in configs.every(arch)}
    assert len(rows) == len(configs.every(arch))
    assert [row for row in rows if row["status"] != "passed"] == []
    for row in rows:
        assert 0 < row["shared"] <= row["shared_limit"] and row["spill_stores"] == row["spill_loads"] == 0
        assert named[row["config"]].least_shared_bytes <= row["shared"]
        assert 0 < row["registers"] <= 255


LARGE = configs.Config("decode", "bf16", 64, block=128, row_tile=1, trips=16, num_warps=4, num_stages=5)


def test_too_much_shared_memory_and_spills_fail(monkeypatch, tmp_path):
    """Four of five stages of 32 KiB are buffers: 128 KiB and the queries, on a GPU whose blocks have 99. And a tile
    whose accumulators cannot fit the registers."""
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    narrow = configs.configurations(120, "bf16", 64)[0]
    fat = dataclasses.replace(narrow, row_tile=4, num_warps=4, num_stages=1)
    monkeypatch.setattr(configs, "configurations", lambda arch, layout, heads: (LARGE, fat))
    rows = kernel_rows([120], layouts=["bf16"], heads=[64])
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert LARGE.least_shared_bytes == 128 * 1024 <= rows[0]["shared"]
    assert rows[0]["reason"] == f"needs {rows[0]['shared']} bytes of shared memory, sm_120 has 101376"
    assert rows[1]["reason"] == "spills registers" and rows[1]["spill_stores"] > 0
    shown = table(rows)
    assert rows[0]["reason"] in shown and "failed" in shown and " 99 " in shown
    again = kernel_rows([120], layouts=["bf16"], heads=[64])
    assert [row["cached"] for row in rows + again] == [False, False, True, True]


def test_128_kib_are_refused_for_sm_120_by_dispatch(monkeypatch):
    """On a GPU that has no room for it the call goes to PyTorch, or to nobody in strict mode, and both say why."""
    monkeypatch.setattr(launch, "target", lambda device: (120, 170))
    monkeypatch.setattr(configs, "configurations", lambda arch, layout, heads: (LARGE, LARGE))
    monkeypatch.setenv(dispatch.FLAG, "1")
    monkeypatch.setenv(dispatch.STRICT_FLAG, "0")
    monkeypatch.setattr(dispatch, "_warned", set())
    named = build(parse_case("v1 lens=70 heads=64"), torch.device("cpu")).kwargs()
    said = f"{LARGE} needs 128 KiB of shared memory at least, a block on sm_120 has 99 KiB"
    with pytest.warns(RuntimeWarning, match=said):
        dispatch.paged_mqa_logits(**named)
    route = dispatch.last_route()
    assert route is not None and (route.name, route.reason) == ("torch", said)
    monkeypatch.setenv(dispatch.STRICT_FLAG, "1")
    with pytest.raises(Unsupported, match=said):
        dispatch.paged_mqa_logits(**named)
    configs.require_fit(LARGE, 90)


@pytest.mark.skipif(not list(RECORDED.glob("triton-*.json")), reason="not run: no goldens next to the package")
def test_dispatch_refuses_no_recorded_kernel_that_fits():
    """What dispatch takes for the least shared memory is no more than any recorded compiler needed."""
    named = {f"sm_{arch} {config}": config for arch in gate.ARCHES for config in configs.every(arch)}
    for path in RECORDED.glob("triton-*.json"):
        found = golden.read(path)
        assert set(found) == set(named)
        for key, entry in found.items():
            assert 0 < named[key].least_shared_bytes <= entry["shared"], key


@pytest.mark.parametrize("arch", sorted(configs.SHARED_LIMIT_KIB))
def test_dispatch_offers_only_what_fits(arch):
    for config in configs.every(arch):
        configs.require_fit(config, arch)


def test_unsupported_is_named():
    rows = kernel_rows([80], layouts=["fp8"]) + kernel_rows([75], layouts=["bf16"])
    assert [row["status"] for row in rows] == ["unsupported"] * 2
    assert rows[0]["reason"] == "sm_80 has no e4m3 matrix instruction"
    assert "7.5" in rows[1]["reason"]


def test_a_dying_compiler_fails_one_configuration(monkeypatch):
    """The child ends at the first configuration it does not know; the others are still compiled."""
    good = configs.configurations(90, "bf16", 8)[0]
    bad = dataclasses.replace(good, kernel="missing")
    monkeypatch.setattr(configs, "configurations", lambda arch, layout, heads: (bad, good))
    rows = kernel_rows([90], layouts=["bf16"], heads=[8], use_cache=False)
    assert [row["status"] for row in rows] == ["failed", "passed"]


def test_another_order_of_the_head_sum_fails():
    row = {"arch": 90, "layout": "bf16", "heads": 64, "status": "passed", "reason": ""}
    rows = [row | {"config": str(i), "head_order": order} for i, order in enumerate(("a", "a", "b"))]
    compile_kernels._compare_orders(rows)
    assert [r["status"] for r in rows] == ["passed", "passed", "failed"]
    assert rows[2]["reason"] == "adds heads in another order than 0"


def test_head_order_is_read_from_the_layout():
    assert head_order(TTGIR.replace("LAYOUT", "linear")) == "register 1 8, lane 2 4, warp -"
    with pytest.raises(ValueError, match="layout is not linear"):
        head_order(TTGIR.replace("LAYOUT", "blocked"))
    with pytest.raises(ValueError, match="no reduction over heads"):
        head_order("module {}")


PTX = """
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f1}, ...
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%f2}, ...
	wgmma.commit_group.sync.aligned;
"""


@pytest.mark.parametrize(
    "ptx, wanted",
    [
        (PTX, "wgmma m64n64k16 bf16"),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {...}", "mma.sync m16n8k32 e4m3"),
        ("@%p1 tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r1 + 0 ], ...", "tcgen05 f8f6f4"),
        (PTX + "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", "wgmma m64n64k16 bf16, mma.sync m16n8k16 bf16"),
        ("fma.rn.f32 %f1, %f2, %f3, %f4; wgmma.wait_group.sync.aligned 0;", ""),
    ],
)
def test_the_matrix_instruction_is_read_from_ptx(ptx, wanted):
    assert instruction(ptx) == wanted


ROW: dict[str, Any] = {
    "arch": 90,
    "config": "decode-x",
    "kernel": "decode",
    "layout": "bf16",
    "status": "passed",
    "reason": "",
}
ROW |= {"registers": 9, "spill_stores": 0, "spill_loads": 0, "shared": 1024, "shared_limit": 2048}
ROW |= {"compiler": "triton 3.9.0", "instruction": "wgmma m64n64k16 bf16"}


@pytest.fixture
def rows_given(monkeypatch):
    """Replaces what the compilers would say about the kernels; the store has no rows."""

    def give(**fields):
        monkeypatch.setattr(compile_kernels, "kernel_rows", lambda arches, **_: [kernel_row(**ROW | fields)])

    monkeypatch.setattr(compile_store, "store_rows", lambda arches, **_: [])
    monkeypatch.delenv("CI", raising=False)
    return give


def run(*words):
    """Exit code of `parity compile`."""
    return cli.main(["compile", *words])


def refused(capsys, *words):
    """What `parity compile` says on stderr when it refuses."""
    assert run(*words) == 2
    return capsys.readouterr().err


def test_command_line(rows_given, capsys, tmp_path):
    words = ["--fixtures", str(tmp_path), "--json", str(tmp_path / "rows.json")]
    for status, code in (("passed", 0), ("failed", 1)):
        rows_given(status=status)
        assert run("--arch", "90", *words) == code
        out = capsys.readouterr().out
        assert f"1 {status}" in out and "wgmma m64n64k16 bf16" in out
        assert f"decode bf16  {status}" in out
    assert json.loads((tmp_path / "rows.json").read_text())["counts"]["failed"] == 1
    rows_given(status="unsupported")
    assert "nothing could be compiled here" in refused(capsys, *words)


def test_architectures_are_spelled_both_ways(rows_given, tmp_path):
    rows_given()
    for given in ("90", "sm_90"):
        assert run("--arch", given, "--fixtures", str(tmp_path)) == 0


def test_the_store_is_in_the_table(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compile_kernels, "kernel_rows", lambda arches, **_: [])
    monkeypatch.setattr(compile_store, "missing", lambda: "the package cuda-core is not installed")
    assert run("--fixtures", str(tmp_path)) == 2
    out, err = capsys.readouterr()
    assert "fused store" in out and "5 not run" in out and "nothing could be compiled here" in err


def test_a_golden_is_compared_and_only_accepting_changes_it(rows_given, capsys, monkeypatch, tmp_path):
    words = ["--arch", "sm_90", "--fixtures", str(tmp_path)]
    path = tmp_path / "compile" / "triton-3.9.0.json"
    rows_given()
    assert run(*words) == 0 and not path.exists()
    assert "no golden of any version of triton" in capsys.readouterr().out
    with monkeypatch.context() as ci:
        ci.setenv("CI", "true")
        assert "nothing is written while CI is set" in refused(capsys, *words, "--accept")
    assert run(*words, "--accept") == 0 and path.exists()
    assert run(*words) == 0
    before = path.read_text()
    rows_given(registers=18)
    assert run(*words) == 1
    out = capsys.readouterr().out
    assert "failed: differs from triton-3.9.0.json: registers 9 -> 18; to accept: parity compile --accept" in out
    rows_given(config="decode-y")
    assert run(*words) == 1
    out = capsys.readouterr().out
    assert "sm_90 decode-y: not in the golden" in out and "sm_90 decode-x: gone" in out and "2 failed" in out
    rows_given(registers=18, status="failed", reason="spills registers")
    assert "nothing is accepted while kernels fail (1 of them)" in refused(capsys, *words, "--accept")
    assert path.read_text() == before
    rows_given(registers=18)
    assert run(*words, "--accept") == 0
    assert "sm_90 decode-x / registers: 9 -> 18" in capsys.readouterr().out
    assert golden.read(path)["sm_90 decode-x"]["registers"] == 18


def test_an_unknown_compiler_is_shown_and_not_judged(rows_given, capsys, tmp_path):
    words = ["--arch", "sm_90", "--fixtures", str(tmp_path)]
    for version, registers in (("3.6.0", 7), ("3.9.0", 9)):
        rows_given(compiler=f"triton {version}", registers=registers)
        assert run(*words, "--accept") == 0
    rows_given(compiler="triton 3.9.1", registers=200)
    assert run(*words) == 0
    out = capsys.readouterr().out
    assert "1 of 1 kernels differ from triton-3.9.0.json" in out and "registers 9 -> 200" in out
    rows_given(compiler="triton 3.9.1", status="failed", reason="spills registers")
    assert run(*words) == 1


def test_accepting_one_architecture_keeps_the_others(rows_given, tmp_path):
    for arch in (90, 120):
        rows_given(arch=arch)
        assert run("--arch", str(arch), "--fixtures", str(tmp_path), "--accept") == 0
    assert list(golden.read(tmp_path / "compile" / "triton-3.9.0.json")) == [
        "sm_120 decode-x",
        "sm_90 decode-x",
    ]


def test_a_broken_golden_is_named(rows_given, capsys, tmp_path):
    rows_given()
    path = tmp_path / "compile" / "triton-3.9.0.json"
    path.parent.mkdir()
    for content, said in (("{", "triton-3.9.0.json"), ("{}", "not a golden"), ('{"tag": "x"}', "not a golden")):
        path.write_text(content)
        assert said in refused(capsys, "--fixtures", str(tmp_path))


def test_quick_compiles_for_one_architecture_and_takes_the_rest_from_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    compiled_for = []

    def compiled(wanted, timeout):
        compiled_for.append([arch for arch, _ in wanted])
        figures = ROW | {"head_order": "o", "heads": 8}
        return {key_of(a, c): figures | {"arch": a, "config": str(c), "kernel": c.kernel} for a, c in wanted}

    monkeypatch.setattr(compile_kernels, "compile_in_children", compiled)
    rows = kernel_rows([90, 120], layouts=["bf16"], heads=[8], quick=True)
    assert {(row["arch"], row["status"]) for row in rows} == {(90, "not run"), (120, "passed")}
    assert set(compiled_for[0]) == {120}
    kernel_rows([90], layouts=["bf16"], heads=[8])
    rows = kernel_rows([90, 120], layouts=["bf16"], heads=[8], quick=True)
    assert {(row["arch"], row["status"], row["cached"]) for row in rows} == {
        (90, "passed", True),
        (120, "passed", True),
    }
    assert compiled_for[2] == []


def test_a_gate_has_one_row_per_implementation_and_architecture():
    rows = [
        kernel_row(90, "decode", "fp8", "passed", config="a"),
        kernel_row(90, "prefill", "fp8", "failed", "spills 8 bytes", config="b"),
        kernel_row(80, "", "fp8", "unsupported", "no e4m3"),
        store_row(90, "fp4_fused f32/f32 x8", "fp4", "passed"),
        store_row(90, "", "store", "not run", "no compiler"),
    ]
    found = {(row.implementation, row.check): row for row in gate.added_up(rows)}
    assert {key: (row.status, row.examples, row.message) for key, row in found.items()} == {
        ("triton-fp8", "compile sm_90"): ("failed", 2, "b: spills 8 bytes"),
        ("triton-fp8", "compile sm_80"): ("unsupported", 0, "no e4m3"),
        ("store-fp4-fused", "compile sm_90"): ("passed", 1, ""),
        ("store", "compile sm_90"): ("not run", 0, "fused store: no compiler"),
    }
    assert found["triton-fp8", "compile sm_90"].repro == "parity compile --arch 90"
    assert {row.op for row in found.values()} == {"paged_logits", "store"}

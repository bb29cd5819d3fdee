"""The compile gate: every configuration for sm_90 and sm_120 fits, and what it must refuse is refused."""

import dataclasses

import pytest

from impl import configs
from parity.command import CommandError
from parity.run import compile as gate

pytest.importorskip("triton")

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
    rows = gate.compile_all([arch])
    assert len(rows) == len(configs.every(arch))
    assert [row for row in rows if row["status"] != "passed"] == []
    for row in rows:
        assert 0 < row["shared"] <= row["shared_limit"] and row["spill_stores"] == row["spill_loads"] == 0
        assert 0 < row["registers"] <= 255


def test_unsupported_is_named():
    rows = gate.compile_all([80], layouts=["fp8"]) + gate.compile_all([75], layouts=["bf16"])
    assert [row["status"] for row in rows] == ["unsupported"] * 2
    assert rows[0]["reason"] == "sm_80 has no e4m3 matrix instruction"
    assert "7.5" in rows[1]["reason"]


def test_too_much_shared_memory_and_spills_fail(monkeypatch, tmp_path):
    """A tile beyond 99 KiB, and one whose accumulators cannot fit the registers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    narrow = configs.configurations(120, "bf16", 64)[0]
    large = dataclasses.replace(narrow, num_stages=4)
    fat = dataclasses.replace(narrow, row_tile=4, num_warps=4, num_stages=1)
    monkeypatch.setattr(configs, "configurations", lambda arch, layout, heads: (large, fat))
    rows = gate.compile_all([120], layouts=["bf16"], heads=[64])
    assert [row["status"] for row in rows] == ["failed", "failed"]
    assert "bytes of shared memory, sm_120 has 101376" in rows[0]["reason"]
    assert rows[1]["reason"] == "spills registers" and rows[1]["spill_stores"] > 0
    again = gate.compile_all([120], layouts=["bf16"], heads=[64])
    assert [row["cached"] for row in rows + again] == [False, False, True, True]


def test_a_dying_compiler_fails_one_configuration(monkeypatch):
    """The child ends at the first configuration it does not know; the others are still compiled."""
    good = configs.configurations(90, "bf16", 8)[0]
    bad = dataclasses.replace(good, kernel="missing")
    monkeypatch.setattr(configs, "configurations", lambda arch, layout, heads: (bad, good))
    rows = gate.compile_all([90], layouts=["bf16"], heads=[8], use_cache=False)
    assert [row["status"] for row in rows] == ["failed", "passed"]


def test_another_order_of_the_head_sum_fails():
    row = {"arch": 90, "layout": "bf16", "heads": 64, "status": "passed", "reason": ""}
    rows = [row | {"config": str(i), "head_order": order} for i, order in enumerate(("a", "a", "b"))]
    gate._compare_orders(rows)
    assert [r["status"] for r in rows] == ["passed", "passed", "failed"]
    assert rows[2]["reason"] == "adds heads in another order than 0"


def test_head_order_is_read_from_the_layout():
    assert gate.head_order(TTGIR.replace("LAYOUT", "linear")) == "register 1 8, lane 2 4, warp -"
    with pytest.raises(ValueError, match="layout is not linear"):
        gate.head_order(TTGIR.replace("LAYOUT", "blocked"))
    with pytest.raises(ValueError, match="no reduction over heads"):
        gate.head_order("module {}")


def test_command_line(monkeypatch, capsys, tmp_path):
    row = {"arch": 90, "config": "decode-x", "layout": "bf16", "status": "passed", "reason": "", "registers": 9}
    row |= {"spill_stores": 0, "spill_loads": 0, "shared": 1024, "shared_limit": 2048}
    for status, code in (("passed", 0), ("failed", 1)):
        monkeypatch.setattr(gate, "compile_all", lambda arches, use_cache, s=status: [row | {"status": s}])
        assert gate.main(["--arch", "90", "--json", str(tmp_path / "rows.json")]) == code
        assert f"1 {status}" in capsys.readouterr().out
    assert (tmp_path / "rows.json").exists()
    monkeypatch.setattr(gate, "compile_all", lambda arches, use_cache: [row | {"status": "unsupported"}])
    with pytest.raises(CommandError, match="nothing could be compiled here"):
        gate.main([])

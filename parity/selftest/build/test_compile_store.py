"""The store's rows of the compile gate, and the cache of compiled kernels."""

import pytest

from impl import cache, store_compile
from impl.checks import Unsupported
from impl.store_compile import Variant, compile_variants
from impl.store_modes import MODES, Mode
from parity.build import compile_store
from parity.build.compile_store import parse_log, store_rows, variants

installed = pytest.mark.skipif(store_compile.missing() is not None, reason=f"not run: {store_compile.missing()}")
ONE = (Variant(Mode("fp8", "fused")),)
LOG = """
ptxas info    : 28 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_90'
ptxas info    : Function properties for first
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 43 registers, used 0 barriers
ptxas info    : Compiling entry function 'second' for 'sm_90'
ptxas info    : Function properties for second
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 4096 bytes smem
"""


@installed
@pytest.mark.parametrize("arch", [90, 120])
def test_every_instantiation_fits(arch):
    rows = store_rows([arch])
    assert len(rows) == len(variants()) == len(MODES) * 8
    assert all(row["status"] == "passed" for row in rows), [row for row in rows if row["status"] != "passed"]
    assert all(row["spill_stores"] == row["spill_loads"] == row["shared"] == 0 for row in rows)
    assert all(16 <= row["registers"] <= 64 for row in rows)
    assert len({row["config"] for row in rows}) == len(rows)


def test_an_unknown_architecture_is_unsupported():
    (row,) = store_rows([75])
    assert row["status"] == "unsupported" and "sm_75" in row["reason"]


def test_without_the_packages_the_rows_are_not_run(monkeypatch):
    monkeypatch.setattr(compile_store, "missing", lambda: "the package cuda-core is not installed")
    (row,) = store_rows([90])
    assert (row["status"], row["reason"]) == ("not run", "the package cuda-core is not installed")


def test_the_log_is_read():
    found = parse_log(LOG)
    assert found["first"] == {"stack": 0, "spill_stores": 0, "spill_loads": 0, "registers": 43, "shared": 0}
    assert found["second"] == {"stack": 16, "spill_stores": 8, "spill_loads": 12, "registers": 255, "shared": 4096}
    assert parse_log("nothing") == {}


@installed
def test_spills_and_too_much_shared_memory_fail(monkeypatch):
    monkeypatch.setattr(compile_store, "variants", lambda: ONE)
    symbol = compile_variants(ONE, "sm_90").symbols[ONE[0].expression]

    def answer(log):
        made = store_compile.Compiled(b"", {ONE[0].expression: symbol}, log)
        monkeypatch.setattr(compile_store, "compile_variants", lambda *_, **__: made)
        return store_rows([120])[0]

    assert answer(LOG.replace("first", symbol))["status"] == "passed"
    spilled = answer(LOG.replace("second", symbol))
    assert spilled["status"] == "failed" and "stack frame of 16 bytes" in spilled["reason"]
    big = answer(LOG.replace("first", symbol).replace("used 0 barriers", "used 0 barriers, 131072 bytes smem"))
    assert big["status"] == "failed" and "131072 bytes of shared memory, sm_120 has 101376" in big["reason"]
    lost = answer("")
    assert lost["status"] == "failed" and "does not name this kernel" in lost["reason"]


@installed
def test_cubins_are_kept_by_source_options_and_architecture(monkeypatch, tmp_path):
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path))
    first = compile_variants(ONE, "sm_90")
    calls = []

    def compiled(*given):
        calls.append(given)
        return first

    monkeypatch.setattr(store_compile, "_compile", compiled)
    assert compile_variants(ONE, "sm_90") == first and not calls
    compile_variants(ONE, "sm_80")
    source = store_compile.SOURCE.read_text()
    compile_variants(ONE, "sm_90", source + "\n// other\n")
    assert len(calls) == 2
    assert len(list((tmp_path / "cubin").glob("*.cubin"))) == 3


@installed
def test_a_broken_source_is_unsupported_with_the_compilers_words():
    with pytest.raises(Unsupported, match=r"refused the fused store for sm_90: .*error"):
        compile_variants(ONE, "sm_90", "namespace indexer { nonsense }")


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    cache.write(blocked / "x" / "y", b"1")
    assert cache.read(blocked / "x" / "y") is None
    cache.write(tmp_path / "x" / "y", b"1")
    assert cache.read(tmp_path / "x" / "y") == b"1"
    assert cache.digest("a", 1, b"2") != cache.digest("a", 1, b"3")

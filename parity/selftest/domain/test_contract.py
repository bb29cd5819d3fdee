"""Contracts: defaults, every key, and one clear sentence for each mistake."""

from __future__ import annotations

import pytest
import torch

from parity.domain.contract import Contract
from parity.numerics.arithmetic import IEEE, Grouped, Ieee


def test_defaults():
    for layout in ("bf16", "fp8", "fp4"):
        contract = Contract.default(layout)
        assert contract == Contract(layout) and contract.arithmetic == IEEE and not contract.rounds
        assert contract.describe_dot() == "ieee float32"
    assert Contract.default("bf16", "cuda", capability=(9, 0)).arithmetic == Ieee()
    hopper = Contract.default("fp8", "cuda", capability=(9, 0))
    assert hopper.arithmetic == Grouped(32, 13, 13) and not hopper.assumed and not hopper.dot_verified
    assert hopper.describe_dot() == "sm_90 e4m3 grouped(32, 13, 13), bound only"
    other = Contract.default("fp8", "cuda", capability=(12, 0))
    assert other.assumed and other.describe_dot() == "sm_90 e4m3 grouped(32, 13, 13), bound only, assumed"
    assert other.verified().describe_dot() == "grouped(32, 13, 13), verified"


def test_every_key_from_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        """
        layout = "fp8"
        arithmetic = { group = 16, kept = 24, final = 23, running = false, known_order = false }
        dot_dtype = "bf16"
        product_dtype = "float32"
        sum_unit = "fp16"
        out_dtype = "bf16"
        conversion = "truncate"
        tail = "unspecified"
        nonfinite = "unspecified"
        batch_invariant = true
        flush_to_zero = true
        devices = ["cuda", "sm_90"]
        heads = [32, 64]
        schedule_meta = "mine:schedule"
        """,
        encoding="utf-8",
    )
    contract = Contract.from_toml(path)
    assert contract == Contract(
        layout="fp8",
        arithmetic=Grouped(16, 24, 23, running=False, known_order=False),
        arithmetic_name="grouped(16, 24, 23, running=False, known_order=False)",
        named=True,
        dot_dtype=torch.bfloat16,
        product_dtype=torch.float32,
        sum_unit=torch.float16,
        out_dtype=torch.bfloat16,
        conversion="truncate",
        tail="unspecified",
        nonfinite="unspecified",
        batch_invariant=True,
        flush_to_zero=True,
        devices=("cuda", "sm_90"),
        heads=(32, 64),
        schedule_meta="mine:schedule",
    )
    assert contract.rounds
    path.write_text('[contract]\nlayout = "bf16"\n', encoding="utf-8")
    assert Contract.from_toml(path, op="topk").op == "topk"


def test_named_models_and_auto():
    named = Contract.from_dict({"layout": "fp8", "arithmetic": "sm_90 e4m3 imprecise 32"}, "cuda", capability=(9, 0))
    assert named.arithmetic == Grouped(32, 13, 13, running=False) and not named.assumed
    assert Contract.from_dict({"layout": "fp8", "arithmetic": "sm_90 e4m3"}, "cuda", capability=(8, 9)).assumed
    assert Contract.from_dict({"layout": "fp8", "arithmetic": "auto"}, "cpu").arithmetic == IEEE
    assert Contract.from_dict({"layout": "fp8", "arithmetic": "ieee"}, "cuda", capability=(9, 0)).arithmetic == IEEE


@pytest.mark.parametrize(
    "given, said",
    [
        ({"layout": "int8"}, "contract key 'layout' must be one of bf16, fp8, fp4, got 'int8'"),
        ({"layout": "fp8", "tail": "zero"}, "contract key 'tail' must be one of -inf, unspecified, got 'zero'"),
        ({"layout": "fp8", "stage": "topk"}, "contract key 'stage' is unknown: expected one of arithmetic, "),
        ({"layout": "fp8", "op": 3}, "contract key 'op' must be the name of an operation, got 3"),
        ({"layout": "fp4", "fake_fp4": True}, "contract key 'fake_fp4' must be false for fp4 pages"),
        ({"layout": "fp8", "dot_dtype": "int8"}, "contract key 'dot_dtype' must be float32, bf16 or fp16, got 'int8'"),
        ({"layout": "fp8", "batch_invariant": 1}, "contract key 'batch_invariant' must be true or false, got 1"),
        ({"layout": "fp8", "heads": ["64"]}, "contract key 'heads' must be a list of int, got ['64']"),
        ({"layout": "fp8", "devices": 3}, "contract key 'devices' must be a list of str, got 3"),
        ({"layout": "fp8", "arithmetic": {"group": 0, "kept": 1, "final": 1}}, "contract key 'arithmetic': group must"),
        ({"layout": "fp8", "arithmetic": {"groups": 1}}, "contract key 'arithmetic': "),
        ({"layout": "fp8", "arithmetic": "sm_1"}, "contract key 'arithmetic' is 'sm_1': expected auto, ieee, a table"),
        ({"layout": "fp8", "rtol": 0.1}, "contract key 'rtol' is unknown: expected one of arithmetic, batch_invariant"),
        ({"layout": "fp8", "dot_verified": True}, "contract key 'dot_verified' is unknown"),
        (
            {"layout": "fp8", "arithmetic": "sm_90 e4m3", "operand_dtype": "bf16"},
            "contract key 'operand_dtype' needs an ieee arithmetic",
        ),
        (["layout"], "a contract must be a table of keys, got list"),
    ],
)
def test_mistakes(given, said):
    with pytest.raises((ValueError, TypeError)) as caught:
        Contract.from_dict(given)
    assert str(caught.value).startswith(said)


def test_mistakes_in_files_name_the_file(tmp_path):
    path = tmp_path / "bad.toml"
    with pytest.raises(ValueError, match=r"contract file .*bad.toml cannot be read: No such file"):
        Contract.from_toml(path)
    path.write_text("layout = ", encoding="utf-8")
    with pytest.raises(ValueError, match=r"contract file .*bad.toml is not valid TOML"):
        Contract.from_toml(path)
    path.write_text('layout = "x"', encoding="utf-8")
    with pytest.raises(ValueError, match=r"bad.toml: contract key 'layout' must be one of"):
        Contract.from_toml(path)


def test_operation_and_layout_of_the_caller():
    for key, given, wanted in (("layout", "bf16", "fp8"), ("op", "store", "topk")):
        with pytest.raises(ValueError, match=f"contract key '{key}' is '{given}' but '{wanted}' was requested"):
            Contract.from_dict({key: given}, **{key: wanted})  # type: ignore[arg-type]
    assert Contract.from_dict({}, layout="fp8", op="topk") == Contract("fp8", "topk")
    assert Contract.from_dict({}) == Contract() and not Contract().layout  # operations without pages need none
    with pytest.raises(ValueError, match="'dot_verified' needs a grouped arithmetic"):
        Contract("fp8", dot_verified=True)

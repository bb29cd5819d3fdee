"""Configurations, rotary tables and the Hadamard transform, against the recorded units and the definitions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from parity.selftest.helpers import OFFICIAL, refusals, refuses, seeded
from reference import exact, rope
from reference.config import FLASH, PRO, TINY, IndexerConfig
from reference.hadamard import hadamard, hadamard_exact

SCALING = {"factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
SIZES = {"hidden_size": 4096, "q_lora_rank": 1024, "index_n_heads": 64, "index_topk": 512, "index_head_dim": 128}
RELEASED = SIZES | {
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "rope_scaling": {"type": "yarn", **SCALING},
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def read(folder: Path, data: object) -> IndexerConfig:
    path = folder / "config.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return IndexerConfig.from_hf_config(path)


def test_released_config(tmp_path: Path) -> None:
    assert read(tmp_path, RELEASED) == IndexerConfig.from_hf_config(tmp_path) == FLASH
    assert read(tmp_path, RELEASED | {"hidden_size": 7168, "q_lora_rank": 1536, "index_topk": 1024}) == PRO


def test_config_as_transformers_saves_it(tmp_path: Path) -> None:
    dropped = ("qk_rope_head_dim", "compress_ratios", "rope_scaling", "compress_rope_theta", "quantization_config")
    saved = {name: value for name, value in RELEASED.items() if name not in dropped}
    saved |= {
        "head_dim": 512,
        "partial_rotary_factor": 0.125,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "rope_parameters": {"main": {}, "compress": SCALING | {"rope_type": "yarn", "rope_theta": 160000.0}},
    }
    assert read(tmp_path, saved) == replace(FLASH, wq_b="bf16")


@pytest.mark.parametrize("field", [name for name in RELEASED if name not in ("rope_theta", "quantization_config")])
def test_missing_field_is_named(tmp_path: Path, field: str) -> None:
    rest = {name: value for name, value in RELEASED.items() if name != field}
    refuses(ValueError, rf"config.json: field .*({field}|rope_theta) is missing", read, tmp_path, rest)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"hidden_size": "wide"}, "hidden_size must be an integer, got 'wide'"),
        ({"index_head_dim": 64}, "config.json: .*head_dim must be 128, got 64"),
        ({"rms_norm_eps": None}, "rms_norm_eps is missing"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number"),
        ({"rope_scaling": 4}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear"}}, "must be 'yarn', got 'linear'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"compress_ratios": [0, 128]}, "compress_ratios must be a list that contains 4"),
        ({"index_topk": 0}, "topk must be a positive integer, got 0"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object"),
        ("{", "config.json: is not JSON"),
        ("[]", "config.json: must hold a JSON object"),
    ],
)
def test_bad_field_is_named(tmp_path: Path, change: dict[str, object] | str, sentence: str) -> None:
    refuses(ValueError, sentence, read, tmp_path, change if isinstance(change, str) else RELEASED | change)


test_mistakes = refusals(
    {
        r"absent.json: cannot be read \(No such file": lambda: IndexerConfig.from_hf_config(Path("absent.json")),
        "wq_b must be 'bf16' or 'fp8', got 'int8'": lambda: replace(TINY, wq_b="int8"),
        "n_heads must be a positive integer": lambda: replace(TINY, n_heads=0),
        "norm_eps must be a positive number": lambda: replace(TINY, norm_eps=-1.0),
        "must not be negative": lambda: rope.rope_table(TINY, -1),
        "power of two": lambda: hadamard(torch.zeros(96, dtype=torch.bfloat16)),
    }
)
test_wrong_dtypes = refusals(
    {
        "x must be bfloat16": lambda: rope.rotate(torch.zeros(3, 128), torch.zeros(64)),
        "rows must be float32": lambda: rope.rotate(torch.zeros(3, 128).bfloat16(), torch.zeros(64).bfloat16()),
        "must be bfloat16": lambda: hadamard(torch.zeros(128)),
    },
    TypeError,
)


def test_rotary_equals_the_recorded_unit() -> None:
    unit = load_file(OFFICIAL / "unit_stages.safetensors")
    assert torch.equal(rope.inv_freq(TINY), unit["rope.inv_freq"])
    rows = torch.stack((unit["rope.cos"], unit["rope.sin"]), dim=-1).flatten(-2)
    assert torch.equal(rope.rotate(unit["rope.in"], rows[:, None]), unit["rope.out"])
    # This machine's sine and cosine may differ from the recording's in the last place (2**-24 below one).
    assert float((rope.rope_rows(TINY, unit["rope.positions"]) - rows).abs().max()) <= 2.0**-24


def test_rotary_table_and_rows_agree() -> None:
    table = rope.rope_table(TINY, 50)
    assert table.dtype == torch.float32 and table.shape == (50, 64)
    assert torch.equal(rope.rope_rows(TINY, torch.tensor([49, 7])), table[[49, 7]])
    assert torch.equal(table[0], torch.tensor([1.0, 0.0]).repeat(32))


def test_yarn_bends_pairs_15_to_25_only() -> None:
    plain = torch.tensor([160000.0 ** -(2 * i / 64) for i in range(32)], dtype=torch.float64)
    ratio = rope.inv_freq(TINY).double() / plain
    assert bool(((ratio[:16] - 1).abs() < 1e-6).all()) and bool(((ratio[25:] * 16 - 1).abs() < 1e-6).all())
    assert bool((ratio[15:26].diff() < 0).all())


def test_rotation_leaves_the_first_half() -> None:
    x = torch.randn(3, 128, generator=seeded(0)).to(torch.bfloat16)
    out = rope.apply_rope(x, torch.tensor([0, 1, 2]), rope.rope_table(TINY, 4))
    assert torch.equal(out[:, :64], x[:, :64]) and torch.equal(out[0], x[0]) and not torch.equal(out[1:], x[1:])


def sylvester(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


def test_exact_hadamard_is_sylvesters_matrix() -> None:
    x = torch.randn(5, 128, dtype=torch.float64, generator=seeded(0))
    assert torch.allclose(hadamard_exact(x), x @ sylvester(128) * 128**-0.5, rtol=0, atol=1e-13)
    assert torch.allclose(exact.hadamard(exact.hadamard(x)), x, rtol=0, atol=1e-13)


def test_published_hadamard_rounds_once() -> None:
    unit = load_file(OFFICIAL / "unit_stages.safetensors")
    out = hadamard(unit["hadamard.in"])
    assert torch.equal(out, unit["hadamard.out"])
    sums = (unit["hadamard.in"].double() @ sylvester(128)).to(torch.bfloat16)
    twice = (sums.double() * 128**-0.5).to(torch.bfloat16)
    assert float((twice != out).double().mean()) > 0.1  # the common mistake shows on this data

"""Shapes and constants of the indexer: published configurations, tiny ones for tests, and a reader of config.json."""

import dataclasses
import json
from pathlib import Path
from typing import Any, Self

_FIXED = {"head_dim": 128, "rope_dim": 64, "ratio": 4}


@dataclasses.dataclass(frozen=True)
class IndexerConfig:
    """One indexer. Sizes are counts of channels, heads or keys; positions are token positions.

    `wq_b` names the storage of the query projection: "bf16", or "fp8" (e4m3 with 128 x 128 power-of-two scales, as
    released). Raises ValueError for a size that the published arithmetic does not have.
    """

    dim: int
    q_lora_rank: int
    n_heads: int
    topk: int
    head_dim: int = 128
    rope_dim: int = 64
    ratio: int = 4
    norm_eps: float = 1e-6
    rope_theta: float = 160000.0
    rope_factor: float = 16.0
    original_seq_len: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    wq_b: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("dim", "q_lora_rank", "n_heads", "topk", "original_seq_len"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"IndexerConfig: {name} must be a positive integer, got {value!r}")
        for name, wanted in _FIXED.items():
            if getattr(self, name) != wanted:
                raise ValueError(f"IndexerConfig: {name} must be {wanted}, got {getattr(self, name)!r}")
        for name in ("norm_eps", "rope_theta", "rope_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"IndexerConfig: {name} must be a positive number, got {value!r}")
        if self.wq_b not in ("bf16", "fp8"):
            raise ValueError(f"IndexerConfig: wq_b must be 'bf16' or 'fp8', got {self.wq_b!r}")

    @classmethod
    def from_hf_config(cls, path: str | Path) -> Self:
        """Read a published DeepSeek-V4 config.json (or the folder that holds it).

        Understands the file as released (`compress_ratios`, `rope_scaling`) and as transformers rewrites it
        (`compress_rates`, `rope_parameters` with a `compress` entry). Raises ValueError naming the file and the field.
        """
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        fields = _Fields(path, _load(path), "")
        rope = fields.section("rope_scaling", "rope_parameters")
        rope = rope.section("compress") if "compress" in rope.data else rope
        kind = rope.get("rope_type", "type", default="yarn")
        if kind != "yarn":
            raise ValueError(f"{path}: rope_scaling type must be 'yarn', got {kind!r}")
        quantisation = fields.data.get("quantization_config") or {}
        if not isinstance(quantisation, dict):
            raise ValueError(f"{path}: quantization_config must be an object, got {quantisation!r}")
        theta = rope.get("rope_theta", default=None) if "compress_rope_theta" not in fields.data else None
        try:
            return cls(
                dim=fields.integer("hidden_size"),
                q_lora_rank=fields.integer("q_lora_rank"),
                n_heads=fields.integer("index_n_heads"),
                topk=fields.integer("index_topk"),
                head_dim=fields.integer("index_head_dim"),
                rope_dim=_rope_dim(fields),
                ratio=_ratio(fields),
                norm_eps=fields.number("rms_norm_eps"),
                rope_theta=fields.number("compress_rope_theta") if theta is None else rope.number("rope_theta"),
                rope_factor=rope.number("factor"),
                original_seq_len=rope.integer("original_max_position_embeddings"),
                beta_fast=rope.number("beta_fast"),
                beta_slow=rope.number("beta_slow"),
                wq_b="fp8" if quantisation.get("quant_method") == "fp8" else "bf16",
            )
        except ValueError as error:
            text = str(error)
            raise ValueError(text if str(path) in text else f"{path}: {text}") from None


FLASH = IndexerConfig(dim=4096, q_lora_rank=1024, n_heads=64, topk=512, wq_b="fp8")
PRO = IndexerConfig(dim=7168, q_lora_rank=1536, n_heads=64, topk=1024, wq_b="fp8")
TINY = IndexerConfig(dim=256, q_lora_rank=128, n_heads=8, topk=16)
TINY64 = IndexerConfig(dim=256, q_lora_rank=128, n_heads=64, topk=16)
"""64 heads: the only tiny shape whose head-weight constant 128**-0.5 * 64**-0.5 is inexact in float32."""


@dataclasses.dataclass(frozen=True)
class _Fields:
    """An object of the file, read field by field so that each complaint names the file and the field."""

    path: Path
    data: dict[str, Any]
    prefix: str

    def section(self, *names: str) -> "_Fields":
        value = self.get(*names)
        if not isinstance(value, dict):
            raise ValueError(f"{self.path}: {self.prefix}{names[0]} must be an object, got {value!r}")
        name = next(name for name in names if self.data.get(name) is not None)
        return _Fields(self.path, value, f"{self.prefix}{name}.")

    def get(self, *names: str, **default: Any) -> Any:
        for name in names:
            if self.data.get(name) is not None:
                return self.data[name]
        if "default" in default:
            return default["default"]
        raise ValueError(f"{self.path}: field {self.prefix}{names[0]} is missing")

    def integer(self, name: str) -> int:
        value = self.get(name)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{self.path}: field {self.prefix}{name} must be an integer, got {value!r}")
        return value

    def number(self, name: str) -> float:
        value = self.get(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(f"{self.path}: field {self.prefix}{name} must be a number, got {value!r}")
        return float(value)


def _load(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except ValueError as error:
        raise ValueError(f"{path}: is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: must hold a JSON object, got {type(data).__name__}")
    return data


def _rope_dim(fields: _Fields) -> int:
    if fields.data.get("qk_rope_head_dim") is None and fields.data.get("partial_rotary_factor") is not None:
        return round(fields.number("partial_rotary_factor") * fields.integer("head_dim"))
    return fields.integer("qk_rope_head_dim")


def _ratio(fields: _Fields) -> int:
    """The compression ratio of the layers that carry an indexer; other layers have 0 or 128."""
    rates = fields.data.get("compress_rates")
    if isinstance(rates, dict) and isinstance(rates.get("compressed_sparse_attention"), int):
        return rates["compressed_sparse_attention"]
    ratios = fields.get("compress_ratios")
    if not isinstance(ratios, list) or 4 not in ratios:
        raise ValueError(f"{fields.path}: field compress_ratios must be a list that contains 4, got {ratios!r}")
    return 4

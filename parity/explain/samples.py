"""What is measured on: queries, pooled keys and head gates of one context, drawn by a data model or captured.

Drawn data is not real data. The models differ on purpose in what decides a top-k: independent gaussians, channels of
very different size, keys of low rank whose topic drifts, and near-duplicates. Real keys may behave differently from all
of them; `captured` takes a model's own tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from parity.explain import draws, rounding
from parity.explain.choices import BY_NAME
from parity.pages.layout import DIM
from reference import compressor, formats, linear
from reference.config import IndexerConfig

MODELS = {
    "gaussian": "independent gaussian keys and queries",
    "heavy-channels": "channels of very different size (log-normal, spread e^1.25) in the norm weight",
    "topic-drift": "keys of rank 16 drifting to a new topic every 256 keys, plus noise; queries ask for one topic",
    "near-duplicates": "every key is one of 1/32 as many prototypes plus noise of 1/16",
}
RANK, TOPIC_KEYS, TOPIC_NOISE = 16, 256, 0.5
COPIES, COPY_NOISE = 32, 1 / 16
CHANNEL_SPREAD = 1.25
POOLED_NOISE = 0.45  # deviation that pooling 8 slots with these gate scores leaves of unit noise
AT_ONCE = {"cpu": 1 << 12, "cuda": 1 << 17}  # keys whose tokens are drawn and pooled together


@dataclasses.dataclass(frozen=True)
class Sample:
    """One context of S compressed keys and n queries that see it.

    positions int64 [n] (tokens), gate bfloat16 [n, H] (result of weights_proj), norm float32 [128]. Keys: either
    `tokens(first, last)`, which gives the projections kv and score of the tokens of windows first .. last - 1, float32
    [4 (last - first), 256], with ape [4, 256]; or pooled float32 [S, 128]. Queries: either latents qr bfloat16 [n, R]
    with wq_b as e4m3 codes and exponents, or q bfloat16 [n, H, 128] as projected.
    """

    name: str
    config: IndexerConfig
    positions: Tensor
    gate: Tensor
    norm: Tensor
    keys: int
    tokens: Callable[[int, int], tuple[Tensor, Tensor]] | None = None
    ape: Tensor | None = None
    pooled: Tensor | None = None
    qr: Tensor | None = None
    wq: tuple[Tensor, Tensor] | None = None
    q: Tensor | None = None

    @property
    def lens(self) -> Tensor:
        """Keys that each query may see, int64 [n]."""
        return ((self.positions + 1) // self.config.ratio).clamp_max(self.keys)

    @property
    def device(self) -> torch.device:
        """Where its tensors lie."""
        return self.gate.device


@dataclasses.dataclass(frozen=True)
class Weights:
    """The model's part of a draw, the same for every context of a seed."""

    config: IndexerConfig
    seed: int
    model: str
    norm: Tensor
    ape: Tensor
    wq: tuple[Tensor, Tensor]
    basis: Tensor  # float32 [16, 128]: directions of topics in a key
    reader: Tensor  # float32 [16, R]: the same topics in a query's latent


def weights(config: IndexerConfig, model: str, seed: int, device: torch.device) -> Weights:
    """Norm weight, gate bias and wq_b (e4m3 with exponent -8) of a data model; ValueError for an unknown model."""
    if model not in MODELS:
        raise ValueError(f"data: expected one of {', '.join(MODELS)}, got {model!r}")

    def normal(stream: str, rows: int, width: int, which: int = 0) -> Tensor:
        return draws.gaussian(seed, stream, which, torch.arange(rows, device=device), width)

    out, rank = config.n_heads * DIM, config.q_lora_rank
    norm = 1 + 0.1 * normal("norm", 1, DIM)[0]
    if model == "heavy-channels":
        norm = norm * torch.exp(CHANNEL_SPREAD * normal("channel", 1, DIM)[0])
    basis, reader = normal("topic", RANK, DIM, 1) / RANK**0.5, normal("topic", RANK, rank, 2) / rank**0.5
    matrix = normal("wq", out, rank) * rank**-0.5
    if model == "topic-drift":  # a head reads the latent's topic through a mixing of its own, plus noise
        mixing = normal("topic", config.n_heads * RANK, RANK, 3).view(config.n_heads, RANK, RANK) / RANK**0.5
        mixing = mixing + 0.5 * torch.eye(RANK, device=device)
        read = torch.einsum("rd,hrs,sl->hdl", basis, mixing, reader).reshape(out, rank)
        matrix = TOPIC_NOISE * matrix + read
    codes = (matrix * 256).clamp(-formats.E4M3_MAX, formats.E4M3_MAX).to(torch.float8_e4m3fn)
    exponents = torch.full((config.n_heads, rank // DIM), -8, dtype=torch.int32, device=device)
    norm = norm.to(torch.bfloat16).to(torch.float32)
    return Weights(config, seed, model, norm, 0.5 * normal("ape", 4, 2 * DIM), (codes, exponents), basis, reader)


def draw(source: Weights, case: int, tokens: int, rows: int) -> Sample:
    """Context number `case` of `tokens` tokens and `rows` queries at its last position; ValueError without a key.

    Tokens are functions of their number, so nothing is held of them, and a longer context extends a shorter one.
    """
    if tokens < 4:
        raise ValueError(f"tokens: a context needs at least 4 tokens for one key, got {tokens}")
    config, seed, device = source.config, source.seed, source.norm.device
    keys = tokens // config.ratio
    row = torch.arange(rows, device=device)
    latent = draws.gaussian(seed, "latent", case, row, config.q_lora_rank)
    if source.model == "topic-drift":
        wanted = _topics(source, case, draws.integers(seed, "place", case, row, keys))
        latent = TOPIC_NOISE * latent + wanted @ source.reader * config.q_lora_rank**0.5

    def projections(first: int, last: int) -> tuple[Tensor, Tensor]:
        token = torch.arange(4 * first, 4 * last, device=device)
        kv = draws.gaussian(seed, "kv", case, token, 2 * DIM)
        # Channels 128.. belong to the token's own window, channels ..127 to the next one.
        base = _base(source, case, torch.arange(first, last + 1, device=device), keys)
        if base is not None:
            kv *= (COPY_NOISE if source.model == "near-duplicates" else TOPIC_NOISE) / POOLED_NOISE
            kv[:, DIM:] += base[:-1].repeat_interleave(4, 0)
            kv[:, :DIM] += base[1:].repeat_interleave(4, 0)
        return kv, draws.gaussian(seed, "score", case, token, 2 * DIM)

    return Sample(
        name=f"{source.model} {tokens:,} tokens, seed {seed}, context {case}",
        config=config,
        positions=torch.full((rows,), tokens - 1, dtype=torch.int64, device=device),
        gate=draws.gaussian(seed, "gate", case, row, config.n_heads).to(torch.bfloat16),
        norm=source.norm,
        keys=keys,
        tokens=projections,
        ape=source.ape,
        qr=latent.to(torch.bfloat16),
        wq=source.wq,
    )


def _base(source: Weights, case: int, number: Tensor, keys: int) -> Tensor | None:
    """What the keys `number` are before token noise, float32 [n, 128]; None for the models without structure."""
    if source.model == "topic-drift":
        return _topics(source, case, number) @ source.basis
    if source.model == "near-duplicates":
        copied = draws.integers(source.seed, "place", case, number + (1 << 40), max(1, keys // COPIES))
        return draws.gaussian(source.seed, "prototype", case, copied, DIM)
    return None


def _topics(source: Weights, case: int, number: Tensor) -> Tensor:
    """Topic coordinates of keys, float32 [n, 16]: drawn every 256 keys, linear in between, scaled to unit variance."""
    first = number // TOPIC_KEYS
    weight = ((number % TOPIC_KEYS).to(torch.float32) / TOPIC_KEYS)[:, None]
    here = draws.gaussian(source.seed, "topic", case + 10, first, RANK)
    there = draws.gaussian(source.seed, "topic", case + 10, first + 1, RANK)
    return (here * (1 - weight) + there * weight) / torch.sqrt(weight.square() + (1 - weight).square())


def pooled(sample: Sample, projection: str = "float32", pooling: str = "float32") -> Tensor:
    """Pooled keys float32 [S, 128]. `projection` bf16 rounds kv and score, `pooling` bf16 weights, products and sum."""
    if sample.pooled is not None:
        if (projection, pooling) != ("float32", "float32"):
            raise ValueError("projection_k, pooling: this context has pooled keys only, so they cannot be varied")
        return sample.pooled
    if sample.tokens is None or sample.ape is None:
        raise ValueError("sample: keys are needed, as pooled or as tokens with ape")
    step = AT_ONCE.get(sample.device.type, AT_ONCE["cpu"])
    parts = []
    for first in range(0, sample.keys, step):
        last = min(first + step, sample.keys)
        kv, score = sample.tokens(max(first - 1, 0), last)
        kv, score = (rounding.POINTS[projection](x) for x in (kv, score))
        score = compressor.add_ape(score, sample.ape, torch.arange(len(score), device=score.device))
        if first == 0:  # the first window has no predecessor
            front = (4, 2 * DIM)
            kv, score = torch.cat((kv.new_zeros(front), kv)), torch.cat((score.new_full(front, -torch.inf), score))
        parts.append(_pool(*compressor.windows(kv, score), pooling))
    return torch.cat(parts)


def _pool(held: Tensor, gates: Tensor, pooling: str) -> Tensor:
    if pooling == "float32":
        return compressor.pool(held, gates)
    weight = torch.softmax(gates, dim=-2).to(torch.bfloat16)
    product = held.to(torch.bfloat16) * weight
    return product.sum(dim=-2, dtype=torch.float32).to(torch.bfloat16).to(torch.float32)


def projected(sample: Sample, precision: str = "fp8") -> Tensor:
    """Queries as projected, float32 [n, H, 128]; precision fp8 (as released), bf16 or float32.

    fp8 adds partial sums of 128 channels in float32, as published; the others do not quantise the activations.
    """
    if sample.q is not None:
        if precision != BY_NAME["projection_q"].published:
            raise ValueError("projection_q: this context has projected queries only, so it cannot be varied")
        return sample.q.to(torch.float32)
    if sample.qr is None or sample.wq is None:
        raise ValueError("sample: queries are needed, as q or as qr with wq_b")
    return PROJECTIONS[precision](sample.qr, *sample.wq).unflatten(-1, (sample.config.n_heads, DIM))


def _wide(qr: Tensor, codes: Tensor, exponents: Tensor) -> Tensor:
    scale = formats.pow2(exponents).to(torch.float32)
    weight = codes.to(torch.float32) * scale.repeat_interleave(DIM, 0).repeat_interleave(DIM, 1)
    return torch.nn.functional.linear(qr.to(torch.float32), weight)


PROJECTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "fp8": lambda qr, codes, exponents: linear.project_fp8(qr, codes, exponents, "library").to(torch.float32),
    "bf16": lambda *given: rounding.bf16(_wide(*given)),
    "float32": _wide,
}


CAPTURED = {
    "q": (torch.bfloat16, "[n, H, 128], as projected"),
    "gate": (torch.bfloat16, "[n, H], result of weights_proj"),
    "pooled": (torch.float32, "[S, 128], before the norm"),
    "norm": (torch.float32, "[128]"),
    "positions": (torch.int64, "[n], token positions"),
}


def captured(path: str | Path, topk: int, device: torch.device) -> Sample:
    """A context from a safetensors file with the tensors of `CAPTURED`; ValueError naming what is missing or wrong."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found: Mapping[str, Tensor] = load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}: cannot be read as safetensors ({error})") from error
    for name, (_, shape) in CAPTURED.items():
        if name not in found:
            raise ValueError(f"{path}: tensor {name} {shape} is missing")
    tensors = {name: found[name].to(device, dtype) for name, (dtype, _) in CAPTURED.items()}
    rows, heads = tensors["gate"].shape if tensors["gate"].dim() == 2 else (-1, -1)
    wanted = {
        "q": (rows, heads, DIM),
        "gate": (rows, heads),
        "pooled": (len(tensors["pooled"]), DIM),
        "norm": (DIM,),
        "positions": (rows,),
    }
    for name, size in wanted.items():
        if tuple(tensors[name].shape) != size or 0 in size:
            raise ValueError(f"{path}: {name} must be {CAPTURED[name][1]}, got {list(tensors[name].shape)}")
    if int(tensors["positions"].min()) < 3:
        raise ValueError(f"{path}: positions must be at least 3, so that a query sees a key")
    config = IndexerConfig(dim=DIM, q_lora_rank=DIM, n_heads=heads, topk=topk)
    return Sample(str(path), config, keys=len(tensors["pooled"]), **tensors)  # type: ignore[arg-type]

"""The published indexer end to end, and its stages one by one: query, head weights, dots, scores, mask, top-k."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from reference import compressor, exact, formats, linear, rope
from reference.compressor import CompressorState, Keys
from reference.config import IndexerConfig
from reference.hadamard import hadamard

_CELLS = 1 << 22  # float64 dots held at once while scoring


@dataclasses.dataclass(frozen=True)
class IndexerParams:
    """Weights: wkv, wgate [256, dim], ape [4, 256], norm [128], weights_proj [H, dim]; and the query projection, either
    wq_b bfloat16 [H * 128, q_lora_rank] or wq_b_fp8 e4m3 with wq_b_exp int [H, q_lora_rank / 128] (scale 2**exp)."""

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor
    weights_proj: Tensor
    wq_b: Tensor | None = None
    wq_b_fp8: Tensor | None = None
    wq_b_exp: Tensor | None = None

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], prefix: str = "param.") -> Self:
        """From a mapping of names; a missing one raises ValueError. An fp8 wq_b also gives the (exact) bfloat16 one."""
        names = [field.name for field in dataclasses.fields(cls)]
        found = {name: tensors[prefix + name] for name in names if prefix + name in tensors}
        missing = [name for name in names[:5] if name not in found]
        if missing or not ("wq_b" in found or {"wq_b_fp8", "wq_b_exp"} <= found.keys()):
            raise ValueError(f"IndexerParams: tensor {prefix}{missing[0] if missing else 'wq_b'} is missing")
        if "wq_b" not in found:
            exponent = found["wq_b_exp"].to(torch.int32).repeat_interleave(128, 0).repeat_interleave(128, 1)
            wide = exact.widen(found["wq_b_fp8"]) * formats.pow2(exponent)
            found["wq_b"] = formats.round_to(wide, torch.bfloat16)
        return cls(**found)

    @classmethod
    def random(cls, config: IndexerConfig, seed: int = 0) -> Self:
        """Weights of plausible size for tests (torch's generator: not the same bits on every CPU)."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int, scale: float) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32) * scale

        width, out = 2 * compressor.DIM, config.n_heads * config.head_dim
        tensors = {
            "wkv": normal(width, config.dim, scale=config.dim**-0.5).to(torch.bfloat16),
            "wgate": normal(width, config.dim, scale=config.dim**-0.5).to(torch.bfloat16),
            "ape": normal(config.ratio, width, scale=0.5),
            "norm": (1 + normal(config.head_dim, scale=0.1)).to(torch.bfloat16),
            "weights_proj": normal(config.n_heads, config.dim, scale=config.dim**-0.5).to(torch.bfloat16),
        }
        wq_b = normal(out, config.q_lora_rank, scale=config.q_lora_rank**-0.5)
        if config.wq_b == "bf16":
            tensors["wq_b"] = wq_b.to(torch.bfloat16)
        else:
            blocks = (out // 128, config.q_lora_rank // 128)
            tensors["wq_b_exp"] = torch.full(blocks, -8, dtype=torch.int16)
            tensors["wq_b_fp8"] = formats.e4m3_encode(wq_b * 256).view(torch.float8_e4m3fn)
        return cls.from_tensors(tensors, prefix="")

    def to(self, device: torch.device | str) -> Self:
        """The same weights on another device."""
        held = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return dataclasses.replace(self, **{name: x.to(device) for name, x in held.items() if x is not None})


class Query(NamedTuple):
    """Query stages: projected, rotated, transformed, fp4 (bfloat16 [..., H, 128]); exponents int16 [..., H, 4]."""

    proj: Tensor
    roped: Tensor
    hadamard: Tensor
    fp4: Tensor
    exponents: Tensor


def project_q(qr: Tensor, params: IndexerParams, config: IndexerConfig, how: str = "exact") -> Tensor:
    """Queries bfloat16 [..., H, 128] of latents qr bfloat16 [..., q_lora_rank], by the bf16 or the fp8 projection."""
    if config.wq_b == "fp8":
        if params.wq_b_fp8 is None or params.wq_b_exp is None:
            raise ValueError("project_q: the configuration wants an fp8 wq_b, got parameters without one")
        out = linear.project_fp8(qr, params.wq_b_fp8, params.wq_b_exp, how)
    else:
        if params.wq_b is None:
            raise ValueError("project_q: the configuration wants a bf16 wq_b, got parameters without one")
        out = linear.project_bfloat16(qr, params.wq_b, how)
    return out.unflatten(-1, (config.n_heads, config.head_dim))


def query(proj: Tensor, positions: Tensor, table: Tensor) -> Query:
    """The stages after the projection, of proj bfloat16 [..., S, H, 128] at the queries' own positions [S]."""
    roped = rope.apply_rope(proj, positions[:, None], table)
    turned = hadamard(roped)
    return Query(proj, roped, turned, *formats.fp4_quantise(turned))


def head_weights(proj: Tensor, n_heads: int, head_dim: int = 128) -> Tensor:
    """bf16(f32(proj) * c) of bfloat16 [..., H]; c = head_dim**-0.5 * n_heads**-0.5 in double, narrowed to float32."""
    constant = torch.tensor(head_dim**-0.5 * n_heads**-0.5, dtype=torch.float32, device=proj.device)
    return (proj.to(torch.float32) * constant).to(torch.bfloat16)


def dots(q: Tensor, k: Tensor) -> Tensor:
    """bfloat16 [n, H, S]: per-head dots of q [n, H, 128] and keys k [S, 128], summed exactly and rounded once.

    On the fp4 grid float32 sums are exact in any order while block exponents spread over at most nine binades, so every
    implementation that rounds here gives these bits.
    """
    rows, heads, dim = q.shape
    wide = exact.widen(q).reshape(rows * heads, dim) @ exact.widen(k).t()
    return formats.round_to(wide, torch.bfloat16).view(rows, heads, k.shape[0])


def scores(dot: Tensor, weight: Tensor) -> Tensor:
    """bf16(sum_h bf16(relu(dot) * w)) -> bfloat16 [n, S]; dot bfloat16 [n, H, S], head weights bfloat16 [n, H]."""
    product = (torch.relu(dot).to(torch.float32) * weight.to(torch.float32)[..., None]).to(torch.bfloat16)
    return formats.round_to(product.to(torch.float64).sum(dim=-2), torch.bfloat16)


def visible(positions: Tensor, ratio: int = 4) -> Tensor:
    """Keys that a query at each position may see: (position + 1) // 4, the key it closes included."""
    return (positions + 1) // ratio


def mask(logits: Tensor, positions: Tensor) -> Tensor:
    """Logits [..., n, S] with -inf at keys that the queries at positions [n] may not see."""
    keys = torch.arange(logits.shape[-1], device=logits.device)
    return logits.masked_fill(keys >= visible(positions)[:, None], -torch.inf)


def topk(masked: Tensor, k: int, positions: Tensor, offset: int = 0) -> Tensor:
    """Selected key positions int64 [..., n, min(k, S)], best first, plus offset; -1 for those a query may not see.

    The order among equal logits is torch.topk's, which is unspecified: compare selections by value.
    """
    chosen = masked.topk(min(k, masked.shape[-1]), dim=-1).indices
    return torch.where(chosen >= visible(positions)[:, None], -1, chosen + offset)


class Output(NamedTuple):
    """Result of a chunk of S tokens in B slots with T keys behind them.

    topk int64 [B, S, min(topk, T)], logits bfloat16 [B, S, T] before and after the mask, the query's stages, the head
    weights (projected, scaled: bfloat16 [B, S, H]) and the keys that the chunk closed, one `Keys` a slot.
    """

    topk: Tensor
    logits: Tensor
    masked: Tensor
    query: Query
    weights_proj: Tensor
    weights: Tensor
    keys: list[Keys]


class Indexer:
    """The published indexer over an explicit state. `how` picks the matrix products of `reference.linear`."""

    def __init__(self, params: IndexerParams, config: IndexerConfig, *, max_position: int = 8192, how: str = "exact"):
        if how not in linear.HOW:
            raise ValueError(f"Indexer: how must be one of {', '.join(linear.HOW)}, got {how!r}")
        self.params, self.config, self.how = params, config, how
        self.table = rope.rope_table(config, max_position, params.wkv.device)

    def state(self, slots: int = 1, *, history: int = 64) -> CompressorState:
        """A fresh state on the parameters' device."""
        return CompressorState(self.config, slots, history=history, device=self.params.wkv.device)

    def compress(self, x: Tensor, state: CompressorState, slots: Sequence[int] | None = None) -> list[Keys]:
        """Take x bfloat16 [B, S, dim], the next S tokens of each slot (all by default); return the keys they close.

        Slots may stand at different positions.
        """
        slots = self._slots(x, state, slots)
        ends = [state.length(slot) + x.shape[1] for slot in slots]
        if max(ends, default=0) > self.table.shape[0]:
            raise ValueError(f"x: tokens must end by position {self.table.shape[0]} (max_position), got {max(ends)}")
        kv = linear.project_float32(x, self.params.wkv, self.how)
        score = linear.project_float32(x, self.params.wgate, self.how)
        out = []
        for i, slot in enumerate(slots):
            start = state.length(slot)
            positions = torch.arange(start, start + x.shape[1], device=x.device)
            held = compressor.pool(*state.append(kv[i], compressor.add_ape(score[i], self.params.ape, positions), slot))
            first = torch.arange(held.shape[0], device=x.device) * self.config.ratio + start // 4 * 4
            keys = compressor.finish(held, self.params.norm, self.config.norm_eps, first, self.table)
            state.add_keys(keys.fp4, slot)
            out.append(keys)
        return out

    def chunk(
        self, x: Tensor, qr: Tensor, state: CompressorState, slots: Sequence[int] | None = None, *, offset: int = 0
    ) -> Output:
        """Index the next S tokens of each slot: x bfloat16 [B, S, dim], qr bfloat16 [B, S, q_lora_rank].

        Any split of a prompt into chunks gives each token the logits and keys of one call; published code only has the
        whole prompt from position 0, and single tokens. `offset` is added to selected positions (published: S in a
        prefill, the window size in decode). Slots must stand at one position, else ValueError.
        """
        slots = self._slots(x, state, slots)
        starts = {state.length(slot) for slot in slots}
        if len(starts) > 1:
            raise ValueError(f"slots: chunk wants slots at one position, got lengths {sorted(starts)}")
        if qr.dtype != torch.bfloat16 or tuple(qr.shape) != (*x.shape[:2], self.config.q_lora_rank):
            wanted = [*x.shape[:2], self.config.q_lora_rank]
            raise ValueError(f"qr: expected torch.bfloat16 {wanted}, got {qr.dtype} {list(qr.shape)}")
        start = starts.pop() if starts else 0
        positions = torch.arange(start, start + x.shape[1], device=x.device)
        keys = self.compress(x, state, slots)
        stages = query(project_q(qr, self.params, self.config, self.how), positions, self.table)
        proj = linear.project_bfloat16(x, self.params.weights_proj, self.how)
        weights = head_weights(proj, self.config.n_heads, self.config.head_dim)
        logits = torch.stack([self._score(stages.fp4[i], state.keys(s), weights[i]) for i, s in enumerate(slots)])
        masked = mask(logits, positions)
        chosen = topk(masked, self.config.topk, positions, offset)
        return Output(chosen, logits, masked, stages, proj, weights, keys)

    def _score(self, q: Tensor, k: Tensor, weight: Tensor) -> Tensor:
        rows = max(1, _CELLS // max(1, q.shape[1] * k.shape[0]))
        parts = [scores(dots(q[i : i + rows], k), weight[i : i + rows]) for i in range(0, q.shape[0], rows)]
        return torch.cat(parts) if parts else torch.empty((0, k.shape[0]), dtype=torch.bfloat16, device=q.device)

    def _slots(self, x: Tensor, state: CompressorState, slots: Sequence[int] | None) -> list[int]:
        chosen = list(range(state.slots)) if slots is None else list(slots)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"slots: expected distinct slots, got {chosen}")
        if x.dtype != torch.bfloat16 or x.dim() != 3 or (x.shape[0], x.shape[2]) != (len(chosen), self.config.dim):
            raise ValueError(
                f"x: expected torch.bfloat16 [{len(chosen)}, S, {self.config.dim}], got {x.dtype} {list(x.shape)}"
            )
        return chosen

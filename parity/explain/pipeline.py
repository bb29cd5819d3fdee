"""The indexer under any configuration: key chain, query chain, scores and selection of one sample, with memory.

At the published values every step equals the reference bit for bit (a test compares them); a step is evaluated once
for each combination of the choices that it depends on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parity.explain import rounding, samples
from parity.explain.choices import Configuration
from parity.explain.rounding import POINTS, STORED, same
from parity.explain.samples import Sample
from parity.pages.layout import DIM
from reference import rope

KEY_CHOICES = ("projection_k", "pooling", "inner_k", "rope_position", "rope_table", "hadamard", "fp4_k", "store")
QUERY_CHOICES = ("projection_q", "inner_q", "rope_table", "hadamard", "fp4_q", "query")
# Float32 cells of the dots held at once: a CPU works within its caches, a GPU in few launches.
CELLS = {"cpu": 1 << 20, "cuda": 1 << 27}
# Dots are kept where they are few: other rounding points of the scores then need no product.
DOTS_BYTES, PAIRS = 32 << 20, 16
# Keys that go through the chain at once, for the same reason.
CHAIN = {"cpu": 1 << 13, "cuda": 1 << 19}


class Stored(NamedTuple):
    """Values as a kernel reads them: payload float32 [..., 128] and scale float32 [...] or None."""

    payload: Tensor
    scale: Tensor | None

    def values(self) -> Tensor:
        """payload * scale."""
        return self.payload if self.scale is None else self.payload * self.scale[..., None]

    def folded(self, weight: Tensor) -> Tensor:
        """Head weights float32 [n, H] with the scale of these queries in them."""
        return weight if self.scale is None else weight * self.scale


class Pipeline:
    """One sample through any number of configurations. Results of steps are kept; `forget` drops them."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self._kept: dict[Any, Any] = {}
        self._pairs: dict[Any, Tensor] = {}

    def forget(self, *steps: str) -> None:
        """Drop the dots, and what has been kept of these steps ("keys", "queries", "logits", "select") or of all."""
        self._kept = {key: value for key, value in self._kept.items() if steps and key[0] not in steps}
        self._pairs.clear()

    def keys(self, c: Configuration) -> Stored:
        """Stored keys [S, 128]."""
        return self._keep(("keys", *(c[name] for name in KEY_CHOICES)), lambda: self._keys(c))

    def queries(self, c: Configuration) -> Stored:
        """Queries [n, H, 128] as the kernel reads them."""
        return self._keep(("queries", *(c[name] for name in QUERY_CHOICES)), lambda: self._queries(c))

    def head_weights(self, c: Configuration) -> Tensor:
        """Scaled head weights float32 [n, H], without the scale of an fp8 query."""
        gate, heads = self.sample.gate, self.sample.config.n_heads
        constant = torch.tensor(DIM**-0.5 * heads**-0.5, dtype=torch.float32, device=gate.device)
        return POINTS[c["head_weights"]](gate.to(torch.float32) * constant)

    def logits(self, c: Configuration) -> Tensor:
        """Scores float32 [n, S], -inf at keys that a query may not see."""
        return self._keep(("logits", c.having(topk="published")), lambda: self._logits(c))

    def scores_of(self, c: Configuration, pooled: Tensor, windows: Tensor) -> Tensor:
        """Scores float32 [n, m] of keys of each query's own: pooled float32 [n, m, 128], windows int64 [n, m]."""
        key, q = self.chain(c, pooled, windows), self.queries(c)
        folded = q.folded(self.head_weights(c))
        with ieee_matmul():
            return _over_heads(c, q.payload @ key.payload.transpose(1, 2), folded, key.scale)

    def rotated(self, c: Configuration, x: Tensor, positions: Tensor, sign: float = 1.0) -> Tensor:
        """x float32 [..., 128] rotated to token positions int64 [...]; sign -1 rotates back."""
        rows = self._rope_rows(c, positions)
        return _rotate(x, rows * torch.tensor([1.0, sign], device=x.device).repeat(rows.shape[-1] // 2))

    def select(self, c: Configuration) -> Tensor:
        """The selected keys, bool [n, S]."""
        return self._keep(("select", c), lambda: select(self.logits(c), self.width(c), self.sample.lens))

    def width(self, c: Configuration) -> int:
        """Keys to select."""
        return c.width(self.sample.config.topk)

    def chain(self, c: Configuration, pooled: Tensor, windows: Tensor) -> Stored:
        """From pooled keys float32 [..., 128] of windows int64 [...] to what the cache holds."""
        ratio = self.sample.config.ratio
        first = {"first": windows * ratio, "last": windows * ratio + ratio - 1, "index": windows}[c["rope_position"]]
        step, last = INNER[c["inner_k"]]
        a = step(pooled)
        x = a * torch.rsqrt(a.square().mean(dim=-1, keepdim=True) + self.sample.config.norm_eps)
        x = step(self.sample.norm * x)
        x = step(self.rotated(c, x, first))
        if c["hadamard"] == "both":
            x = step(_hadamard(x))
        return Stored(*STORED[c["store"]](FP4[c["fp4_k"]](last(x))))

    def _keys(self, c: Configuration) -> Stored:
        key = ("pooled", c["projection_k"], c["pooling"])
        held = self._keep(key, lambda: samples.pooled(self.sample, c["projection_k"], c["pooling"]))
        number = torch.arange(len(held), device=held.device)
        step = CHAIN.get(held.device.type, CHAIN["cpu"])
        parts = [self.chain(c, held[i : i + step], number[i : i + step]) for i in range(0, len(held), step)]
        scales = [part.scale for part in parts if part.scale is not None]
        return Stored(torch.cat([part.payload for part in parts]), torch.cat(scales) if scales else None)

    def _queries(self, c: Configuration) -> Stored:
        step, last = INNER[c["inner_q"]]
        precision = c["projection_q"]
        with ieee_matmul():
            x = self._keep(("projected", precision), lambda: samples.projected(self.sample, precision))
        x = step(self.rotated(c, x, self.sample.positions[:, None]))
        if c["hadamard"] != "neither":
            x = step(_hadamard(x))
        return Stored(*STORED[c["query"]](FP4[c["fp4_q"]](last(x))))

    def _logits(self, c: Configuration) -> Tensor:
        q, k, weight = self.queries(c), self.keys(c), self.head_weights(c)
        if q.payload.shape[0] * q.payload.shape[1] * k.payload.shape[0] * 4 <= DOTS_BYTES:
            out = _over_heads(c, self._dots(c, q, k), q.folded(weight), k.scale)
        else:
            out = score(c, q, k, weight)
        hidden = torch.arange(self.sample.keys, device=out.device) >= self.sample.lens[:, None]
        return out.masked_fill_(hidden, -torch.inf)

    def _dots(self, c: Configuration, q: Stored, k: Stored) -> Tensor:
        """Float32 dots [n, H, S] of the payloads; those of the last few pairs of queries and keys are kept."""
        key = tuple(c[name] for name in dict.fromkeys(QUERY_CHOICES + KEY_CHOICES))
        if key not in self._pairs:
            with ieee_matmul():
                dots = (q.payload.flatten(0, 1) @ k.payload.t()).unflatten(0, q.payload.shape[:2])
            if len(self._pairs) >= PAIRS:
                self._pairs.pop(next(iter(self._pairs)))
            self._pairs[key] = dots
        return self._pairs[key]

    def _rope_rows(self, c: Configuration, positions: Tensor) -> Tensor:
        distinct, back = torch.unique(positions, return_inverse=True)
        return POINTS[c["rope_table"]](rope.rope_rows(self.sample.config, distinct))[back]

    def _keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def _rotate(x: Tensor, rows: Tensor) -> Tensor:
    """`reference.rope.rotate` in float32, not rounded: the last 64 of x by (cos, sin) rows, adjacent pairs."""
    width = rows.shape[-1]
    re, im, cos, sin = x[..., -width::2], x[..., 1 - width :: 2], rows[..., 0::2], rows[..., 1::2]
    turned = torch.stack((re * cos - im * sin, re * sin + im * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., :-width], turned), dim=-1)


def _hadamard(x: Tensor) -> Tensor:
    """`reference.hadamard.hadamard` in float32, not rounded: butterflies at strides 1 to 64, then one product."""
    stride = 1
    while stride < DIM:
        u, v = x.unflatten(-1, (DIM // (2 * stride), 2, stride)).unbind(-2)
        x = torch.stack((u + v, u - v), dim=-2).flatten(-3)
        stride *= 2
    return x * torch.tensor(DIM**-0.5, dtype=torch.float32, device=x.device)


def score(c: Configuration, q: Stored, k: Stored, weight: Tensor) -> Tensor:
    """sum_h w_h relu(q_h . k_s), float32 [n, S], with the rounding points of `c`; in parts that fit the device.

    The scale of an fp8 query is folded into the head weights, that of an fp8 key follows the sum over heads.
    """
    rows, heads, _ = q.payload.shape
    count = k.payload.shape[0]
    folded = q.folded(weight)
    out = torch.empty((rows, count), dtype=torch.float32, device=weight.device)
    cells = CELLS.get(weight.device.type, CELLS["cpu"])
    some = max(1, min(count, max(512, cells // heads)))
    few = max(1, cells // (heads * some))
    transposed = k.payload.t()
    with ieee_matmul():
        for r in range(0, rows, few):
            part = q.payload[r : r + few].reshape(-1, DIM)
            for s in range(0, count, some):
                dots = (part @ transposed[:, s : s + some]).unflatten(0, (-1, heads))
                scale = None if k.scale is None else k.scale[s : s + some]
                out[r : r + few, s : s + some] = _over_heads(c, dots, folded[r : r + few], scale)
    return out


def _over_heads(c: Configuration, dots: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """From dots float32 [n, H, S] to logits float32 [n, S]."""
    ranks = int(c["tensor_parallel"])
    dots = dots.to(DTYPES[c["dot"]])
    if c["relu"] == "on":
        dots = dots.relu()
    parts = PRODUCTS[c["product"]](dots, weight, ranks)
    if scale is not None:
        parts = [part * scale for part in parts]
    if ranks > 1:
        total = rounding.bf16(parts[0])
        for part in parts[1:]:
            total = rounding.bf16(total + rounding.bf16(part))
        return total
    return POINTS[c["sum"]](parts[0])


def _products(dots: Tensor, weight: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's sum over its heads of weighted dots, float32 [n, S]."""
    if ranks == 1:
        return [torch.bmm(weight[:, None], dots.to(torch.float32))[:, 0]]
    return _sums(dots.to(torch.float32) * weight[..., None], ranks)


def _bf16_products(dots: Tensor, weight: Tensor, ranks: int) -> list[Tensor]:
    """The same with products rounded to bf16."""
    # bf16 times bf16 is computed in float32 and rounded once; wider weights need a float32 product.
    if dots.dtype == torch.bfloat16 and bool((rounding.bf16(weight) == weight).all()):
        return _sums(dots.mul_(weight.to(torch.bfloat16)[..., None]), ranks)
    return _sums((dots.to(torch.float32) * weight[..., None]).to(torch.bfloat16), ranks)


def _sums(product: Tensor, ranks: int) -> list[Tensor]:
    return [x.sum(dim=1, dtype=torch.float32) for x in product.chunk(ranks, dim=1)]


PRODUCTS = {"bf16": _bf16_products, "float32": _products}
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
# (rounding after each step, rounding after the last one) of a chain.
INNER = {"published": (rounding.bf16, same), "fused": (same, same), "last": (same, rounding.bf16)}
FP4 = {"on": rounding.fp4, "off": same, "half-down": lambda x: rounding.fp4(x, "down")}


def select(logits: Tensor, width: int, lens: Tensor) -> Tensor:
    """A top-`width` of each row as bool [n, S]; equal scores at the last place go to the lower key.

    Rows no longer than `width` are selected whole. Scores past `lens` are -inf.
    """
    count = logits.shape[1]
    if width >= count:
        return torch.arange(count, device=logits.device) < lens[:, None]
    cutoff = logits.topk(width, dim=1).values[:, -1:]
    above = logits > cutoff
    level = (logits == cutoff) & (torch.arange(count, device=logits.device) < lens[:, None])
    room = width - above.sum(1, keepdim=True)
    return above | (level & (level.cumsum(1) <= room))


@contextlib.contextmanager
def ieee_matmul() -> Iterator[None]:
    """float32 products in full, whatever the process prefers (TF32 on a GPU); the setting comes back."""
    backends: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision

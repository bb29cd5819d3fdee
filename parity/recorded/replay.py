"""Replays every tensor of a recording from its recorded input, step by step."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from parity.recorded import rules
from parity.recorded.files import Recording, RecordingError, read_folder
from parity.recorded.rows import (
    BITS,
    CHAIN,
    DAMAGED,
    GEMM,
    POOL,
    ROPE,
    VALUE,
    Replay,
    Row,
    overlapped,
    projected,
    stored,
)
from parity.recorded.rules import Approximate
from parity.recorded.units import replay_quirk, replay_unit
from reference import compressor, exact, formats, hadamard, indexer, linear, rope
from reference.config import IndexerConfig
from reference.indexer import IndexerParams


def replay(folder: Path | str) -> list[Row]:
    """Rows of every tensor of every file in a folder; RecordingError where its index cannot be used."""
    rows: list[Row] = []
    params: dict[str, IndexerParams] = {}
    for name, found in read_folder(Path(folder)):
        if isinstance(found, RecordingError):
            rows.append(Row(name, "", DAMAGED, 0, detail=str(found)))
        else:
            rows += replay_recording(found, params)
    return rows


def replay_recording(recording: Recording, params: dict[str, IndexerParams]) -> list[Row]:
    """Rows of one file. `params` maps names to the parameters seen so far; a parameter file adds to it."""
    run = Replay(recording)
    run.step(_replay, run, params)
    return run.finish()


def _replay(run: Replay, params: dict[str, IndexerParams]) -> None:
    recording = run.recording
    if recording.kind == "params":
        for name in sorted(recording.tensors):
            if name.startswith("param."):
                run.read(name)
        try:
            params[recording.field("params")] = IndexerParams.from_tensors(recording.tensors)
        except ValueError as error:
            raise RecordingError(str(error)) from None
    elif recording.kind == "unit":
        replay_unit(run)
    elif recording.kind == "quirk":
        replay_quirk(run, shared(recording.field("params"), params))
    else:
        config = recording.config()
        case = _Case(run, config, shared(recording.field("config").get("params"), params))
        run.step(case.prefill)
        if case.steps:
            run.step(case.decode)


def shared(name: str, params: Mapping[str, IndexerParams]) -> IndexerParams:
    """The parameters that a file refers to."""
    if name not in params:
        raise RecordingError(f"wants the parameters {name!r}, which no file of the folder holds")
    return params[name]


def _quantised(qr: Tensor) -> tuple[Tensor, int]:
    payload, power = linear.quantise_activation(qr)
    scale = formats.pow2(power).repeat_interleave(128, dim=-1)
    return exact.widen(formats.e4m3_decode(payload)) * scale, qr.shape[-1] + qr.shape[-1] // 128


PROJECTED: dict[str, Callable[[Tensor], tuple[Tensor, int]]] = {
    "bf16": lambda qr: (qr, qr.shape[-1]),
    "fp8": _quantised,
}
"""By dtype of the query projection: what it multiplies, of qr [..., K], and how many float32 roundings a sum has."""


class _Case:
    """One prefill, and the decode steps after it."""

    def __init__(self, run: Replay, config: IndexerConfig, params: IndexerParams) -> None:
        self.run, self.config, self.params = run, config, params
        self.length, self.steps = run.recording.count("prefill_len"), run.recording.count("decode_steps")
        self.batch = run.recording.count("batch")
        self.table = rope.rope_table(config, self.length + self.steps)

    def prefill(self) -> None:
        """Every tensor named prefill.*, and the state left behind."""
        run, length = self.run, self.length
        x, qr = run.read("prefill.x"), run.read("prefill.qr")
        rows, dot_rows = run.index("prefill.rows", length), run.index("prefill.dot_rows", length)
        logit_rows = run.index("prefill.logit_rows", length)
        self._check_inputs(x, qr, rows, dot_rows)
        run.step(self._prefill_keys, x)
        run.step(self._query, "prefill", qr, rows)
        run.step(self._weights, "prefill", x[:, logit_rows])
        run.step(self._prefill_scores, rows, dot_rows, logit_rows)
        run.step(self._mask, logit_rows)
        run.step(self._prefill_topk, logit_rows)

    def decode(self) -> None:
        """Every tensor named decode.*, step by step from the recorded state, and the state left behind."""
        run, steps = self.run, self.steps
        x, qr = run.read("decode.x"), run.read("decode.qr")
        positions = self.length + torch.arange(steps)
        closing = ((positions + 1) % self.config.ratio == 0).nonzero().flatten()
        run.judge("decode.start_pos", BITS, rules.bits, positions)
        run.judge("decode.visible", BITS, rules.bits, indexer.visible(positions))
        run.judge("decode.closing_steps", BITS, rules.bits, closing)
        run.judge("decode.k.proj_kv", GEMM, rules.interval, rules.matmul(x, self.params.wkv))
        run.judge("decode.k.proj_score", GEMM, rules.interval, rules.matmul(x, self.params.wgate))
        run.step(self._decode_keys, positions, closing)
        run.step(self._query, "decode", qr.transpose(0, 1), positions, True)
        run.step(self._weights, "decode", x)
        run.step(self._decode_scores, positions, closing)
        run.step(self._decode_topk, positions)

    def _check_inputs(self, x: Tensor, qr: Tensor, rows: Tensor, dot_rows: Tensor) -> None:
        wanted = {
            "prefill.x": (self.batch, self.length, self.config.dim),
            "prefill.qr": (self.batch, rows.numel(), self.config.q_lora_rank),
        }
        for name, tensor in (("prefill.x", x), ("prefill.qr", qr)):
            if tuple(tensor.shape) != wanted[name]:
                raise RecordingError(f"tensor {name} is {list(tensor.shape)}, expected {list(wanted[name])}")
        if not bool(torch.isin(dot_rows, rows).all()):
            raise RecordingError("prefill.dot_rows must be among prefill.rows")

    def _prefill_keys(self, x: Tensor) -> None:
        run, params = self.run, self.params
        ape = params.ape[torch.arange(self.length) % self.config.ratio]
        run.judge("prefill.k.proj_kv", GEMM, rules.interval, rules.matmul(x, params.wkv))
        run.judge("prefill.k.proj_score", GEMM, rules.interval, rules.matmul(x, params.wgate))
        if run.has("prefill.k.proj_kv") and run.has("prefill.k.proj_score"):
            kv, score = stored(run.get("prefill.k.proj_kv")), stored(run.get("prefill.k.proj_score") + ape)
        else:
            kv, score = projected(x, params.wkv), projected(x, params.wgate, ape)
        self._prefill_state(kv, score)
        windows = overlapped(kv, score)
        first = torch.arange(self.length // self.config.ratio) * self.config.ratio
        self._keys("prefill", rules.pool(*windows), first)

    def _prefill_state(self, kv: Approximate, score: Approximate) -> None:
        """Rows that a prefill writes hold projections; the others hold 0 or -inf."""
        for name, rows, fill in (("kv", kv, 0.0), ("score", score, -torch.inf)):
            parts = []
            for part, empty in ((rows.value, fill), (rows.error, 0.0)):
                state = compressor.PublishedState(self.batch)
                state.kv = torch.full(state.kv.shape, empty, dtype=torch.float64)
                state.prefill(part, part)
                parts.append(state.kv)
            result = Approximate(*parts)
            rule = GEMM if bool((result.error > 0).any()) else BITS
            run_name = f"state.{name}_after_prefill"
            if rule == BITS:
                wanted = result.value.to(torch.float32)
                self.run.judge(run_name, rule, rules.bits, wanted)
            else:
                self.run.judge(run_name, rule, rules.interval, result)

    def _keys(self, part: str, pooled: Approximate, positions: Tensor) -> None:
        """The steps of the keys after the projections, of keys whose groups start at positions [n].

        Keys lie along dimension -2 of pooled [.., n, 128] in a prefill, along dimension 0 in decode.
        """
        run, prefix = self.run, f"{part}.k."
        at = positions if part == "prefill" else positions[:, None]
        run.judge(prefix + "pooled", POOL, rules.interval, pooled)
        if run.has(prefix + "pooled"):
            pooled = stored(run.get(prefix + "pooled"))
        chain = [prefix + step for step in ("normed", "roped", "hadamard")]
        if all(run.has(name) for name in chain):
            normed = rules.norm(run.get(prefix + "pooled"), self.params.norm, self.config.norm_eps)
            run.judge(chain[0], POOL, rules.interval, normed)
            run.judge(chain[1], ROPE, rules.rotated, run.get(chain[0]), self.table[at])
            run.judge(chain[2], BITS, rules.bits, hadamard.hadamard(run.get(chain[1])))
            self._quantised(prefix)
        elif run.has(prefix + "fp4"):
            flat = Approximate(pooled.value.reshape(-1, 128), pooled.error.reshape(-1, 128))
            spread = at.expand(pooled.value.shape[:-1]).reshape(-1)
            got = run.get(prefix + "fp4").reshape(-1, 128)
            powers = run.get(prefix + "fp4_exp").reshape(-1, 4)
            chain_rest = rules.KeyChain(self.params.norm, self.config.norm_eps, spread, self.table)
            values, exponents = rules.keys(got, powers, flat, chain_rest)
            run.add(prefix + "fp4", CHAIN, values)
            run.add(prefix + "fp4_exp", CHAIN, exponents)

    def _rotated(self, prefix: str, at: Tensor) -> None:
        heads = self.run.get(prefix + "proj").unflatten(-1, (self.config.n_heads, self.config.head_dim))
        self.run.judge(prefix + "roped", ROPE, rules.rotated, heads, self.table[at])

    def _turned(self, prefix: str) -> None:
        self.run.judge(prefix + "hadamard", BITS, rules.bits, hadamard.hadamard(self.run.get(prefix + "roped")))

    def _quantised(self, prefix: str) -> None:
        values, exponents = formats.fp4_quantise(self.run.get(prefix + "hadamard"))
        self.run.judge(prefix + "fp4", BITS, rules.bits, values)
        self.run.judge(prefix + "fp4_exp", BITS, rules.bits, exponents)

    def _query(self, part: str, qr: Tensor, positions: Tensor, steps_first: bool = False) -> None:
        """The steps of queries from qr [B, R, q_lora_rank] at positions [R]; steps_first: recorded as [R, B, ...]."""
        run, prefix = self.run, f"{part}.q."
        if steps_first:
            qr, at = qr.transpose(0, 1), positions[:, None, None]
        else:
            at = positions[:, None]
        left, steps = PROJECTED[self.config.wq_b](qr)
        assert self.params.wq_b is not None  # from_tensors derives it
        weight = self.params.wq_b
        run.judge(prefix + "proj", GEMM, rules.interval, rules.matmul(left, weight, steps))
        run.step(self._rotated, prefix, at)
        run.step(self._turned, prefix)
        run.step(self._quantised, prefix)

    def _weights(self, part: str, x: Tensor) -> None:
        run, proj = self.run, f"{part}.w.proj"
        run.judge(proj, GEMM, rules.interval, rules.matmul(x, self.params.weights_proj))
        scaled = indexer.head_weights(run.get(proj), self.config.n_heads, self.config.head_dim)
        run.judge(f"{part}.w.scaled", BITS, rules.bits, scaled)

    def _prefill_scores(self, rows: Tensor, dot_rows: Tensor, logit_rows: Tensor) -> None:
        run, batch, total = self.run, self.batch, self.length // self.config.ratio
        q, weight = run.get("prefill.q.fp4"), run.get("prefill.w.scaled")
        k = run.get("prefill.k.fp4") if total else q.new_empty((batch, 0, self.config.head_dim))
        queries = q[:, torch.isin(rows, dot_rows)]
        dots = torch.stack([indexer.dots(queries[b], k[b]) for b in range(batch)])
        run.judge("prefill.s.dot", BITS, rules.bits, dots)
        # Large recordings keep queries for a few rows only: logits of other rows serve as inputs of the mask.
        known = torch.isin(logit_rows, rows)
        queries = q[:, torch.isin(rows, logit_rows)]
        logits = torch.stack([indexer.scores(indexer.dots(queries[b], k[b]), weight[b, known]) for b in range(batch)])
        run.judge("prefill.s.logits", BITS, rules.bits, logits, only=known)

    def _mask(self, logit_rows: Tensor) -> None:
        masked = indexer.mask(self.run.get("prefill.s.logits"), logit_rows)
        self.run.judge("prefill.s.masked", BITS, rules.bits, masked)

    def _prefill_topk(self, logit_rows: Tensor) -> None:
        run, limits = self.run, indexer.visible(logit_rows)
        for name in [name for name in run.recording.tensors if name.startswith("prefill.topk")]:
            suffix = name.removeprefix("prefill.topk")
            if suffix and not suffix.removeprefix("_").isdigit():
                continue
            wanted = int(suffix.removeprefix("_")) if suffix else self.config.topk
            run.judge(name, VALUE, rules.topk, run.get("prefill.s.masked"), limits, wanted)

    def _decode_keys(self, positions: Tensor, closing: Tensor) -> None:
        run, batch = self.run, self.batch
        kv = run.get("decode.k.proj_kv")
        score = run.get("decode.k.proj_score") + self.params.ape[positions % self.config.ratio][:, None]
        state = compressor.PublishedState(batch)
        state.kv = run.get("state.kv_after_prefill").clone()
        state.score = run.get("state.score_after_prefill").clone()
        pooled = []
        for step in range(self.steps):
            closed = state.decode(kv[step], score[step], self.length + step)
            if closed is not None:
                pooled.append(rules.pool(stored(closed[0][:, 0]), stored(closed[1][:, 0])))
        run.judge("state.kv_after_decode", BITS, rules.bits, state.kv)
        run.judge("state.score_after_decode", BITS, rules.bits, state.score)
        if pooled:
            together = Approximate(torch.stack([p.value for p in pooled]), torch.stack([p.error for p in pooled]))
            self._keys("decode", together, positions[closing] - self.config.ratio + 1)

    def _decode_scores(self, positions: Tensor, closing: Tensor) -> None:
        run, batch = self.run, self.batch
        q, weight = run.get("decode.q.fp4"), run.get("decode.w.scaled")
        keys = [run.get("prefill.k.fp4")] if self.length >= self.config.ratio else []
        if closing.numel():
            keys.append(run.get("decode.k.fp4").transpose(0, 1))
        k = torch.cat(keys, dim=1) if keys else q.new_empty((batch, 0, self.config.head_dim))
        limits = indexer.visible(positions)
        logits = torch.full((self.steps, batch, k.shape[1]), torch.nan, dtype=torch.bfloat16)
        for step, limit in enumerate(limits.tolist()):
            for b in range(batch):
                dots = indexer.dots(q[step, b][None], k[b, :limit])
                logits[step, b, :limit] = indexer.scores(dots, weight[step, b][None])[0]
        run.judge("decode.s.logits", BITS, rules.bits, logits)

    def _decode_topk(self, positions: Tensor) -> None:
        # Keys past a step's count are NaN in the recording; below them nothing is masked.
        seen = self.run.get("decode.s.logits").nan_to_num(nan=-torch.inf)
        limits = indexer.visible(positions)[:, None].expand(self.steps, self.batch)
        self.run.judge("decode.topk", VALUE, rules.topk, seen, limits, self.config.topk)

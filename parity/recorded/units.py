"""Replays the recordings of single steps at their edges, and of the published module's stale overlap window."""

import torch

from parity.recorded import rules
from parity.recorded.files import RecordingError
from parity.recorded.rows import BITS, CHAIN, POOL, TABLE, Replay, overlapped, projected
from parity.recorded.rules import Approximate
from reference import compressor, formats, hadamard, rope
from reference.config import TINY
from reference.indexer import IndexerParams

_FIRST, _REUSED = slice(20, 37), slice(0, 12)
"""Tokens of the two sequences of the reuse recording: the one before, and the one that was recorded."""


def replay_unit(run: Replay) -> None:
    """Units: fp4 blocks (`*.in`, `*.k.fp4`), exponents (`amax.*`), `hadamard.*`, `norm.*` and `rope.*`."""
    inputs = [name.removesuffix(".in") for name in sorted(run.recording.tensors) if name.endswith(".in")]
    for unit in inputs:
        given = run.read(f"{unit}.in")
        if unit == "amax":
            run.judge("amax.exp", BITS, rules.bits, formats.fp4_exponent(given))
        elif unit == "hadamard":
            run.judge("hadamard.out", BITS, rules.bits, hadamard.hadamard(given))
        elif unit == "norm":
            result = rules.norm(given, run.read("norm.weight"), TINY.norm_eps)
            run.judge("norm.out", POOL, rules.interval, result)
        elif unit == "rope":
            _rope(run)
        else:
            values, exponents = formats.fp4_quantise(given)
            run.judge(f"{unit}.k.fp4", BITS, rules.bits, values)
            run.judge(f"{unit}.k.fp4_exp", BITS, rules.bits, exponents)


def replay_quirk(run: Replay, params: IndexerParams) -> None:
    """Stored keys of a 3-token prompt and 9 steps, on a fresh module and on one that ran another prompt before.

    The published module does not clear its overlap window, so that key 0 of the second run pools the first prompt's
    last four tokens. `run` holds the tokens and the keys only: both are judged through the whole chain.
    """
    x = run.read("x")
    run.read("qr")
    if x.dim() != 3 or x.shape[1] < _FIRST.stop:
        raise RecordingError(f"tensor x must have {_FIRST.stop} tokens, got {list(x.shape)}")
    for name, before in (("fresh", None), ("reused", x[:, _FIRST])):
        if not run.has(f"{name}.k.fp4"):
            continue
        tokens = x[:, _REUSED]
        ape = params.ape[torch.arange(tokens.shape[1]) % compressor.RATIO]
        kv, score = overlapped(projected(tokens, params.wkv), projected(tokens, params.wgate, ape))
        if before is not None:
            cut = before.shape[1] // compressor.RATIO * compressor.RATIO
            last = before[:, cut - compressor.RATIO : cut]
            old = projected(last, params.wkv), projected(last, params.wgate, params.ape)
            for window, rows in zip((kv, score), old, strict=True):
                window.value[:, 0, : compressor.RATIO] = rows.value[..., : compressor.DIM]
                window.error[:, 0, : compressor.RATIO] = rows.error[..., : compressor.DIM]
        pooled = rules.pool(kv, score)
        flat = Approximate(pooled.value.reshape(-1, compressor.DIM), pooled.error.reshape(-1, compressor.DIM))
        first = (torch.arange(pooled.value.shape[1]) * compressor.RATIO).repeat(x.shape[0])
        chain = rules.KeyChain(params.norm, TINY.norm_eps, first, rope.rope_table(TINY, tokens.shape[1]))
        got = run.get(f"{name}.k.fp4").reshape(-1, compressor.DIM)
        run.add(f"{name}.k.fp4", CHAIN, rules.keys(got, None, flat, chain)[0])


def _rope(run: Replay) -> None:
    """Frequencies by bits; the table by float64 cosines of the float32 angle; the rotation by bits, given the table."""
    positions, frequencies = run.read("rope.positions"), rope.inv_freq(TINY)
    run.judge("rope.inv_freq", BITS, rules.bits, frequencies)
    angle = torch.outer(positions.to(torch.float32), run.get("rope.inv_freq")).to(torch.float64)
    for name, exact in (("rope.cos", angle.cos()), ("rope.sin", angle.sin())):
        # One last place of float32 in the result's own binade, and the float64 function's error far below it.
        place = formats.pow2(torch.frexp(exact)[1].clamp_min(-125)) * 2.0**-24
        run.judge(name, TABLE, rules.interval, Approximate(exact, place))
    rows = torch.stack((run.get("rope.cos"), run.get("rope.sin")), dim=-1).flatten(-2)
    given = run.get("rope.in")
    run.judge("rope.out", BITS, rules.bits, rope.rotate(given, rows[:, None]))

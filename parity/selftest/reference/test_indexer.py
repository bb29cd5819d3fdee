"""The published indexer end to end: against the recordings, across splits, and free of torch's default dtype."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.recorded import rules
from parity.recorded.files import Recording, read_file, read_index
from parity.selftest.helpers import OFFICIAL, bits, refusals, refuses, seeded
from reference import formats, indexer, linear
from reference.config import IndexerConfig
from reference.indexer import Indexer, IndexerParams, Output

ENTRIES = {entry["file"]: entry for entry in read_index(OFFICIAL)}
CASES = [name for name, entry in ENTRIES.items() if entry["kind"].startswith(("prefill", "decode"))]

SMALL = IndexerConfig(dim=64, q_lora_rank=128, n_heads=8, topk=4)
MODEL = Indexer(IndexerParams.random(SMALL), SMALL, max_position=128)
_generator = seeded(3)
X = torch.randn(2, 40, SMALL.dim, generator=_generator).to(torch.bfloat16)
QR = torch.randn(2, 40, SMALL.q_lora_rank, generator=_generator).to(torch.bfloat16)


def model_of(recording: Recording, how: str) -> Indexer:
    entry = ENTRIES[f"params_{recording.entry['config']['params']}.safetensors"]
    params = IndexerParams.from_tensors(read_file(OFFICIAL, entry).tensors)
    return Indexer(params, recording.config(), how=how)


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where two bf16 tensors hold the same bits."""
    return x.contiguous().view(torch.int16) == y.contiguous().view(torch.int16)


@pytest.mark.parametrize("how", linear.HOW)
@pytest.mark.parametrize("name", CASES)
def test_prefill_from_the_hidden_states(name: str, how: str) -> None:
    """Only the three matrix products and the pooling may differ from the recording, and only as the rules allow; all
    that follows must be the same bits wherever these are."""
    recording = read_file(OFFICIAL, ENTRIES[name])
    held, model = recording.tensors, model_of(recording, how)
    x, rows, logit_rows = held["prefill.x"], held["prefill.rows"], held["prefill.logit_rows"]
    qr = x.new_zeros((*x.shape[:2], model.config.q_lora_rank))
    qr[:, rows] = held["prefill.qr"]
    out = model.chunk(x, qr, model.state(x.shape[0]))

    weights = rules.matmul(x[:, logit_rows], model.params.weights_proj)
    assert rules.interval(out.weights_proj[:, logit_rows], weights).rejected == 0
    same_w = same(out.weights_proj[:, logit_rows], held["prefill.w.proj"])
    assert bool(same(out.weights[:, logit_rows], held["prefill.w.scaled"])[same_w].all())

    same_q = same(out.query.proj.flatten(-2)[:, rows], held["prefill.q.proj"]).unflatten(-1, (-1, 128)).all(-1)
    assert float(same_q.float().mean()) > 0.5  # enough left for the following comparisons to mean something
    for step in ("roped", "hadamard", "fp4"):
        assert bool(same(getattr(out.query, step)[:, rows], held[f"prefill.q.{step}"])[same_q].all())

    total = x.shape[1] // 4
    if total == 0:
        assert out.logits.shape[-1] == 0 and out.topk.shape[-1] == 0
        return
    mine = torch.stack([keys.fp4 for keys in out.keys])
    same_k = same(mine, held["prefill.k.fp4"]).all(dim=-1)
    assert float(same_k.float().mean()) > 0.5
    both = torch.isin(logit_rows, rows)
    whole = same_q.all(-1)[:, torch.isin(rows, logit_rows)] & same_w.all(-1)[:, both]
    cells = whole[:, :, None] & same_k[:, None, :]
    assert how == "library" or bool(cells.any())  # "exact" flips the same few values on every machine
    for step in ("logits", "masked"):
        assert bool(same(getattr(out, step)[:, logit_rows[both]], held[f"prefill.s.{step}"][:, both])[cells].all())


@pytest.mark.parametrize("name", [name for name in CASES if ENTRIES[name]["decode_steps"]])
def test_decode_from_the_hidden_states(name: str) -> None:
    recording = read_file(OFFICIAL, ENTRIES[name])
    held, model = recording.tensors, model_of(recording, "exact")
    x, batch = held["prefill.x"], recording.entry["batch"]
    state = model.state(batch)
    model.compress(x, state)
    for step in range(recording.entry["decode_steps"]):
        out = model.chunk(held["decode.x"][step][:, None], held["decode.qr"][step][:, None], state)
        total = out.logits.shape[-1]
        assert total == held["decode.visible"][step]
        keys = torch.stack([state.keys(slot) for slot in range(batch)])
        recorded = [held["prefill.k.fp4"]] if x.shape[1] >= 4 else []
        recorded += [held["decode.k.fp4"].transpose(0, 1)] if "decode.k.fp4" in held else []
        if total == 0:
            continue
        same_k = same(keys, torch.cat(recorded, 1)[:, :total]).all(-1)
        same_row = same(out.query.fp4[:, 0], held["decode.q.fp4"][step]).flatten(1).all(1)
        same_row &= same(out.weights[:, 0], held["decode.w.scaled"][step]).all(1)
        assert float(same_k.float().mean()) > 0.5
        cells = same_row[:, None] & same_k
        assert bool(same(out.logits[:, 0], held["decode.s.logits"][step][:, :total])[cells].all())


def same_selection(a: Output, b: Output, row_a: int, row_b: int) -> bool:
    """Same selected logits (ties may go either way)."""
    scores, values = [], []
    for out, row in ((a, row_a), (b, row_b)):
        masked, positions = out.masked[0, row], out.topk[0, row]
        scores.append(masked.sort(descending=True).values)
        values.append(masked[positions[positions >= 0]].sort().values)
    short = min(map(len, scores))
    return torch.equal(scores[0][:short], scores[1][:short]) and torch.equal(*values)


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.integers(1, 11), min_size=1, max_size=8).filter(lambda parts: sum(parts) <= 40))
def test_chunked_prefill_equals_one_call(parts: list[int]) -> None:
    length = sum(parts)
    whole = MODEL.chunk(X[:1, :length], QR[:1, :length], MODEL.state())
    state, start = MODEL.state(), 0
    for part in parts:
        chunk = MODEL.chunk(X[:1, start : start + part], QR[:1, start : start + part], state)
        total = chunk.logits.shape[-1]
        assert torch.equal(bits(chunk.masked[0]), bits(whole.masked[0, start : start + part, :total]))
        assert bool((whole.masked[0, start : start + part, total:] == -torch.inf).all())
        assert all(same_selection(chunk, whole, row, start + row) for row in range(part))
        start += part


@pytest.mark.parametrize("length", [1, 3, 4, 9, 40])
def test_decode_equals_prefill(length: int) -> None:
    whole, state = MODEL.chunk(X[:, :length], QR[:, :length], MODEL.state(2)), MODEL.state(2)
    for t in range(length):
        step = MODEL.chunk(X[:, t : t + 1], QR[:, t : t + 1], state)
        assert step.logits.shape[-1] == (t + 1) // 4 and bool(torch.isfinite(step.masked).all())
        assert torch.equal(bits(step.masked[:, 0]), bits(whole.masked[:, t, : (t + 1) // 4]))


def test_topk_rows_and_offset() -> None:
    out = MODEL.chunk(X[:1], QR[:1], MODEL.state(), offset=40)
    for t, row in enumerate(out.topk[0].tolist()):
        total, at = (t + 1) // 4, slice(t, t + 1)
        count = min(SMALL.topk, total)
        assert all(40 <= s < 40 + total for s in row[:count]) and row[count:] == [-1] * (len(row) - count)
        assert len(set(row[:count])) == count
        picked = out.topk[:, at] - 40 * (out.topk[:, at] >= 0)
        assert rules.topk(picked, out.masked[:, at], torch.tensor([total]), SMALL.topk).rejected == 0


def test_default_dtype_is_irrelevant() -> None:
    wanted = MODEL.chunk(X, QR, MODEL.state(2))
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = Indexer(MODEL.params, SMALL, max_position=128)
        got = model.chunk(X, QR, model.state(2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(bits(got.masked), bits(wanted.masked)) and torch.equal(got.topk, wanted.topk)
    assert torch.equal(model.table, MODEL.table)


def test_fp8_projection_quantises_its_input() -> None:
    config = dataclasses.replace(SMALL, q_lora_rank=256, wq_b="fp8")
    params = IndexerParams.random(config)
    qr = torch.randn(5, 256, generator=seeded(0)).to(torch.bfloat16)
    payload, power = linear.quantise_activation(qr)
    scale = formats.pow2(power).repeat_interleave(128, dim=-1)
    assert params.wq_b is not None
    wanted = rules.matmul(formats.e4m3_decode(payload).double() * scale, params.wq_b, 258)
    unquantised = rules.matmul(qr, params.wq_b, 258)
    for how in linear.HOW:
        got = indexer.project_q(qr, params, config, how).flatten(-2)
        assert rules.interval(got, wanted).rejected == 0
        assert rules.interval(got, unquantised).rejected > got.numel() // 2


def test_head_weight_constant_is_float32_not_bf16() -> None:
    proj = torch.arange(1, 257, dtype=torch.float32).to(torch.bfloat16)[:, None].expand(-1, 64)
    got = indexer.head_weights(proj, 64)
    assert torch.equal(got, (proj.double() * 2**-6.5).to(torch.bfloat16))
    narrowed = torch.tensor(2**-6.5).to(torch.bfloat16)
    assert not torch.equal(got, (proj.double() * narrowed.double()).to(torch.bfloat16))


def test_scores_round_dot_product_and_sum() -> None:
    q = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    q[0, :, 0], q[0, :, 1] = 16, 0.125
    k = torch.zeros(1, 128, dtype=torch.bfloat16)
    k[0, 0], k[0, 1] = 16, 4
    dot = indexer.dots(q, k)
    assert dot.flatten().tolist() == [256.0, 256.0]  # 256.5 exactly
    weight = torch.tensor([[1.0078125, -1.0]], dtype=torch.bfloat16)
    assert indexer.scores(dot, weight).tolist() == [[2.0]]
    assert indexer.scores(-dot, weight).tolist() == [[0.0]]


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 64])
def test_exact_projection_of_a_row_does_not_depend_on_its_company(rows: int) -> None:
    x, weight = torch.randn(300, 64, generator=seeded(1)), torch.randn(256, 64, generator=seeded(2))
    whole = linear.project_float32(x, weight)
    assert torch.equal(linear.project_float32(x[290 : 290 + rows], weight), whole[290 : 290 + rows])
    error = rules.matmul(x, weight)
    assert rules.interval(whole, error).rejected == 0
    assert rules.interval(linear.project_float32(x, weight, "library"), error).rejected == 0


test_errors = refusals(
    {
        r"qr: expected torch.bfloat16 \[2, 40, 128\]": lambda: MODEL.chunk(X, QR[:, :3], MODEL.state(2)),
        "x: expected torch.bfloat16": lambda: MODEL.chunk(X.float(), QR, MODEL.state(2)),
        r"x: expected torch.bfloat16 \[3, S, 64\]": lambda: MODEL.chunk(X, QR, MODEL.state(3)),
        "distinct slots": lambda: MODEL.chunk(X, QR, MODEL.state(3), [1, 1]),
        r"must end by position 128 .* got 160": lambda: MODEL.compress(X.repeat(1, 4, 1), MODEL.state(2)),
        "how must be one of exact, library, got 'fast'": lambda: Indexer(MODEL.params, SMALL, how="fast"),
        "tensor param.wkv is missing": lambda: IndexerParams.from_tensors({}),
        r"weight \[N, K\]": lambda: linear.project_float32(torch.zeros(2, 3), torch.zeros(4, 5)),
        "wants an fp8 wq_b": lambda: indexer.project_q(QR, MODEL.params, dataclasses.replace(SMALL, wq_b="fp8")),
    }
)


def test_chunk_wants_slots_at_one_position() -> None:
    state = MODEL.state(2)
    MODEL.compress(X[:1, :3], state, [0])
    refuses(ValueError, r"slots at one position, got lengths \[0, 3\]", MODEL.chunk, X, QR, state)

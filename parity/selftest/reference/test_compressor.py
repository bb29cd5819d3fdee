"""The compressor's state: any split equals one call; rollback, move, clone and reset leave what they promise."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.selftest.helpers import bits, refuses, seeded
from reference import compressor
from reference.compressor import CompressorState, PublishedState
from reference.config import TINY, IndexerConfig
from reference.indexer import Indexer, IndexerParams

CONFIG = IndexerConfig(dim=64, q_lora_rank=128, n_heads=8, topk=4)
MODEL = Indexer(IndexerParams.random(CONFIG), CONFIG, max_position=128)
LONGEST = 48
TOKENS, OTHER = (torch.randn(2, LONGEST, CONFIG.dim, generator=seeded(seed)).to(torch.bfloat16) for seed in (7, 8))
splits = st.lists(st.integers(0, 13), max_size=9).filter(lambda parts: sum(parts) <= LONGEST)


def fed(tokens: torch.Tensor, parts: list[int], state: CompressorState | None = None, slot: int = 0) -> CompressorState:
    """A state after the tokens [S, dim] of one sequence, in chunks."""
    state = MODEL.state() if state is None else state
    start = 0
    for part in parts:
        MODEL.compress(tokens[None, start : start + part], state, [slot])
        start += part
    return state


def same_future(a: CompressorState, b: CompressorState, slot_a: int = 0, slot_b: int = 0) -> bool:
    """Equal keys now, and after eight more tokens (two windows: all that a state can still influence)."""
    a, b = a.clone(), b.clone()
    if a.length(slot_a) != b.length(slot_b) or not torch.equal(a.keys(slot_a), b.keys(slot_b)):
        return False
    for state, slot in ((a, slot_a), (b, slot_b)):
        MODEL.compress(OTHER[:1, :8], state, [slot])
    return torch.equal(bits(a.keys(slot_a)), bits(b.keys(slot_b)))


@settings(max_examples=60, deadline=None)
@given(parts=splits)
def test_any_split_equals_one_call(parts: list[int]) -> None:
    assert same_future(fed(TOKENS[0], parts), fed(TOKENS[0], [sum(parts)]))


@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, LONGEST])
def test_token_by_token_equals_one_call(length: int) -> None:
    one = fed(TOKENS[0], [length])
    assert one.keys().shape == (length // 4, 128)
    assert same_future(fed(TOKENS[0], [1] * length), one)


def test_a_different_history_shows() -> None:
    changed = TOKENS[0].clone()
    changed[40] += 1
    assert not same_future(fed(changed, [44]), fed(TOKENS[0], [44]))
    assert not same_future(fed(TOKENS[0], [43]), fed(TOKENS[0], [44]))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_rollback_forgets_exactly_its_tokens(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, LONGEST))
    state = fed(TOKENS[0], [length])
    for _ in range(data.draw(st.integers(1, 3))):
        tokens = data.draw(st.integers(0, state.length()))
        state.rollback(tokens)
        length = state.length()
        wrong = data.draw(st.integers(0, LONGEST - length))
        fed(OTHER[1], [wrong], state)
        state.rollback(wrong)
    assert same_future(state, fed(TOKENS[0], [length]))


@pytest.mark.parametrize("history", [0, 1, 5, 12])
def test_rollback_reaches_its_history_and_no_further(history: int) -> None:
    for length in range(20, 29):
        state = fed(TOKENS[0], [length], MODEL.state(history=history))
        state.rollback(history)
        assert same_future(state, fed(TOKENS[0], [length - history]))
        refuses(ValueError, f"keeps a history of {history}, got a rollback to token", state.rollback, 1)
        assert state.length() == length - history
        state.rollback(state.length())  # forgetting everything needs no history
        assert same_future(state, MODEL.state())


def test_slots_are_independent() -> None:
    state = MODEL.state(3)
    fed(TOKENS[0], [9], state, 0)
    fed(TOKENS[1], [14], state, 2)
    MODEL.compress(TOKENS[:, 20:25], state, [2, 0])
    assert same_future(state, fed(torch.cat((TOKENS[0, :9], TOKENS[1, 20:25])), [9, 5]), 0, 0)
    assert same_future(state, fed(torch.cat((TOKENS[1, :14], TOKENS[0, 20:25])), [14, 5]), 2, 0)
    assert state.length(1) == 0


def test_move_takes_the_sequence_along() -> None:
    state = MODEL.state(3)
    fed(TOKENS[0], [10], state, 0)
    fed(TOKENS[1], [7], state, 1)
    state.move(0, 1)
    assert same_future(state, fed(TOKENS[0], [10]), 1, 0) and same_future(state, MODEL.state(), 0, 0)
    state.rollback(3, 1)
    assert same_future(state, fed(TOKENS[0], [7]), 1, 0)
    state.move(1, 1)
    assert state.length(1) == 7


def test_clone_is_independent_and_reset_forgets_one_slot_or_all() -> None:
    state = fed(TOKENS[1], [17], fed(TOKENS[0], [10], MODEL.state(2), 0), 1)
    copy = state.clone()
    fed(OTHER[0], [9], copy)
    assert same_future(state, fed(TOKENS[0], [10])) and copy.length() == 19
    state.reset(0)
    assert copy.keys().shape[0] == 4
    fed(TOKENS[1], [3], state, 0)
    assert same_future(state, fed(TOKENS[1], [3]), 0, 0) and same_future(state, fed(TOKENS[1], [17]), 1, 0)
    state.reset()
    assert [state.length(slot) for slot in range(2)] == [0, 0]


def test_first_window_has_no_overlap() -> None:
    kv, score = torch.randn(2, 8, 256, generator=seeded(0))
    values, weights = MODEL.state().append(kv, score)
    assert bool((values[0, :4] == 0).all()) and bool((weights[0, :4] == -torch.inf).all())
    assert torch.equal(values[0, 4:], kv[:4, 128:]) and torch.equal(values[1, :4], kv[:4, :128])
    assert torch.equal(weights[1, 4:], score[4:, 128:])


def test_pool_by_the_definition() -> None:
    kv, score = torch.randn(2, 3, 8, 128, generator=seeded(1))
    score[0, :4] = -torch.inf
    weight = torch.softmax(score.double(), dim=1)
    assert torch.allclose(compressor.pool(kv, score).double(), (kv.double() * weight).sum(1), rtol=0, atol=1e-6)
    kv[0, :4] = 1e30
    assert bool((compressor.pool(kv, score)[0].abs() < 1e3).all())  # a score of -inf weighs nothing


def published(prompt: torch.Tensor, steps: torch.Tensor, state: PublishedState) -> list[torch.Tensor]:
    """Pooled keys of a prompt and decode steps, [S, 256] projections in the two forms of the published module."""
    windows = [state.prefill(prompt[None, :, :256], prompt[None, :, 256:])]
    for i, step in enumerate(steps):
        closed = state.decode(step[None, :256], step[None, 256:], prompt.shape[0] + i)
        windows += [closed] if closed else []
    return [pooled for kv, score in windows for pooled in compressor.pool(kv, score)[0]]


@pytest.mark.parametrize("prompt", [1, 2, 3, 4, 5, 7, 8])
def test_published_state_agrees_and_its_stale_window_shows(prompt: int) -> None:
    rows = torch.randn(17, 512, generator=seeded(2))
    pooled = published(rows[:prompt], rows[prompt:], PublishedState())
    kv, score = MODEL.state().append(rows[:, :256].contiguous(), rows[:, 256:].contiguous())
    assert torch.equal(torch.stack(pooled), compressor.pool(kv, score))
    stale = PublishedState()
    published(rows.flip(0)[:9], rows[:0], stale)
    again = published(rows[:prompt], rows[prompt:], stale)
    assert torch.equal(again[0], pooled[0]) == (prompt >= 4)
    assert torch.equal(torch.stack(again[1:]), torch.stack(pooled[1:]))
    stale.reset()
    assert torch.equal(torch.stack(published(rows[:prompt], rows[prompt:], stale)), torch.stack(pooled))


def test_errors() -> None:
    state = CompressorState(TINY)
    refuses(ValueError, "slots >= 1", CompressorState, TINY, 0)
    refuses(ValueError, r"slot: must lie in \[0, 1\), got 1", state.keys, 1)
    refuses(ValueError, r"dst: must lie in \[0, 1\), got 3", state.move, 0, 3)
    refuses(ValueError, r"kv must be float32 \[S, 256\]", state.append, torch.zeros(3, 128), torch.zeros(3, 128))
    refuses(ValueError, "score must be float32", state.append, torch.zeros(3, 256), torch.zeros(4, 256))
    state.append(torch.zeros(4, 256), torch.zeros(4, 256))
    refuses(ValueError, r"keys must be bfloat16 \[1, 128\]", state.add_keys, torch.zeros(2, 128).bfloat16())
    for tokens in (-1, 5):
        refuses(ValueError, rf"tokens must lie in \[0, 4\], got {tokens}", state.rollback, tokens)

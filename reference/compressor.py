"""The key path: pooling four tokens with overlap into one key, and the state that a sequence carries between calls.

`CompressorState` is what a server needs (any split of a prompt, reset, clone, rollback, move); `PublishedState` is the
published module's own 8-row buffer, kept to replay recordings, its stale overlap window included.
"""

import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from reference import formats
from reference.config import IndexerConfig
from reference.hadamard import hadamard
from reference.rope import apply_rope

RATIO = 4
DIM = 128
_NEEDED = 2 * RATIO - 1  # tokens before the next one that the next window may still read


class Keys(NamedTuple):
    """Emitted keys, stage by stage. All bfloat16 [n, 128] but for exponents, int16 [n, 4]."""

    pooled: Tensor
    normed: Tensor
    roped: Tensor
    hadamard: Tensor
    fp4: Tensor
    exponents: Tensor


def add_ape(score: Tensor, ape: Tensor, positions: Tensor) -> Tensor:
    """Scores with the position encoding: f32(score + ape[t mod 4]); score float32 [..., S, 256], positions [S]."""
    return score + ape.to(torch.float32)[positions.to(score.device) % RATIO]


def windows(kv: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
    """Pooling windows of token rows [..., 4n + 4, 256] -> [..., n, 8, 128]; the first four rows are the overlap.

    Slots 0..3 take channels 0..127 of the four tokens before, slots 4..7 channels 128..255 of the window's own tokens.
    """

    def gather(x: Tensor) -> Tensor:
        groups = x.unflatten(-2, (-1, RATIO))
        return torch.cat((groups[..., :-1, :, :DIM], groups[..., 1:, :, DIM:]), dim=-2)

    return gather(kv), gather(score)


def pool(kv: Tensor, score: Tensor) -> Tensor:
    """Softmax-weighted sum over the 8 slots, float32 [..., 8, 128] -> float32 [..., 128].

    Slots are added in order; product and sum are rounded separately. A score of -inf weighs exactly nothing.
    """
    weight = torch.softmax(score, dim=-2, dtype=torch.float32)
    total = torch.zeros_like(kv[..., 0, :])
    for slot in range(2 * RATIO):
        total = total + kv[..., slot, :] * weight[..., slot, :]
    return total


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """bf16(w * f32(x * rsqrt(mean(x^2) + eps))) of bfloat16 [..., 128], in float32; weight of any float dtype."""
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (weight.to(torch.float32) * scaled).to(torch.bfloat16)


def finish(pooled: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, table: Tensor) -> Keys:
    """From pooled float32 [n, 128] to stored keys; positions [n] are those of each group's first token."""
    rounded = pooled.to(torch.bfloat16)
    normed = rms_norm(rounded, norm_weight, eps)
    roped = apply_rope(normed, positions, table)
    turned = hadamard(roped)
    return Keys(rounded, normed, roped, turned, *formats.fp4_quantise(turned))


class CompressorState:
    """What a batch of sequences carries between calls: recent projections, token counts and the keys emitted so far.

    Of each slot the last `history + 7` tokens' projections are kept, so that `rollback` can undo up to `history` tokens
    (those of one call or of several): a window may read seven tokens back from the next one.
    """

    def __init__(
        self, config: IndexerConfig, slots: int = 1, *, history: int = 64, device: torch.device | str = "cpu"
    ) -> None:
        if slots < 1 or history < 0:
            raise ValueError(f"CompressorState: wants slots >= 1 and history >= 0, got {slots} and {history}")
        self.config = config
        self.history = history
        shape = (slots, history + _NEEDED, 2 * DIM)
        self._kv = torch.zeros(shape, dtype=torch.float32, device=device)
        self._score = torch.full(shape, -torch.inf, dtype=torch.float32, device=device)
        self._length = [0] * slots
        self._newest = [0] * slots  # tokens ever written since the reset: what the ring may have overwritten
        self._keys = [torch.empty((0, DIM), dtype=torch.bfloat16, device=device) for _ in range(slots)]

    @property
    def slots(self) -> int:
        """Number of batch slots."""
        return len(self._length)

    def length(self, slot: int = 0) -> int:
        """Tokens that a slot has taken."""
        return self._length[self._slot("slot", slot)]

    def keys(self, slot: int = 0) -> Tensor:
        """Keys of a slot, bfloat16 [length // 4, 128], on the fp4 grid."""
        return self._keys[self._slot("slot", slot)]

    def reset(self, slot: int | None = None) -> None:
        """Forget a slot's sequence, or all of them."""
        for i in range(self.slots) if slot is None else [self._slot("slot", slot)]:
            self._kv[i] = 0.0
            self._score[i] = -torch.inf
            self._length[i] = self._newest[i] = 0
            self._keys[i] = self._keys[i][:0].clone()

    def clone(self) -> Self:
        """An independent copy."""
        other = copy.copy(self)
        other._kv, other._score = self._kv.clone(), self._score.clone()
        other._length, other._newest = list(self._length), list(self._newest)
        other._keys = [keys.clone() for keys in self._keys]
        return other

    def move(self, src: int, dst: int) -> None:
        """Move a sequence to another batch slot, whose own sequence is lost; the source slot is reset."""
        src, dst = self._slot("src", src), self._slot("dst", dst)
        if src == dst:
            return
        self._kv[dst], self._score[dst] = self._kv[src], self._score[src]
        self._length[dst], self._newest[dst] = self._length[src], self._newest[src]
        self._keys[dst] = self._keys[src].clone()
        self.reset(src)

    def rollback(self, tokens: int, slot: int = 0) -> None:
        """Undo the last `tokens` tokens of a slot; keys that they closed are dropped.

        Raises ValueError when that is more than the slot has taken, or further back than the kept history.
        """
        slot = self._slot("slot", slot)
        if tokens < 0 or tokens > self._length[slot]:
            raise ValueError(f"rollback: tokens must lie in [0, {self._length[slot]}], got {tokens}")
        length = self._length[slot] - tokens
        undone = self._newest[slot] - length
        if length > 0 and undone > self.history:
            raise ValueError(
                f"rollback: slot {slot} has taken {self._newest[slot]} tokens and keeps a history of {self.history}, "
                f"got a rollback to token {length}"
            )
        if length == 0:
            self.reset(slot)
            return
        self._length[slot] = length
        self._keys[slot] = self._keys[slot][: length // RATIO].clone()

    def append(self, kv: Tensor, score: Tensor, slot: int = 0) -> tuple[Tensor, Tensor]:
        """Take the projections of the next S tokens, float32 [S, 256], score with ape; return the windows they close.

        The windows are (kv, score) float32 [n, 8, 128], n = number of keys closed. `add_keys` then stores the keys.
        """
        slot = self._slot("slot", slot)
        for name, x in (("kv", kv), ("score", score)):
            if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != 2 * DIM or x.shape[0] != kv.shape[0]:
                raise ValueError(f"append: {name} must be float32 [S, {2 * DIM}], got {x.dtype} {list(x.shape)}")
        start, count, ring = self._length[slot], kv.shape[0], self._kv.shape[1]
        first = start // RATIO * RATIO - RATIO
        held = torch.arange(max(first, 0), start, device=self._kv.device) % ring
        missing = max(-first, 0)
        kv_rows = torch.cat((kv.new_zeros((missing, 2 * DIM)), self._kv[slot, held], kv))
        score_rows = torch.cat((score.new_full((missing, 2 * DIM), -torch.inf), self._score[slot, held], score))
        keep = min(count, ring)
        places = torch.arange(start + count - keep, start + count, device=self._kv.device) % ring
        self._kv[slot, places], self._score[slot, places] = kv[count - keep :], score[count - keep :]
        self._length[slot] = start + count
        self._newest[slot] = max(self._newest[slot], start + count)
        closed = ((start + count) // RATIO - start // RATIO) * RATIO + RATIO
        return windows(kv_rows[:closed], score_rows[:closed])

    def add_keys(self, keys: Tensor, slot: int = 0) -> None:
        """Store the keys of the windows that `append` returned, bfloat16 [n, 128]."""
        slot = self._slot("slot", slot)
        wanted = self._length[slot] // RATIO - self._keys[slot].shape[0]
        if keys.dtype != torch.bfloat16 or tuple(keys.shape) != (wanted, DIM):
            raise ValueError(f"add_keys: keys must be bfloat16 [{wanted}, {DIM}], got {keys.dtype} {list(keys.shape)}")
        self._keys[slot] = torch.cat((self._keys[slot], keys))

    def _slot(self, name: str, slot: int) -> int:
        if not 0 <= slot < self.slots:
            raise ValueError(f"{name}: must lie in [0, {self.slots}), got {slot}")
        return slot


class PublishedState:
    """The published module's buffers: kv and score float32 [B, 8, 256], rows 0..3 the last window, 4..7 the current.

    Like the published code it has two calls only, a prefill from position 0 and a decode of one token, and a prompt of
    fewer than four tokens does not write rows 0..3: without `reset`, key 0 of a second sequence then pools the window
    of the sequence before. That is a defect of the published code; only the replay of a recording should rely on it.
    """

    def __init__(self, batch: int = 1, device: torch.device | str = "cpu") -> None:
        self.kv = torch.zeros((batch, 2 * RATIO, 2 * DIM), dtype=torch.float32, device=device)
        self.score = torch.full_like(self.kv, -torch.inf)

    def reset(self) -> None:
        """What a server must do between sequences, and the published code does not."""
        self.kv.zero_()
        self.score.fill_(-torch.inf)

    def prefill(self, kv: Tensor, score: Tensor) -> tuple[Tensor, Tensor]:
        """Take a prompt [B, S, 256] (score with ape); return its windows [B, S // 4, 8, 128], the first by itself."""
        cut = kv.shape[1] // RATIO * RATIO
        for state, rows in ((self.kv, kv), (self.score, score)):
            if cut:
                state[:, :RATIO] = rows[:, cut - RATIO : cut]
            state[:, RATIO : RATIO + kv.shape[1] - cut] = rows[:, cut:]
        pad = (kv.shape[0], RATIO, 2 * DIM)
        no_kv, no_score = kv.new_zeros(pad), score.new_full(pad, -torch.inf)
        return windows(torch.cat((no_kv, kv[:, :cut]), 1), torch.cat((no_score, score[:, :cut]), 1))

    def decode(self, kv: Tensor, score: Tensor, position: int) -> tuple[Tensor, Tensor] | None:
        """Take one token [B, 256] at `position`; return the window [B, 1, 8, 128] that it closes, or None."""
        row = RATIO + position % RATIO
        self.kv[:, row], self.score[:, row] = kv, score
        if row != 2 * RATIO - 1:
            return None
        closed = windows(self.kv, self.score)
        self.kv[:, :RATIO], self.score[:, :RATIO] = self.kv[:, RATIO:].clone(), self.score[:, RATIO:].clone()
        return closed

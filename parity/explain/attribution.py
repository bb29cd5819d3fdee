"""Sharing a loss among the choices that cause it: the average, over all orders of making them, of what each adds.

Exact (Shapley's value, from all subsets) up to 8 choices. Beyond, orders are drawn, each with its reverse, which
cancels the part that is linear in the place; the parts of one order add up to the whole, so do the averages.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import numpy as np

EXACT_UP_TO = 8
Value = Callable[[frozenset[str]], np.ndarray]


def shares(value: Value, players: Sequence[str], pairs: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """(shares [players, metrics], standard error of each from drawing orders, 0 where exact).

    `value` maps a set of players to a vector; `pairs` is the number of order pairs drawn beyond 8 players.
    """
    if len(players) <= EXACT_UP_TO:
        exact_shares = exact(value, players)
        return exact_shares, np.zeros_like(exact_shares)
    return sampled(value, players, pairs, rng)


def exact(value: Value, players: Sequence[str]) -> np.ndarray:
    """Shapley's value [players, metrics]: sum over subsets S without i of |S|!(n-|S|-1)!/n! (v(S + i) - v(S))."""
    count = len(players)
    whole = value(frozenset(players))
    found = np.zeros((count, *whole.shape))
    for i, player in enumerate(players):
        others = [name for name in players if name != player]
        for size in range(count):
            weight = math.factorial(size) * math.factorial(count - size - 1) / math.factorial(count)
            for some in itertools.combinations(others, size):
                held = frozenset(some)
                found[i] += weight * (value(held | {player}) - value(held))
    return found


def sampled(value: Value, players: Sequence[str], pairs: int, rng: random.Random) -> tuple[np.ndarray, np.ndarray]:
    """The same average over `pairs` drawn orders and their reverses, and its standard error (from at least 2 pairs)."""
    if pairs < 2:
        raise ValueError(f"orders: at least 2 pairs are needed for an error, got {pairs}")
    found = []
    for _ in range(pairs):
        order = list(players)
        rng.shuffle(order)
        found.append((_along(value, players, order) + _along(value, players, order[::-1])) / 2)
    table = np.stack(found)
    return table.mean(0), table.std(0, ddof=1) / math.sqrt(pairs)


def _along(value: Value, players: Sequence[str], order: Sequence[str]) -> np.ndarray:
    """What each player adds when they come in this order."""
    held: frozenset[str] = frozenset()
    before, added = value(held), {}
    for player in order:
        held = held | {player}
        after = value(held)
        added[player] = after - before
        before = after
    return np.stack([added[player] for player in players])

"""How a search draws: every example for itself, from nothing but the seed.

Hypothesis's own generator follows each example with up to five near copies of it, starts with half its examples cut
short, and mixes in constants of the modules that happen to be loaded. That finds bugs in parsers; here it means that of
48 cases ten are new, that a search can miss what a quarter of all cases show, and that the same seed draws other cases
elsewhere. The strategies name the edges that matter themselves, so their choices are taken evenly.
"""

from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

BACKEND = "parity-independent"
"""The name under which Hypothesis knows this way to draw; its `settings` take it."""


class Independent(HypothesisProvider):
    """Hypothesis's provider of choices with even, independent integers; it shrinks like any other."""

    def draw_integer(self, min_value: int | None = None, max_value: int | None = None, **options: Any) -> int:
        if min_value is None or max_value is None:
            return super().draw_integer(min_value, max_value, **options)
        source = self._cd._random if self._cd is not None else None
        assert source is not None
        return source.randint(min_value, max_value)


AVAILABLE_PROVIDERS[BACKEND] = f"{__name__}.{Independent.__name__}"  # by name: older releases know no other way

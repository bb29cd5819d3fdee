"""How much is drawn, how it is seeded, and how long a failure may be shrunk: smoke, ci, nightly, debug."""

import hashlib
import random
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import Phase, Verbosity, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ExampleDatabase

from parity import vocabulary
from parity.domain.draws import BACKEND

DATABASE = Path(".parity") / "examples"
"""Where `nightly` keeps the examples that failed, relative to the current folder; share it between runs."""


@dataclass(frozen=True)
class Profile:
    """One way to run the suite.

    examples        a level and implementation, spread over the level's checks by their shares
    derandomised    the same cases every time (seed 0 unless another is given)
    database        keep the cases that failed, and try them first next time
    shrink_seconds  for Hypothesis to shrink a failure; `reduce_calls` for the reducer of cases after it
    case_seconds    time-out of one case in a worker
    large           draw real shapes where the device can compute them
    far             go to the ends of every dimension
    seconds         budget of the whole session (None: no limit), spread over checks like the examples
    """

    name: str
    examples: int
    shrink_seconds: float
    reduce_calls: int
    case_seconds: float
    derandomised: bool = True
    database: bool = False
    large: bool = True
    far: bool = True
    seconds: float | None = None
    seed: int = 0
    verbose: bool = False

    def settings(self, examples: int, *, listed: bool = False) -> settings:
        """Hypothesis settings for one check's search; a list of cases is gone through, anything else drawn."""
        return settings(
            max_examples=max(1, examples),
            database=None,  # Hypothesis has none where it is seeded; ours is `store`
            deadline=None,
            backend="hypothesis" if listed else BACKEND,
            phases=(Phase.generate, Phase.shrink),
            verbosity=Verbosity.verbose if self.verbose else Verbosity.normal,
        )

    def store(self) -> ExampleDatabase | None:
        """Where the case strings of failures are kept, by implementation and check; None if the profile keeps none."""
        return DirectoryBasedExampleDatabase(str(DATABASE)) if self.database else None

    def source(self, *names: str) -> random.Random:
        """The source of randomness of one check's search: a function of nothing but the seed and its names."""
        digest = hashlib.sha256("/".join([str(self.seed), *names]).encode()).digest()
        return random.Random(int.from_bytes(digest[:8], "big"))


PROFILES = {name: Profile(name, **numbers) for name, numbers in vocabulary.PROFILES.items()}  # type: ignore[arg-type]


def profile(
    name: str, *, seed: int | None = None, seconds: float | None = None, examples: int | None = None
) -> Profile:
    """The named profile with the given changes. ValueError for an unknown name or a number out of range.

    Where examples are random and no seed is given, one is drawn, so that the header can print it.
    """
    if name not in PROFILES:
        raise ValueError(f"profile: expected one of {', '.join(PROFILES)}, got {name!r}")
    found = PROFILES[name]
    if seed is not None and seed < 0:
        raise ValueError(f"seed: expected a non-negative integer, got {seed}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds: expected a positive number, got {seconds}")
    if examples is not None and examples < 1:
        raise ValueError(f"examples: expected at least 1, got {examples}")
    if seconds is not None and examples is None:
        examples = 1_000_000  # the time decides
    if seed is None:
        seed = 0 if found.derandomised else random.SystemRandom().getrandbits(32)
    return replace(found, seed=seed, seconds=seconds, examples=examples or found.examples)

"""The time of a session that is limited in time: what one check leaves goes to those that come after it."""

import time
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Clock:
    """Shares out what is left of `seconds`, by weight, among the checks that have not ended.

    processes    how many draw side by side; a check runs in one of them, so it never gets more than what is left
    ledger       path of a file that these processes share: the weight of each check that has ended, a line each; None
                 for one process
    started      time.time() of the session, the same in all processes
    """

    seconds: float
    processes: int = 1
    ledger: str | None = None
    started: float = field(default_factory=time.time)
    _ended: float = 0.0

    def share(self, weight: float, total: float) -> float:
        """Seconds for a check of this weight, where the checks of the whole session weigh `total`."""
        left = max(0.0, self.started + self.seconds - time.time())
        open_ = max(weight, total - self.ended())
        return min(left, left * self.processes * weight / open_) if open_ else left

    def end(self, weight: float) -> None:
        """A check of this weight has ended."""
        if self.ledger is None:
            self._ended += weight
            return
        # One write of one short line: the system keeps the lines of several processes whole.
        with open(self.ledger, "ab", buffering=0) as file:
            file.write(f"{weight!r}\n".encode())

    def ended(self) -> float:
        """The weight of all checks that have ended, in any process."""
        if self.ledger is None:
            return self._ended
        try:
            return sum(float(line) for line in Path(self.ledger).read_text().split())
        except FileNotFoundError:
            return 0.0

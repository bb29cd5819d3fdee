"""Cases of the chunked compressor: a script of calls, in which prompts are split, mixed, rolled back and dropped.

A compressor function takes the projections of the next tokens of some requests and pools every group of four tokens
that they close; what it needs of earlier calls it keeps in `state`. docs/operations/compressor.md has its calling
convention.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar

from parity.domain.fields import CaseString, Field, choice, declare, random_seed
from parity.pages.layout import DIM

RATIO, WIDTH = 4, 2 * DIM
RING = 16  # token rows of the state: what a window reads back, and up to UNDO rejected tokens
UNDO = 8
ABOUT: dict[str, str] = {
    "exact": "the eight weights of a window are equal, or one of them is 1, and values are integers: bits are compared",
    "random": "values and scores with 24 significant bits, judged by the proved bound",
}
DATA = tuple(ABOUT)
POISONS = ("nan", "stale")

Item = tuple[int, int, int]  # request, tokens, tokens undone before
Calls = tuple[tuple[Item, ...], ...]

_ITEM = re.compile(r"([0-9]{1,9}):([0-9]{1,9})(?:-([0-9]{1,9}))?")


def _parse(name: str, text: str) -> Calls:
    def item(word: str) -> Item:
        found = _ITEM.fullmatch(word)
        if found is None:
            raise ValueError(f"{name} must look like 0:5/0:3-1+1:7, got {word!r}")
        return int(found[1]), int(found[2]), int(found[3] or 0)

    return tuple(tuple(item(word) for word in call.split("+")) for call in text.split("/"))


def _format(calls: Calls) -> str:
    return "/".join("+".join(f"{r}:{n}" + (f"-{u}" if u else "") for r, n, u in call) for call in calls)


def _check(name: str, calls: Any) -> None:
    length: dict[int, int] = {}
    newest: dict[int, int] = {}
    for call in calls:
        if len({request for request, _, _ in call}) != len(call):
            raise ValueError("calls must name a request at most once each")
        for request, count, undone in call:
            held = length.get(request, 0)
            most = min(held, UNDO - (newest.get(request, 0) - held))
            if count < 1 or not 0 <= undone <= most:
                raise ValueError(
                    f"calls: request {request} has {held} tokens, so it can drop at most {most} and must take at "
                    f"least 1, got {undone} and {count}"
                )
            length[request] = held - undone + count
            newest[request] = max(newest.get(request, 0), length[request])


CALLS = Field(
    "the calls: `0:5/0:3-1+1:7` gives request 0 five tokens, then drops one of them and gives it three more in a call "
    "that also gives seven to request 1",
    f"tokens 1 and more, at most {UNDO} dropped since the newest",
    _parse,
    _format,
    _check,
)


@dataclass(frozen=True, kw_only=True)
class CompressorCase(CaseString):
    """`calls[i]` lists (request, count, undone): a request drops `undone` tokens, then takes `count`.

    A request holds a state row from its first to its last call; later requests take over free rows, uncleared.
    ValueError if a call names a request twice, takes nothing, or goes back by more than UNDO from the newest token that
    the request has ever had, or past its start.
    """

    op: ClassVar[str] = "compressor"

    calls: Calls = declare(..., CALLS)
    data: str = choice("exact", DATA, "data class, see below")
    seed: int = random_seed("of the values")
    poison: str = choice("nan", POISONS, "what stands in the state before the first call: NaN or plausible leftovers")
    perm: int = random_seed("shuffles the rows of the state")

    @property
    def size(self) -> tuple[int, ...]:
        """Calls, groups of 64 tokens and tokens, then the length of the string."""
        tokens = [sum(count for _, count, _ in call) for call in self.calls]
        return (len(tokens), sum(-(-n // 64) for n in tokens), sum(tokens), len(str(self)))

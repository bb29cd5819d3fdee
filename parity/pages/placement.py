"""Where a case puts its pages: the map from requests and logical pages to contents, and from contents to the pool."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from parity.pages.counter import mix_int
from parity.pages.layout import PAGE

MAX_ID = 1 << 20  # request and row identifiers are below it
MAX_PAGE = (1 << 25) - 1  # the largest page whose slots have numbers of 31 bits
SHARED = MAX_ID  # owner of the pages below `prefix`
HUGE_PAGE = 0x7FFFFF00  # far outside every pool, yet its byte offset fits in 64 bits at any page stride


class Paged(Protocol):
    """What the placement of a case follows from; `parity.ops.paged_logits.case.Case` says what each means."""

    def __hash__(self) -> int: ...
    @property
    def lengths(self) -> tuple[tuple[int, ...], ...]: ...
    @property
    def requests(self) -> int: ...
    @property
    def next_n(self) -> int: ...
    @property
    def request_ids(self) -> tuple[int, ...] | None: ...
    @property
    def row_ids(self) -> tuple[int, ...] | None: ...
    @property
    def page_ids(self) -> tuple[int, ...] | None: ...
    @property
    def prefix(self) -> int: ...
    @property
    def alias(self) -> str: ...
    @property
    def period(self) -> int: ...
    @property
    def spare(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def perm(self) -> int: ...
    @property
    def tail(self) -> str: ...
    @property
    def table_width(self) -> int: ...


@dataclass(frozen=True)
class Placement:
    """Pages of a case. U distinct pages are in use; arrays are int64 and must not be written.

    lengths [B, next_n]; needed [B] pages per request. Each reference i is one table entry: ref_request[i], ref_page[i],
    and ref_used[i] from 0 to U-1. owner, page [U] name a used page's content, visible [U] how many of its leading slots
    some row may read. physical [U + spare] are page numbers in the pool, base and up, the used pages first.
    """

    lengths: np.ndarray
    needed: np.ndarray
    ref_request: np.ndarray
    ref_page: np.ndarray
    ref_used: np.ndarray
    owner: np.ndarray
    page: np.ndarray
    visible: np.ndarray
    physical: np.ndarray
    base: int

    @property
    def used(self) -> int:
        """Pages that some table entry names."""
        return len(self.owner)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool."""
        return self.base + len(self.physical)

    @property
    def canary_page(self) -> int | None:
        """The physical page that no row may read and that looks valid, if the pool has a spare page."""
        return int(self.physical[self.used]) if len(self.physical) > self.used else None


@lru_cache(maxsize=16)
def place(case: Paged) -> Placement:
    """The placement of a case; cheap for small cases, vectorised for large ones."""
    lengths = np.array(case.lengths, dtype=np.int64).reshape(case.requests, case.next_n)
    longest = lengths.max(axis=1) if case.requests else np.zeros(0, np.int64)
    needed = (longest + PAGE - 1) // PAGE
    total = int(needed.sum())
    ref_request = np.repeat(np.arange(case.requests, dtype=np.int64), needed)
    first = np.cumsum(needed) - needed
    ref_page = np.arange(total, dtype=np.int64) - first[ref_request]
    requests = ids_of(case.request_ids, case.requests)
    page = contents_of(case, int(needed.max(initial=0)))[ref_page]
    owner = np.where(page < case.prefix, SHARED, requests[ref_request])
    if case.alias == "shared":
        names, ref_used = np.unique((owner << 32) | page, return_inverse=True)
        owner, page = names >> 32, names & 0xFFFFFFFF
        ref_used = ref_used.reshape(-1).astype(np.int64)
    else:
        ref_used = np.arange(total, dtype=np.int64)
    visible = np.zeros(len(owner), dtype=np.int64)
    np.maximum.at(visible, ref_used, np.minimum(PAGE, longest[ref_request] - PAGE * ref_page))
    physical = case.base + shuffled(len(owner) + case.spare, case.perm)
    return Placement(lengths, needed, ref_request, ref_page, ref_used, owner, page, visible, physical, case.base)


def count_pages(case: Paged) -> tuple[int, int]:
    """(references, used): table entries that name a page, and distinct pages in use, of the placement that `place`
    would build; from the lengths, without an array as long as the references."""
    lengths = np.array(case.lengths, dtype=np.int64).reshape(case.requests, case.next_n)
    needed = -(-lengths.max(axis=1, initial=0) // PAGE)
    references, most = int(needed.sum()), int(needed.max(initial=0))
    if case.alias != "shared":
        return references, references
    # The pages of a request are the first of one list, so of all requests of one id the longest has them all.
    order = np.lexsort((needed, ids_of(case.request_ids, case.requests)))
    ids = ids_of(case.request_ids, case.requests)[order]
    longest = needed[order][np.append(ids[1:] != ids[:-1], True)] if case.requests else needed
    names = contents_of(case, most)
    first = np.zeros(most, dtype=bool)
    first[np.unique(names, return_index=True)[1]] = True
    own = np.append(0, np.cumsum(first & (names >= case.prefix)))
    return references, int((first & (names < case.prefix)).sum() + own[longest].sum())


def placement_bytes(case: Paged) -> int:
    """About how many bytes the arrays of `place` and of `block_table` take at their peak."""
    references, used = count_pages(case)
    return 80 * references + 40 * (used + case.spare) + 8 * case.requests * (case.next_n + case.table_width)


def contents_of(case: Paged, pages: int) -> np.ndarray:
    """What names the content of the first `pages` logical pages of a request, int64: `page_ids`, again after `period`;
    0 for pages past those named."""
    place = np.arange(pages, dtype=np.int64) % (case.period or max(1, pages))
    if case.page_ids is None:
        return place
    named = np.array(case.page_ids, dtype=np.int64)
    return np.where(place < len(named), named[np.minimum(place, len(named) - 1)], 0) if len(named) else place * 0


def ids_of(ids: tuple[int, ...] | None, count: int) -> np.ndarray:
    """Identifiers as an array, 0 .. count-1 when the case does not name any."""
    return np.arange(count, dtype=np.int64) if ids is None else np.array(ids, dtype=np.int64)


def row_names(case: Paged) -> tuple[np.ndarray, np.ndarray]:
    """Request id and row id of each of the T rows, int64."""
    requests = np.repeat(ids_of(case.request_ids, case.requests), case.next_n)
    if case.row_ids is None:
        return requests, np.tile(np.arange(case.next_n, dtype=np.int64), case.requests)
    return requests, np.array(case.row_ids, dtype=np.int64)


def shuffled(count: int, seed: int) -> np.ndarray:
    """A permutation of 0 .. count-1; seed 0 is the identity. By sorting hashes, so it is the same everywhere."""
    order = np.arange(count, dtype=np.int64)
    if seed == 0:
        return order
    z = order.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(mix_int(seed))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable").astype(np.int64)


def block_table(case: Paged) -> np.ndarray:
    """The table int32 [B, table_width], tails included."""
    plan = place(case)
    tail = {"minus1": -1, "huge": HUGE_PAGE, "canary": plan.canary_page}[case.tail]
    table = np.full((case.requests, case.table_width), tail, dtype=np.int32)
    table[plan.ref_request, plan.ref_page] = plan.physical[plan.ref_used]
    return table

"""The values of a case: queries, weights and keys drawn as functions of logical coordinates.

Coordinates are (request id, row id, head) for queries and weights and (owner id, page id, offset) for keys, never a
place in memory or in a batch: the same row or page has the same bits wherever a case puts it, on every device.
"""

import torch
from torch import Tensor

from parity.pages import counter, tables
from parity.pages.elements import Element
from parity.pages.keys import CLASSES, Drawn, Keys, octave, power_of_two
from parity.pages.layout import DIM, PAGE, find

STREAM_QUERY, STREAM_WEIGHT, STREAM_KEY, STREAM_PAGE, STREAM_CANARY, STREAM_DIM = range(1, 7)
NEEDLE_PAGES = 8  # a needle in every eighth page, the first page included
NONFINITE_EVERY = 13


def draw_queries(data: str, layout: str, seed: int, requests: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Queries [n, heads, 128] in the layout's query dtype, of n rows named by int64 coordinates."""
    kind, element = CLASSES[data], find(layout).query
    device = requests.device
    names = torch.arange(heads, dtype=torch.int64, device=device)
    keys = counter.row_keys(seed, STREAM_QUERY, (requests[:, None], rows[:, None], names))
    codes = _codes(kind.q, element, keys)
    if data == "negative":
        codes[:, 0] = element.with_signs(codes[:, 0], torch.zeros((), dtype=torch.bool, device=device))
    elif data == "zeros":
        codes = codes.masked_fill_((counter.field(keys, 50, 2) == 0).unsqueeze(-1), 0)
    elif data == "needle":  # three quarters of the signs point along the needle
        away = (_bytes(counter.row_keys(seed, STREAM_QUERY, (keys,))) & 3) == 0
        codes = element.with_signs(codes, torch.logical_xor(_needle_signs(seed, device), away))
    if kind.q_octaves[1] and element.times is not None:  # else the scale is part of the weights
        codes = element.times(codes, octave(keys, kind.q_octaves, 40).unsqueeze(-1))
    return codes.view(element.dtype)


def draw_weights(data: str, seed: int, requests: Tensor, rows: Tensor, heads: int) -> Tensor:
    """Head weights float32 [n, heads] of n rows; each needs at most 24 significant bits, so it is exact."""
    keys = counter.row_keys(seed, STREAM_WEIGHT, (requests, rows))
    words = counter.row_words(keys, counter.counting(heads, requests.device))
    kind = CLASSES[data].weight
    if kind in ("int127", "int511"):
        peak = int(kind[3:])
        return ((((words >> 16) & 0xFFFF) * (2 * peak + 1)) >> 16).sub_(peak).to(torch.float32)
    if kind in ("positive", "negative"):
        sign = 1.0 if kind == "positive" else -1.0
        return ((words >> 8) & 0x7FFFFF).add_(1 << 23).to(torch.float32).mul_(sign * 2.0**-24)
    values = (words >> 7).to(torch.float32).mul_(2.0**-24).mul_(power_of_two((words & 3) - 2))
    if kind == "sparse":
        values.masked_fill_((words & 0x30) == 0, 0.0)
    return values


def draw_keys(data: str, layout: str, seed: int, owners: Tensor, pages: Tensor, canary: bool = False) -> Keys:
    """Keys of n whole pages named by int64 coordinates. `canary` draws plausible keys, eight times as large, from a
    stream of their own, for places that must not be read."""
    kind, form = CLASSES[data], find(layout)
    element, device = form.element, owners.device
    offsets = torch.arange(PAGE, dtype=torch.int64, device=device)
    words = counter.row_keys(seed, STREAM_CANARY if canary else STREAM_KEY, (owners[:, None], pages[:, None], offsets))
    page_words = counter.row_keys(seed, STREAM_PAGE, (owners, pages))
    special = "" if canary else data
    spoiled = empty = None
    if special == "near_ties":
        codes, words = _near_ties(kind.k, element, seed, owners, words)
    else:
        codes = _codes(kind.k, element, words)
    if special == "zeros":
        empty = counter.field(words, 50, 2) == 0
        one_hot = counter.field(words, 50, 2) == 1
        channels = torch.arange(DIM, device=device)
        rest = one_hot.unsqueeze(-1) & (channels != counter.field(words, 52, 7).unsqueeze(-1))
        codes.masked_fill_(empty.unsqueeze(-1) | rest, 0)
    elif special == "needle":
        found = (pages % NEEDLE_PAGES == 0)[:, None] & (offsets == counter.field(page_words, 10, 6)[:, None])
        strong = torch.full((DIM,), element.needle, dtype=codes.dtype, device=device)
        codes = torch.where(found.unsqueeze(-1), element.with_signs(strong, _needle_signs(seed, device)), codes)
    elif special == "outliers":
        channels = torch.arange(DIM, dtype=torch.int64, device=device)
        large = counter.field(counter.row_keys(seed, STREAM_DIM, (channels,)), 20, 4) == 0
        codes = element.outliers(codes, large)
    elif special == "nonfinite":
        spoiled = (offsets + counter.field(page_words, 10, 6)[:, None]) % NONFINITE_EVERY == 0
    lift = 3 if canary else 0
    return form.finish(Drawn(codes, words, page_words, offsets, kind, lift, spoiled, empty))


def _bytes(keys: Tensor) -> Tensor:
    """uint8 [*keys.shape, 128]: one uniform byte per element."""
    return counter.row_words(keys, counter.counting(DIM // 4, keys.device)).view(torch.uint8)


def _codes(name: str, element: Element, keys: Tensor) -> Tensor:
    """Codes [*keys.shape, 128] of a distribution: int16 or uint8."""
    table = tables.codes(name, element, keys.device)
    if element.bits == 16:
        halves = counter.row_words(keys, counter.counting(DIM // 2, keys.device)).view(torch.int16)
        places = halves.to(torch.int32).bitwise_and_(0xFFFF)
    else:
        places = _bytes(keys).to(torch.int32)
    return table.index_select(0, places.view(-1)).view(places.shape)


def _needle_signs(seed: int, device: torch.device) -> Tensor:
    """Direction of the needle, bool [128], True for minus."""
    return (_bytes(counter.row_keys(seed, STREAM_DIM, (torch.zeros(1, dtype=torch.int64, device=device),))) & 1)[0] == 1


def _near_ties(name: str, element: Element, seed: int, owners: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """One key per owner, last bits flipped in about 2 of 128 places; zeros keep theirs, to stay out of subnormals."""
    base = counter.row_keys(seed, STREAM_KEY, (owners,))[:, None].expand_as(words)
    codes = _codes(name, element, base[:, :1]).expand(-1, PAGE, -1)
    sizes = element.with_signs(codes, torch.zeros((), dtype=torch.bool, device=codes.device))
    flips = (_bytes(words) < 4) & (sizes >= element.normal)
    return codes ^ flips.to(codes.dtype), base

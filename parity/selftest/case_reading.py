"""What the tests of cases share: a slow, plain reader of what each row sees, the strategy they draw from, and bad
strings."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.operands import Operands
from parity.ops.paged_logits.strategies import paged_cases
from parity.run.operation import parse_case
from parity.selftest.helpers import bits
from reference.pages import byte_pages, read_keys

LAYOUTS = ("bf16", "fp8", "fp4")
PAYLOAD = {"bf16": 256, "fp8": 128, "fp4": 64}
"""Bytes of a key's values, written down here a second time."""


class Row(NamedTuple):
    """What one row of the batch computes with, as bits: query, weights and its keys in logical order."""

    query: Tensor
    weights: Tensor
    keys: Tensor
    scales: Tensor | None


def slots_of(operands: Operands, row: int) -> Tensor:
    """Slots of a row's keys in logical order, read from the block table alone."""
    request, inner = divmod(row, operands.case.next_n)
    keys = torch.arange(int(operands.context_lens[request, inner]))
    pages = operands.block_table[request].to(torch.int64)[keys // 64]
    return pages * 64 + keys % 64


def read_row(operands: Operands, row: int) -> Row:
    """The row's operands, through q, weights, lengths, table and pool as a kernel finds them."""
    request, inner = divmod(row, operands.case.next_n)
    keys, scales = read_keys(operands.kv_cache, operands.case.layout, slots_of(operands, row))
    return Row(
        bits(operands.q[request, inner]),
        bits(operands.weights[row]),
        bits(keys),
        None if scales is None else bits(scales),
    )


def same_row(left: Row, right: Row) -> bool:
    """Whether two rows compute with the same bits."""
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


def slot_bytes_of(operands: Operands) -> Tensor:
    """Bytes of every slot of the pool, uint8 [slots, bytes per slot]: its values, then its scale."""
    layout = operands.case.layout
    pages = byte_pages(operands.kv_cache, layout)
    payload = PAYLOAD[layout]
    values = pages[:, : 64 * payload].reshape(-1, payload)
    return torch.cat([values, pages[:, 64 * payload :].reshape(len(values), -1)], 1)


def any_paged_case() -> st.SearchStrategy[Case]:
    """Small cases of all layouts, with all that a case can vary."""
    return st.one_of([paged_cases(layout=layout, min_rows=0, max_pages=3) for layout in LAYOUTS])


def bad_strings(table: dict[str, str]) -> Callable[[str], None]:
    """A test per string of the table: it is refused in one short sentence that contains the words beside it."""

    @pytest.mark.parametrize("text", table)
    def test(text: str) -> None:
        with pytest.raises(ValueError) as caught:
            parse_case(text)
        message = str(caught.value)
        assert table[text] in message
        assert "\n" not in message and len(message) < 300

    return test

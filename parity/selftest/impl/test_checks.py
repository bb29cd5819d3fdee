"""Every sentence of impl's argument checks: the mistake, and that the untouched call passes."""

import pytest
import torch
from torch import zeros

from impl.checks import Shapes, check_logits, check_topk, check_values, layout_of
from parity.selftest.helpers import refuses
from parity.selftest.operands import LAYOUTS, operands

BF16, U8, I32 = torch.bfloat16, torch.uint8, torch.int32


def good(layout="bf16"):
    return operands(layout, [[70, 3], [1, 128]], heads=8, width=3)


def with_page_stride(stride):
    return zeros(40000, dtype=BF16).as_strided((4, 64, 1, 128), (stride, 128, 128, 1))


def offset(tensor):
    """The same values, one element further on in memory."""
    return zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


# Operand, what stands in its place (or a function of the right one), and the sentence after the operand's name.
TYPES = [
    ("q", 3, "must be a tensor, got int"),
    ("kv_cache", None, "must be a tensor, got NoneType"),
    ("weights", [1.0], "must be a tensor, got list"),
    ("q", torch.Tensor.float, "must be bfloat16 for bf16 pages, got float32"),
    ("kv_cache", torch.Tensor.float, "must be bfloat16 or uint8, got float32"),
    ("weights", torch.Tensor.bfloat16, "must be float32, got bfloat16"),
    ("context_lens", torch.Tensor.long, "must be int32, got int64"),
    ("block_table", torch.Tensor.long, "must be int32, got int64"),
    ("max_context_len", 64.0, "must be an int, got float"),
    ("max_context_len", True, "must be an int, got bool"),
    ("out", zeros(4, 192).double(), "must be float32, got float64"),
]
VALUES = [
    ("q", lambda q: q[0], r"must have shape \[requests, next_n, heads, 128\], got \[2, 8, 128\]"),
    ("q", lambda q: q[..., :64], r"must have shape .* got \[2, 2, 8, 64\]"),
    ("q", lambda q: q[:, :, :0], "must have at least one head, got none"),
    ("q", zeros(2, 2, 8, 256, dtype=BF16)[..., ::2], "must be contiguous in its last dimension, got stride 2"),
    ("kv_cache", zeros(4, 32, 1, 128, dtype=BF16), r"must have pages of 64 slots \(its second dimension\), got 32"),
    ("kv_cache", lambda c: c[:, :, 0], r"of bfloat16 must have shape \[pages, 64, 1, 128\], got \[\d+, 64, 128\]"),
    ("kv_cache", zeros(4, 64, 1, 100, dtype=U8),
     r"of uint8 must have shape \[pages, 64, 1, 132\] or \[pages, 64, 1, 68\], got \[4, 64, 1, 100\]"),
    ("kv_cache", zeros(4, 64, 1, 132, dtype=U8),
     r"must be laid out as bf16 \(bfloat16 \[pages, 64, 1, 128\]\), got fp8 \(uint8 \[pages, 64, 1, 132\]\)"),
    ("kv_cache", zeros(4, 64, 1, 256, dtype=BF16)[..., ::2],
     r"must be contiguous inside a page \(strides 128 and 1\), got 256 and 2"),
    ("kv_cache", with_page_stride(8196), "must have a page stride of at least 16384 .* a multiple of 16, got 16392"),
    ("kv_cache", with_page_stride(8), "must have a page stride of at least 16384 bytes and a multiple of 16, got 16"),
    ("kv_cache", offset, "must start at a multiple of 16 bytes, got offset 2"),
    ("weights", lambda w: w[:3], r"must have shape \[requests \* next_n, heads\] = \[4, 8\], got \[3, 8\]"),
    ("weights", lambda w: w.to("meta"), "must be on q's device cpu, got meta"),
    ("context_lens", torch.Tensor.flatten, r"must have shape \[requests, next_n\] = \[2, 2\], got \[4\]"),
    ("block_table", lambda t: t[:1], r"must have shape \[2, max_pages\], got \[1, 3\]"),
    ("max_context_len", -1, r"must lie in \[0, 1073741824\], got -1"),
    ("out", zeros(4, 5), r"must have shape \[rows, max_context_len\] = \[4, 192\], got \[4, 5\]"),
    ("out", zeros(192, 4).T, "must be contiguous in its last dimension, got stride 4"),
]  # fmt: skip
TOPK = {"logits": zeros(4, 128), "context_lens": zeros(2, 2).int(), "block_table": zeros(2, 2).int(), "k": 4}
TOPK_TYPES = [
    ("k", 1.5, "must be an int, got float"),
    ("logits", zeros(4, 128).double(), "must be float32, got float64"),
    ("logits", [1], "must be a tensor, got list"),
    ("block_table", zeros(2, 2), "must be int32, got float32"),
]
TOPK_VALUES = [
    ("k", 0, "must be at least 1, got 0"),
    ("logits", zeros(3, 128), r"must have shape \[4, max_context_len\] to match context_lens, got \[3, 128\]"),
    ("context_lens", zeros(4, dtype=I32), "must have two dimensions, .*"),
    ("block_table", zeros(3, 2, dtype=I32), r"must have one row a request \(2\), got 3"),
    ("block_table", zeros(2, 2, dtype=I32, device="meta"), "must be on logits' device cpu, got meta"),
]
MISTAKES = [
    pytest.param(check, given, error, *row, id=f"{check.__name__}-{row[0]} {row[2].split(',')[0]}")
    for check, given, error, rows in (
        (check_logits, good() | {"layout": "bf16"}, TypeError, TYPES),
        (check_logits, good() | {"layout": "bf16"}, ValueError, VALUES),
        (check_topk, TOPK, TypeError, TOPK_TYPES),
        (check_topk, TOPK, ValueError, TOPK_VALUES),
    )
    for row in rows
]


@pytest.mark.parametrize("check, given, error, name, instead, sentence", MISTAKES)
def test_each_mistake_is_one_sentence(check, given, error, name, instead, sentence):
    check(**given)
    wrong = instead(given[name]) if callable(instead) else instead
    refuses(error, f"^{name} {sentence}$", check, **given | {name: wrong})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_good_calls_pass(layout):
    shapes = check_logits(layout, **good(layout), validate=True)
    assert shapes == Shapes(layout, 2, 2, 8, shapes.pages, 3, 192)
    assert shapes.rows == 4 and shapes.limit == 192


def test_fp8_wants_e4m3_queries():
    sentence = "^q must be float8_e4m3fn for fp8 pages, got bfloat16$"
    refuses(TypeError, sentence, check_logits, "fp8", **good("fp8") | {"q": good()["q"]})


def test_layout_is_known_by_dtype_and_shape():
    for pages, layout in (
        (zeros(1, 64, 1, 128, dtype=BF16), "bf16"),
        (zeros(1, 64, 1, 132, dtype=U8), "fp8"),
        (zeros(0, 64, 1, 68, dtype=U8), "fp4"),
    ):
        assert layout_of(pages) == layout


def test_values_are_read_on_request_only():
    given = good()
    given["context_lens"][1, 0] = -1
    check_logits("bf16", **given)
    sentence = "^context_lens must not be negative, got -1 at request 1, row 0$"
    refuses(ValueError, sentence, check_logits, "bf16", **given, validate=True)


@pytest.mark.parametrize(
    ("lens", "table", "limit", "sentence"),
    [
        ([129], [0, 1], 999, r"context_lens must not exceed the block table's 2 pages \(128\), got 129 at .* row 0"),
        ([0, 100], [0, 1], 99, r"context_lens must not exceed max_context_len \(99\), got 100 at request 0, row 1"),
        ([65], [0, 9], 128, r"block_table entries in use must lie in \[0, 9\), got 9 at request 0, page 1"),
        ([64], [-1, 0], 128, r"block_table entries in use must lie in \[0, 9\), got -1 at request 0, page 0"),
        ([64], [8, -7], 128, None),  # an unused entry may be anything
    ],
)
def test_bad_values(lens, table, limit, sentence):
    given = torch.tensor([lens], dtype=I32), torch.tensor([table], dtype=I32), 9, limit
    if sentence is None:
        check_values(*given)
    else:
        refuses(ValueError, f"^{sentence}$", check_values, *given)

"""Every sentence of impl's argument checks: the mistake, and that the untouched call passes."""

from typing import Any

import pytest
import torch

from impl.checks import Shapes, check_logits, check_topk, check_values, layout_of
from parity.selftest.impl_operands import operands

LENGTHS = [[70, 3], [1, 128]]


def good(layout="bf16"):
    return operands(layout, LENGTHS, heads=8, width=3)


def offset(tensor):
    """The same values, one element further on in memory."""
    base = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    return base[1:].view(tensor.shape)


MISTAKES = [
    ({"q": 3}, TypeError, "q must be a tensor, got int"),
    ({"kv_cache": None}, TypeError, "kv_cache must be a tensor, got NoneType"),
    ({"weights": [1.0]}, TypeError, "weights must be a tensor, got list"),
    (lambda g: {"q": g["q"].float()}, TypeError, "q must be bfloat16 for bf16 pages, got float32"),
    (lambda g: {"q": g["q"][0]}, ValueError, r"q must have shape \[requests, next_n, heads, 128\], got \[2, 8, 128\]"),
    (lambda g: {"q": g["q"][..., :64]}, ValueError, r"q must have shape .* got \[2, 2, 8, 64\]"),
    (lambda g: {"q": g["q"][:, :, :0]}, ValueError, "q must have at least one head, got none"),
    (
        lambda g: {"q": torch.zeros(2, 2, 8, 256, dtype=torch.bfloat16)[..., ::2]},
        ValueError,
        "q must be contiguous in its last dimension, got stride 2",
    ),
    (lambda g: {"kv_cache": g["kv_cache"].float()}, TypeError, "kv_cache must be bfloat16 or uint8, got float32"),
    (
        lambda g: {"kv_cache": torch.zeros(4, 32, 1, 128, dtype=torch.bfloat16)},
        ValueError,
        r"kv_cache must have pages of 64 slots \(its second dimension\), got 32",
    ),
    (
        lambda g: {"kv_cache": g["kv_cache"][:, :, 0]},
        ValueError,
        r"kv_cache of bfloat16 must have shape \[pages, 64, 1, 128\], got \[\d+, 64, 128\]",
    ),
    (
        lambda g: {"kv_cache": torch.zeros(4, 64, 1, 100, dtype=torch.uint8)},
        ValueError,
        r"kv_cache of uint8 must have shape \[pages, 64, 1, 132\] or \[pages, 64, 1, 68\], got \[4, 64, 1, 100\]",
    ),
    (
        lambda g: {"kv_cache": torch.zeros(4, 64, 1, 132, dtype=torch.uint8)},
        ValueError,
        r"kv_cache must be laid out as bf16 \(bfloat16 \[pages, 64, 1, 128\]\), "
        r"got fp8 \(uint8 \[pages, 64, 1, 132\]\)",
    ),
    (
        lambda g: {"kv_cache": torch.zeros(4, 64, 1, 256, dtype=torch.bfloat16)[..., ::2]},
        ValueError,
        r"kv_cache must be contiguous inside a page \(strides 128 and 1\), got 256 and 2",
    ),
    (
        lambda g: {
            "kv_cache": torch.zeros(40000, dtype=torch.bfloat16).as_strided((4, 64, 1, 128), (8196, 128, 128, 1))
        },
        ValueError,
        "kv_cache must have a page stride of at least 16384 bytes and a multiple of 16, got 16392",
    ),
    (
        lambda g: {"kv_cache": torch.zeros(40000, dtype=torch.bfloat16).as_strided((4, 64, 1, 128), (8, 128, 128, 1))},
        ValueError,
        "kv_cache must have a page stride of at least 16384 bytes and a multiple of 16, got 16",
    ),
    (
        lambda g: {"kv_cache": offset(g["kv_cache"])},
        ValueError,
        "kv_cache must start at a multiple of 16 bytes, got offset 2",
    ),
    (lambda g: {"weights": g["weights"].bfloat16()}, TypeError, "weights must be float32, got bfloat16"),
    (
        lambda g: {"weights": g["weights"][:3]},
        ValueError,
        r"weights must have shape \[requests \* next_n, heads\] = \[4, 8\], got \[3, 8\]",
    ),
    (lambda g: {"context_lens": g["context_lens"].long()}, TypeError, "context_lens must be int32, got int64"),
    (
        lambda g: {"context_lens": g["context_lens"].view(-1)},
        ValueError,
        r"context_lens must have shape \[requests, next_n\] = \[2, 2\], got \[4\]",
    ),
    (lambda g: {"block_table": g["block_table"].long()}, TypeError, "block_table must be int32, got int64"),
    (
        lambda g: {"block_table": g["block_table"][:1]},
        ValueError,
        r"block_table must have shape \[2, max_pages\], got \[1, 3\]",
    ),
    ({"max_context_len": 64.0}, TypeError, "max_context_len must be an int, got float"),
    ({"max_context_len": True}, TypeError, "max_context_len must be an int, got bool"),
    ({"max_context_len": -1}, ValueError, r"max_context_len must lie in \[0, 1073741824\], got -1"),
    (
        lambda g: {"weights": g["weights"].to("meta")},
        ValueError,
        "weights must be on q's device cpu, got meta",
    ),
    (
        {"out": torch.zeros(4, 5)},
        ValueError,
        r"out must have shape \[rows, max_context_len\] = \[4, 192\], got \[4, 5\]",
    ),
    ({"out": torch.zeros(4, 192).double()}, TypeError, "out must be float32, got float64"),
    ({"out": torch.zeros(192, 4).T}, ValueError, "out must be contiguous in its last dimension, got stride 4"),
]


@pytest.mark.parametrize(("change", "kind", "sentence"), MISTAKES, ids=[str(i) for i in range(len(MISTAKES))])
def test_each_mistake_is_one_sentence(change, kind, sentence):
    given = good()
    given |= change(given) if callable(change) else change
    with pytest.raises(kind, match=f"^{sentence}$"):
        check_logits("bf16", **given)


def test_good_calls_pass():
    for layout in ("bf16", "fp8"):
        shapes = check_logits(layout, **good(layout), validate=True)
        assert shapes == Shapes(layout, 2, 2, 8, shapes.pages, 3, 192)
        assert shapes.rows == 4 and shapes.limit == 192


def test_fp8_wants_e4m3_queries():
    given = good("fp8")
    given["q"] = given["q"].bfloat16()
    with pytest.raises(TypeError, match="^q must be float8_e4m3fn for fp8 pages, got bfloat16$"):
        check_logits("fp8", **given)


def test_layout_is_told_by_dtype_and_shape():
    for shape, dtype, layout in (
        ((1, 64, 1, 128), torch.bfloat16, "bf16"),
        ((1, 64, 1, 132), torch.uint8, "fp8"),
        ((0, 64, 1, 68), torch.uint8, "fp4"),
    ):
        assert layout_of(torch.zeros(shape, dtype=dtype)) == layout


def test_values_are_read_on_request_only():
    given = good()
    given["context_lens"][1, 0] = -1
    check_logits("bf16", **given)
    with pytest.raises(ValueError, match="^context_lens must not be negative, got -1 at request 1, row 0$"):
        check_logits("bf16", **given, validate=True)


@pytest.mark.parametrize(
    ("lens", "table", "limit", "sentence"),
    [
        (
            [[129]],
            [[0, 1]],
            999,
            r"context_lens must not exceed the block table's 2 pages \(128\), got 129 at request 0, row 0",
        ),
        ([[0, 100]], [[0, 1]], 99, r"context_lens must not exceed max_context_len \(99\), got 100 at request 0, row 1"),
        ([[65]], [[0, 9]], 128, r"block_table entries in use must lie in \[0, 9\), got 9 at request 0, page 1"),
        ([[64]], [[-1, 0]], 128, r"block_table entries in use must lie in \[0, 9\), got -1 at request 0, page 0"),
    ],
)
def test_bad_values(lens, table, limit, sentence):
    lens, table = (torch.tensor(x, dtype=torch.int32) for x in (lens, table))
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        check_values(lens, table, 9, limit)


def test_unused_entries_may_be_anything():
    lens, table = torch.tensor([[64]], dtype=torch.int32), torch.tensor([[8, -7]], dtype=torch.int32)
    check_values(lens, table, 9, 128)


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"k": 1.5}, TypeError, "k must be an int, got float"),
        ({"logits": torch.zeros(4, 128).double()}, TypeError, "logits must be float32, got float64"),
        (
            {"logits": torch.zeros(3, 128)},
            ValueError,
            r"logits must have shape \[4, max_context_len\] to match context_lens, got \[3, 128\]",
        ),
        ({"context_lens": torch.zeros(4, dtype=torch.int32)}, ValueError, r"context_lens must have two dimensions, .*"),
        ({"block_table": torch.zeros(2, 2)}, TypeError, "block_table must be int32, got float32"),
        (
            {"block_table": torch.zeros(3, 2, dtype=torch.int32)},
            ValueError,
            r"block_table must have one row a request \(2\), got 3",
        ),
        (
            {"block_table": torch.zeros(2, 2, dtype=torch.int32, device="meta")},
            ValueError,
            "block_table must be on logits' device cpu, got meta",
        ),
        ({"logits": [1]}, TypeError, "logits must be a tensor, got list"),
    ],
)
def test_topk_mistakes(change, kind, sentence):
    given: dict[str, Any] = {
        "logits": torch.zeros(4, 128),
        "context_lens": torch.zeros(2, 2, dtype=torch.int32),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "k": 4,
    }
    check_topk(**given)
    with pytest.raises(kind, match=f"^{sentence}$"):
        check_topk(**given | change)

"""The torch path against float64, its chunks under a small workspace, its memory, and the historical gather."""

import pytest
import torch

from impl.torch_path import (
    materialising_gather_paged_mqa_logits,
    torch_bf16_paged_mqa_logits,
    torch_fp8_paged_mqa_logits,
)
from parity.run.memory import peak_bytes
from parity.selftest.impl_operands import LAYOUTS, operands, ratio

PATHS = {"bf16": torch_bf16_paged_mqa_logits, "fp8": torch_fp8_paged_mqa_logits}
SMALL = 1 << 20


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [([[0]], 64), ([[1, 64, 65, 191, 192]], 64), ([[300], [7], [0]], 32), ([[5, 90], [128, 3]], 8), ([[77]], 5)],
)
def test_equals_float64(layout, lengths, heads):
    given = operands(layout, lengths, heads, width=6)
    for workspace in (256 << 20, SMALL):
        assert ratio(layout, given, PATHS[layout](**given, workspace_bytes=workspace)) <= 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_and_out(layout):
    given = operands(layout, [[100, 130, 9]], 8, width=4, page_stride=16896)
    wanted = PATHS[layout](**given)
    assert ratio(layout, given, wanted) <= 1
    wide = torch.zeros(2, 5, 20, 128, dtype=torch.float32).to(given["q"].dtype)
    wide[:1, 1:4, 6:14] = given["q"]
    out = torch.full((3, 300), 7.0)[:, :256]
    moved = given | {
        "q": wide[:1, 1:4, 6:14],
        "weights": given["weights"].T.contiguous().T,
        "block_table": torch.stack([given["block_table"]] * 2, -1)[..., 0],
    }
    assert PATHS[layout](**moved, out=out) is out
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unclean_leaves_the_tail(layout):
    given = operands(layout, [[70, 3], [0, 129]], 8, width=4)
    out = torch.full((4, 256), 7.0)
    PATHS[layout](**given, clean_logits=False, out=out)
    clean = PATHS[layout](**given)
    inside = torch.arange(256) < given["context_lens"].view(-1, 1)
    assert torch.equal(out, torch.where(inside, clean, 7.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_lengths_are_clamped_and_short_results_hold(layout):
    given = operands(layout, [[150]], 8, width=3)
    short = PATHS[layout](**given | {"max_context_len": 100})
    assert ratio(layout, given, short) <= 1 and short.shape == (1, 100)
    long = PATHS[layout](**given | {"max_context_len": 1000})
    assert ratio(layout, given, long) <= 1 and long.shape == (1, 1000)
    given["context_lens"][:] = 10**6
    given["block_table"][:] = given["block_table"][:, :1]
    assert bool((PATHS[layout](**given | {"max_context_len": 1000}).isinf() == (torch.arange(1000) >= 192)).all())
    given["context_lens"][:] = -5
    assert bool((PATHS[layout](**given) == -float("inf")).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_calls(layout):
    given = operands(layout, [[0]], 8, width=2)
    none = given | {
        "q": given["q"][:0],
        "weights": given["weights"][:0],
        "context_lens": given["context_lens"][:0],
        "block_table": given["block_table"][:0],
    }
    assert PATHS[layout](**none).shape == (0, 128)
    assert PATHS[layout](**given | {"max_context_len": 0}).shape == (1, 0)
    assert bool(
        (
            PATHS[layout](**given | {"kv_cache": given["kv_cache"][:0], "context_lens": given["context_lens"] + 5})
            == -float("inf")
        ).all()
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nonfinite_keys_keep_their_class(layout):
    given = operands(layout, [[70]], 8, width=2)
    page = int(given["block_table"][0, 1])
    if layout == "bf16":
        given["kv_cache"][page, 3, 0, 5] = float("nan")
    else:
        given["kv_cache"][page].view(-1)[3 * 128 + 5] = 0x7F
    result = PATHS[layout](**given)
    assert result.isnan().nonzero().tolist() == [[0, 67]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_temporaries_stay_under_the_workspace(layout):
    given = operands(layout, [[500 + row // 4 for row in range(256)]], 64, width=9)
    result = 4 * 256 * given["max_context_len"]
    for workspace in (SMALL, 8 << 20):
        with peak_bytes(torch.device("cpu")) as peak:
            PATHS[layout](**given, workspace_bytes=workspace)
        assert peak.bytes - result <= workspace
    with peak_bytes(torch.device("cpu")) as peak:
        PATHS[layout](**given)
    assert peak.bytes - result > 8 << 20, "the small workspaces have to be what made the peak small"


def test_workspace_mistakes():
    given = operands("bf16", [[3]], 8)
    with pytest.raises(ValueError, match=r"^workspace_bytes must be at least \d+ \(one row against one page\), got 5$"):
        torch_bf16_paged_mqa_logits(**given, workspace_bytes=5)
    with pytest.raises(TypeError, match="^workspace_bytes must be an int, got float$"):
        torch_bf16_paged_mqa_logits(**given, workspace_bytes=1e9)  # type: ignore[arg-type]


def test_matmul_settings_come_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        torch_bf16_paged_mqa_logits(**operands("bf16", [[70]], 8))
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_the_historical_gather_gathers():
    given = operands("bf16", [[100] * 16], 8, width=4)
    with peak_bytes(torch.device("cpu")) as peak:
        result = materialising_gather_paged_mqa_logits(**given)
    gather = 16 * 4 * 16384
    assert peak.bytes >= gather
    # Its dots are rounded to bf16: right for a contract that says so, wrong for one that does not.
    assert ratio("bf16", given, result, dot_dtype=torch.bfloat16) <= 1 < ratio("bf16", given, result)

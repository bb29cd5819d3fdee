"""The Triton kernels on small cases, interpreted or on a CUDA device: bounds, bits, tails, strides, NaN, dots."""

import math

import pytest
import torch

from impl import configs
from impl.checks import PAGE, Shapes, Unsupported
from impl.launch import paged_logits, plan_for, target
from impl.logits_bf16 import bf16_paged_mqa_dots, bf16_paged_mqa_logits
from impl.logits_fp8 import fp8_paged_mqa_dots, fp8_paged_mqa_logits
from parity.run import interpreter
from parity.selftest.impl_operands import LAYOUTS, operands, ratio

KERNELS = {"bf16": bf16_paged_mqa_logits, "fp8": fp8_paged_mqa_logits}
DOTS = {"bf16": bf16_paged_mqa_dots, "fp8": fp8_paged_mqa_dots}
DEVICE = torch.device("cpu" if interpreter.interpreting() else "cuda")

# One request a list of lengths: narrow decode, wide decode, prefill; empty rows and every edge of a page and a tile.
CASES = [
    ([[130], [0], [64]], 64),
    ([[65, 128], [1, 0]], 64),
    ([[0, 1, 63, 129, 190, 192, 12, 7, 129]], 64),
    ([[200]], 32),
    ([[3, 70, 66]], 16),
    ([[60 + row for row in range(17)]], 8),
]


@pytest.fixture(autouse=True)
def dots_in_one_order():
    """The interpreter's own come from a BLAS, whose order of summation may follow the shape of the tile."""
    with interpreter.corrected():
        yield


def here(given):
    """The operands on the device under test, strides kept: a plain copy would pack the pages."""
    return {name: moved(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def moved(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("lengths", "heads"), CASES, ids=[f"heads{heads}-{len(r)}x{len(r[0])}" for r, heads in CASES])
def test_within_the_bound_and_the_same_bits_by_every_configuration(layout, lengths, heads):
    given = here(operands(layout, lengths, heads))
    result = KERNELS[layout](**given)
    assert ratio(layout, given, result) <= 1
    arch, _ = target(DEVICE)
    for config in configs.configurations(arch, layout, heads):
        other, used = paged_logits(layout, **given, config=config)
        assert used == config and torch.equal(other, result), str(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_as_requests_of_their_own_have_the_same_bits(layout):
    given = here(operands(layout, [[5, 130, 64, 0, 99, 128, 127, 3]], 64))
    expanded = given | {
        "q": given["q"].reshape(8, 1, 64, 128),
        "context_lens": given["context_lens"].reshape(8, 1),
        "block_table": given["block_table"].expand(8, -1),
    }
    assert torch.equal(KERNELS[layout](**expanded), KERNELS[layout](**given))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("next_n", [1, 9])
def test_unclean_writes_inside_the_length_alone(layout, next_n):
    given = here(operands(layout, [[3, 70, 0, 128, 129, 40, 64, 65, 1][:next_n]], 8, width=4))
    clean = KERNELS[layout](**given)
    out = torch.full((next_n, 256), 7.0, device=DEVICE)
    assert KERNELS[layout](**given, clean_logits=False, out=out) is out
    inside = torch.arange(256, device=DEVICE) < given["context_lens"].view(-1, 1)
    assert torch.equal(out, torch.where(inside, clean, 7.0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("next_n", [1, 9])
def test_width_is_free_and_lengths_are_clamped(layout, next_n):
    given = here(operands(layout, [[192] * next_n], 8, width=3))
    whole = KERNELS[layout](**given)
    for width in (50, 1000):
        result = KERNELS[layout](**given | {"max_context_len": width})
        assert torch.equal(result[:, :192], whole[:, :width]) and bool((result[:, 192:] == -math.inf).all())
    given["context_lens"][:] = 2**31 - 1
    assert torch.equal(KERNELS[layout](**given), whole)
    given["context_lens"][:] = -3
    assert bool((KERNELS[layout](**given) == -math.inf).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides(layout):
    given = here(operands(layout, [[70, 130, 9]], 16, width=3))
    wanted = KERNELS[layout](**given)
    far = here(operands(layout, [[70, 130, 9]], 16, width=3, page_stride=17 * 1024 + 16))
    assert far["kv_cache"].stride(0) * far["kv_cache"].element_size() == 17 * 1024 + 16
    wide = torch.zeros(2, 5, 20, 257, device=DEVICE).to(given["q"].dtype)
    q = wide[1:, 1:4, 2:18, 1:129]
    q.copy_(given["q"])
    lens = torch.zeros(1, 6, dtype=torch.int32, device=DEVICE)[:, ::2]
    lens.copy_(given["context_lens"])
    table = torch.full((1, 50), -1, dtype=torch.int32, device=DEVICE)[:, 7:10]
    table.copy_(given["block_table"])
    strided = far | {"q": q, "context_lens": lens, "block_table": table, "weights": given["weights"].T.contiguous().T}
    assert torch.equal(KERNELS[layout](**strided), wanted)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("next_n", [1, 9])
def test_nan_and_infinity_go_through(layout, next_n):
    given = operands(layout, [[130] * next_n], 8)
    page = int(given["block_table"][0, 1])
    if layout == "bf16":
        given["kv_cache"][page, 3, 0, 5] = math.nan
        given["kv_cache"][page, 4, 0, 5] = math.inf
    else:
        given["kv_cache"][page].view(-1)[3 * 128 + 5] = 0xFF
        given["kv_cache"][page].view(-1)[64 * 128 :].view(torch.float32)[4] = math.inf
    result = KERNELS[layout](**here(given)).cpu()
    assert result[:, 67].isnan().all()
    assert not result[:, 68].isfinite().any()
    others = [key for key in range(130) if key not in (67, 68)]
    assert result[:, others].isfinite().all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dots_are_the_per_head_products(layout):
    given = here(operands(layout, [[70, 0, 129], [1, 2, 64]], 16))
    weights = given.pop("weights")
    dots = DOTS[layout](**given)
    width = given["max_context_len"]
    assert dots.shape == (6, 16, width)
    inside = torch.arange(width, device=DEVICE) < given["context_lens"].view(-1, 1, 1)
    assert torch.equal(dots.isnan(), ~inside.expand_as(dots))
    # A head alone: its logit is its ReLU'd dot times weight and scale, one rounding each.
    for head in (0, 15):
        alone = torch.zeros_like(weights)
        alone[:, head] = 1.0
        logits = KERNELS[layout](**given, weights=alone)
        relu = torch.where(inside[:, 0], dots[:, head].relu(), 0.0)
        if layout == "bf16":
            assert torch.equal(relu, torch.where(inside[:, 0], logits, 0.0))
        else:
            assert torch.equal(relu > 0, torch.where(inside[:, 0], logits, 0.0) > 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_calls(layout):
    given = here(operands(layout, [[0]], 8, width=2))
    none = given | {name: given[name][:0] for name in ("q", "weights", "context_lens", "block_table")}
    assert KERNELS[layout](**none).shape == (0, 128)
    assert KERNELS[layout](**given | {"max_context_len": 0}).shape == (1, 0)
    assert bool(
        (
            KERNELS[layout](**given | {"kv_cache": given["kv_cache"][:0], "context_lens": given["context_lens"] + 5})
            == -math.inf
        ).all()
    )
    assert bool((KERNELS[layout](**given | {"block_table": given["block_table"][:, :0]}) == -math.inf).all())


def test_other_head_counts_are_unsupported():
    with pytest.raises(Unsupported, match="^the Triton kernels take 8, 16, 32 or 64 heads, got 24$"):
        bf16_paged_mqa_logits(**here(operands("bf16", [[3]], 24)))


def test_plans_cover_every_row_and_key_within_the_grid():
    for arch in (configs.INTERPRETER, 80, 89, 90, 100, 120):
        for layout in LAYOUTS:
            if not configs.supports(arch, layout):
                continue
            for requests, next_n, keys in ((1, 1, 1), (64, 1, 131072), (3, 5, 1000), (1, 4096, 16384), (2, 9, 2**30)):
                for heads in configs.HEADS:
                    shapes = Shapes(layout, requests, next_n, heads, 1, 1, keys)
                    plan = configs.plan(shapes, arch, 132)
                    rows, chunks = plan.grid
                    tile = plan.config
                    row_span, key_span = tile.row_tile, tile.block
                    if tile.kernel == "decode":
                        key_span *= plan.trips
                    else:
                        row_span *= plan.trips
                        assert plan.trips <= tile.trips, "a prefill program looks at so many lengths at most"
                    assert rows == requests * plan.groups and plan.groups * row_span >= next_n
                    assert chunks * key_span >= keys and (chunks - 1) * key_span < keys
                    assert tile in configs.configurations(arch, layout, heads)
                    if arch != configs.INTERPRETER:
                        assert chunks <= configs.GRID_Y and rows < 2**31


def test_unsupported_architectures_say_so():
    shapes = Shapes("fp8", 1, 1, 64, 1, 1, PAGE)
    with pytest.raises(Unsupported, match=r"^fp8 pages need compute capability 8\.9, the device has 8\.0$"):
        configs.plan(shapes, 80, 108)
    with pytest.raises(
        Unsupported, match=r"^the Triton kernels need compute capability 8\.0 or later, the device has 7\.5$"
    ):
        configs.configurations(75, "bf16", 64)


@pytest.mark.skipif(not interpreter.interpreting(), reason="needs Triton's interpreter")
def test_a_cpu_without_the_interpreter_is_unsupported(monkeypatch):
    from impl import tiles

    monkeypatch.setattr(tiles, "INTERPRETED", False)
    with pytest.raises(Unsupported, match="^Triton kernels need a CUDA device or TRITON_INTERPRET=1, .* on cpu$"):
        plan_for(Shapes("bf16", 1, 1, 64, 1, 1, PAGE), torch.device("cpu"))

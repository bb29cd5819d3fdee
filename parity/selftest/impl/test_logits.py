"""The kernels of logits, torch path and Triton, interpreted or on a CUDA device: bounds, bits, tails, strides, NaN."""

import itertools
import math

import pytest
import torch

from impl import configs, torch_path
from impl.checks import PAGE, Shapes, Unsupported
from impl.launch import paged_logits, plan_for, target
from impl.logits_bf16 import bf16_paged_mqa_dots, bf16_paged_mqa_logits
from impl.logits_fp8 import fp8_paged_mqa_dots, fp8_paged_mqa_logits
from parity.run import interpreter
from parity.run.memory import peak_bytes
from parity.selftest.helpers import CPU, refuses
from parity.selftest.operands import LAYOUTS, operands, ratio

PATHS = {"bf16": torch_path.torch_bf16_paged_mqa_logits, "fp8": torch_path.torch_fp8_paged_mqa_logits}
KERNELS = {"bf16": bf16_paged_mqa_logits, "fp8": fp8_paged_mqa_logits}
DOTS = {"bf16": bf16_paged_mqa_dots, "fp8": fp8_paged_mqa_dots}
DEVICE = torch.device("cpu" if interpreter.interpreting() else "cuda")
SMALL = 1 << 20

# One request per list of lengths: narrow decode, wide decode, prefill; empty rows and every edge of a page and a tile.
CASES = [
    ([[130], [0], [64]], 64),
    ([[65, 128], [1, 0]], 64),
    ([[0, 1, 63, 129, 190, 192, 12, 7, 129]], 64),
    ([[200]], 32),
    ([[3, 70, 66]], 16),
    ([[60 + row for row in range(17)]], 8),
]
of_every_layout = pytest.mark.parametrize("layout", LAYOUTS)
of_both = pytest.mark.parametrize("functions", [PATHS, KERNELS], ids=["torch", "triton"])
narrow_and_wide = pytest.mark.parametrize("next_n", [1, 9])


@pytest.fixture(autouse=True)
def dots_in_one_order():
    """The interpreter's own come from a BLAS, whose order of summation may follow the shape of the tile."""
    with interpreter.corrected():
        yield


def here(*arguments, **named):
    """Operands on the device under test, strides kept: a plain copy would pack the pages."""
    given = operands(*arguments, **named)
    return {name: to_device(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}


def to_device(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE).copy_(tensor)


def inside(given, width):
    return torch.arange(width, device=DEVICE) < given["context_lens"].view(-1, 1)


@of_every_layout
@pytest.mark.parametrize(("lengths", "heads"), CASES, ids=[f"heads{heads}-{len(r)}x{len(r[0])}" for r, heads in CASES])
def test_within_the_bound_and_the_same_bits_by_every_configuration(layout, lengths, heads):
    given = here(layout, lengths, heads)
    result = KERNELS[layout](**given)
    assert ratio(layout, given, result) <= 1
    arch, _ = target(DEVICE)
    for config in configs.configurations(arch, layout, heads):
        other, used = paged_logits(layout, **given, config=config)
        assert used == config and torch.equal(other, result), str(config)


@of_every_layout
@pytest.mark.parametrize(
    ("lengths", "heads"),
    [([[0]], 64), ([[1, 64, 65, 191, 192]], 64), ([[300], [7], [0]], 32), ([[5, 90], [128, 3]], 8), ([[77]], 5)],
)
def test_the_torch_path_is_within_the_bound_in_chunks_of_every_size(layout, lengths, heads):
    given = here(layout, lengths, heads, width=6)
    for workspace in (256 << 20, SMALL):
        assert ratio(layout, given, PATHS[layout](**given, workspace_bytes=workspace)) <= 1


@of_every_layout
def test_rows_as_requests_of_their_own_have_the_same_bits(layout):
    given = here(layout, [[5, 130, 64, 0, 99, 128, 127, 3]], 64)
    expanded = given | {
        "q": given["q"].reshape(8, 1, 64, 128),
        "context_lens": given["context_lens"].reshape(8, 1),
        "block_table": given["block_table"].expand(8, -1),
    }
    assert torch.equal(KERNELS[layout](**expanded), KERNELS[layout](**given))


@of_both
@of_every_layout
@narrow_and_wide
def test_unclean_writes_inside_the_length_only(functions, layout, next_n):
    given = here(layout, [[3, 70, 0, 128, 129, 40, 64, 65, 1][:next_n]], 8, width=4)
    out = torch.full((next_n, 256), 7.0, device=DEVICE)
    assert functions[layout](**given, clean_logits=False, out=out) is out
    assert torch.equal(out, torch.where(inside(given, 256), functions[layout](**given), 7.0))


@of_both
@of_every_layout
@narrow_and_wide
def test_width_is_free_and_lengths_are_clamped(functions, layout, next_n):
    given = here(layout, [[192] * next_n], 8, width=3)
    whole = functions[layout](**given)
    for width in (50, 1000):
        result = functions[layout](**given | {"max_context_len": width})
        assert result.shape == (next_n, width) and ratio(layout, given, result) <= 1
        assert functions is PATHS or torch.equal(result[:, :192], whole[:, :width])
    within = inside(given, 1000)
    given["context_lens"][:] = 2**31 - 1
    assert torch.equal(functions[layout](**given), whole)
    assert torch.equal(functions[layout](**given | {"max_context_len": 1000}).isfinite(), within)
    given["context_lens"][:] = -3
    assert bool((functions[layout](**given) == -math.inf).all())


@of_both
@of_every_layout
def test_strides(functions, layout):
    given = here(layout, [[70, 130, 9]], 16, width=3)
    wanted = functions[layout](**given)
    far = here(layout, [[70, 130, 9]], 16, width=3, page_stride=17 * 1024 + 16)
    assert far["kv_cache"].stride(0) * far["kv_cache"].element_size() == 17 * 1024 + 16
    step = 2 if functions is PATHS else 1  # the Triton kernels take the pages of a row as contiguous
    strided = {
        "q": torch.zeros(2, 5, 20, 257, device=DEVICE).to(given["q"].dtype)[1:, 1:4, 2:18, 1:129],
        "context_lens": torch.zeros(1, 6, dtype=torch.int32, device=DEVICE)[:, ::2],
        "block_table": torch.zeros(1, 50, dtype=torch.int32, device=DEVICE)[:, 7 : 7 + 3 * step : step],
        "weights": torch.zeros(16, 3, device=DEVICE).T,
    }
    for name, tensor in strided.items():
        tensor.copy_(given[name])
    out = torch.full((3, 300), 7.0, device=DEVICE)
    assert torch.equal(functions[layout](**far | strided, out=out[:, :192]), wanted)
    assert torch.equal(out[:, :192], wanted) and bool((out[:, 192:] == 7.0).all())
    if functions is not PATHS:
        apart = given["block_table"].repeat_interleave(2, dim=1)[:, ::2]
        with pytest.raises(ValueError, match="block_table must be contiguous in its last dimension, got stride 2"):
            functions[layout](**given | {"block_table": apart})
        # A table of no rows may carry any stride; there is no step to take in it.
        none = {name: given[name][:0] for name in ("q", "weights", "context_lens")}
        empty = given["block_table"].as_strided((0, given["block_table"].shape[1]), (0, 0))
        assert functions[layout](**given | none | {"block_table": empty}).shape[0] == 0


@of_both
@of_every_layout
@narrow_and_wide
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_and_infinity_go_through(functions, layout, next_n):
    given = here(layout, [[130] * next_n], 8)
    page = given["kv_cache"][int(given["block_table"][0, 1])]
    if layout == "bf16":
        page[3, 0, 5], page[4, 0, 5] = math.nan, math.inf
    else:
        page.view(-1)[3 * 128 + 5] = 0xFF
        page.view(-1)[64 * 128 :].view(torch.float32)[4] = math.inf
    result = functions[layout](**given)
    assert result[:, 67].isnan().all() and not result[:, 68].isfinite().any()
    assert result[:, [key for key in range(130) if key not in (67, 68)]].isfinite().all()


@of_every_layout
def test_dots_are_the_per_head_products(layout):
    given = here(layout, [[70, 0, 129], [1, 2, 64]], 16)
    weights, width = given.pop("weights"), given["max_context_len"]
    dots = DOTS[layout](**given)
    assert dots.shape == (6, 16, width)
    visible = inside(given, width)
    assert torch.equal(dots.isnan(), ~visible[:, None].expand_as(dots))
    # One head only: its logit is its ReLU'd dot times weight and scale, one rounding each.
    for head in (0, 15):
        one = torch.zeros_like(weights)
        one[:, head] = 1.0
        logits = torch.where(visible, KERNELS[layout](**given, weights=one), 0.0)
        relu = torch.where(visible, dots[:, head].relu(), 0.0)
        assert torch.equal(relu, logits) if layout == "bf16" else torch.equal(relu > 0, logits > 0)


@of_both
@of_every_layout
def test_empty_calls(functions, layout):
    given = here(layout, [[0]], 8, width=2)
    none = given | {name: given[name][:0] for name in ("q", "weights", "context_lens", "block_table")}
    assert functions[layout](**none).shape == (0, 128)
    assert functions[layout](**given | {"max_context_len": 0}).shape == (1, 0)
    no_pages = {"kv_cache": given["kv_cache"][:0], "context_lens": given["context_lens"] + 5}
    for change in (no_pages, {"block_table": given["block_table"][:, :0]}):
        assert bool((functions[layout](**given | change) == -math.inf).all())


@of_every_layout
def test_temporaries_stay_under_the_workspace(layout):
    given = operands(layout, [[500 + row // 4 for row in range(256)]], 64, width=9)
    result = 4 * 256 * given["max_context_len"]
    for workspace in (SMALL, 8 << 20, 256 << 20):
        with peak_bytes(CPU) as peak:
            PATHS[layout](**given, workspace_bytes=workspace)
        # The large workspace shows that the small ones are what makes the peak small.
        assert (peak.bytes - result <= workspace) if workspace <= 8 << 20 else (peak.bytes - result > 8 << 20)


def test_workspace_mistakes():
    given, path = operands("bf16", [[3]], 8), PATHS["bf16"]
    sentence = r"^workspace_bytes must be at least \d+ \(one row against one page\), got 5$"
    refuses(ValueError, sentence, path, **given, workspace_bytes=5)
    refuses(TypeError, "^workspace_bytes must be an int, got float$", path, **given, workspace_bytes=1e9)


def test_matmul_settings_come_back():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        PATHS["bf16"](**operands("bf16", [[70]], 8))
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_the_historical_gather_gathers():
    given = operands("bf16", [[100] * 16], 8, width=4)
    with peak_bytes(CPU) as peak:
        result = torch_path.materialising_gather_paged_mqa_logits(**given)
    assert peak.bytes >= 16 * 4 * 16384
    # Its dots are rounded to bf16: correct for a contract that says so, wrong for one that does not.
    assert ratio("bf16", given, result, dot_dtype=torch.bfloat16) <= 1 < ratio("bf16", given, result)


def test_plans_cover_every_row_and_key_within_the_grid():
    sizes = ((1, 1, 1), (64, 1, 131072), (3, 5, 1000), (1, 4096, 16384), (2, 9, 2**30))
    archs = (configs.INTERPRETER, 80, 89, 90, 100, 120)
    supported = [(arch, layout) for arch in archs for layout in LAYOUTS if configs.supports(arch, layout)]
    for (arch, layout), (requests, next_n, keys), heads in itertools.product(supported, sizes, configs.HEADS):
        plan = configs.plan(Shapes(layout, requests, next_n, heads, 1, 1, keys), arch, 132)
        (rows, chunks), tile = plan.grid, plan.config
        row_span, key_span = tile.row_tile, tile.block
        if tile.kernel == "decode":
            key_span *= plan.trips
        else:
            row_span *= plan.trips
            assert plan.trips <= tile.trips, "a prefill program looks at so many lengths at most"
        assert rows == requests * plan.groups and plan.groups * row_span >= next_n
        assert chunks * key_span >= keys and (chunks - 1) * key_span < keys
        assert tile in configs.configurations(arch, layout, heads)
        assert arch == configs.INTERPRETER or (chunks <= configs.GRID_Y and rows < 2**31)


def test_what_is_unsupported_says_so():
    sentence = "^the Triton kernels take 8, 16, 32 or 64 heads, got 24$"
    refuses(Unsupported, sentence, bf16_paged_mqa_logits, **here("bf16", [[3]], 24))
    sentence = r"^fp8 pages need compute capability 8\.9, the device has 8\.0$"
    refuses(Unsupported, sentence, configs.plan, Shapes("fp8", 1, 1, 64, 1, 1, PAGE), 80, 108)
    sentence = r"^the Triton kernels need compute capability 8\.0 or later, the device has 7\.5$"
    refuses(Unsupported, sentence, configs.configurations, 75, "bf16", 64)


@pytest.mark.skipif(not interpreter.interpreting(), reason="needs Triton's interpreter")
def test_a_cpu_without_the_interpreter_is_unsupported(monkeypatch):
    monkeypatch.setattr("impl.tiles.INTERPRETED", False)
    sentence = "^Triton kernels need a CUDA device or TRITON_INTERPRET=1, .* on cpu$"
    refuses(Unsupported, sentence, plan_for, Shapes("bf16", 1, 1, 64, 1, 1, PAGE), CPU)

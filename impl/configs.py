"""Launch configurations of the Triton kernels by architecture, layout and heads, and the choice among them for a call.

No configuration may change a result's bits, so all of one architecture, layout and head count add the heads in the same
order. With wgmma and tcgen05 warps lie along the keys only, and the order follows the head count; with `mma.sync`
(sm_80, sm_12x) warps share the heads out by tile, so that the tile is the same everywhere. Compiling them checks it.
"""

from dataclasses import dataclass
from functools import cache

from impl.checks import Shapes, Unsupported

# Largest dynamic shared memory of one block in KiB (NVIDIA's opt-in maxima).
SHARED_LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99, 121: 99}
INTERPRETER = 0
HEADS = (8, 16, 32, 64)
GRID_Y = 65535
# From this many rows per request, a tile of keys stays resident and rows stream past it.
PREFILL_ROWS = 8


@dataclass(frozen=True)
class Config:
    """One compiled kernel: which, its tile [block keys, row_tile * heads columns], its longest run of trips, its knobs.

    `trips` bounds the key tiles (decode) or row steps (prefill) of one program.
    """

    kernel: str
    layout: str
    heads: int
    block: int
    row_tile: int
    trips: int
    num_warps: int
    num_stages: int

    @property
    def columns(self) -> int:
        return self.row_tile * self.heads

    @property
    def least_shared_bytes(self) -> int:
        """Shared memory without which there is no such pipeline: a copy of the streamed operand for every stage but the
        one in use. A compiled kernel takes more, for the operand that stays and for its sums."""
        streamed = self.block if self.kernel == "decode" else self.columns
        return (self.num_stages - 1) * streamed * 128 * (2 if self.layout == "bf16" else 1)

    def __str__(self) -> str:
        return (
            f"{self.kernel}-{self.layout}-h{self.heads}-b{self.block}-r{self.row_tile}"
            f"-w{self.num_warps}-s{self.num_stages}"
        )


@dataclass(frozen=True)
class Plan:
    """A configuration with the grid and trip count of one call."""

    config: Config
    groups: int
    trips: int
    grid: tuple[int, int]


def fused() -> bool:
    """Whether the compiler may contract products and sums of these kernels to fused multiply-adds.

    From Triton 3.8 on, LLVM contracts the head sum of some configurations differently for different logits, which costs
    them their equal bits; so there the kernels are compiled without. Before, one order holds everywhere.
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return version < (3, 8) and bool(triton.knobs.language.default_fp_fusion)


def family(arch: int) -> str:
    """Architecture family ("interpreter", "sm80", "sm90", "sm100", "sm120") of a compute capability such as 90."""
    if arch == INTERPRETER:
        return "interpreter"
    if arch < 80:
        raise Unsupported(
            f"the Triton kernels need compute capability 8.0 or later, the device has {arch // 10}.{arch % 10}"
        )
    if arch < 90:
        return "sm80" if arch == 80 else "sm120"
    if arch < 100:
        return "sm90"
    return "sm100" if arch < 120 else "sm120"


def supports(arch: int, layout: str) -> bool:
    """Whether the architecture has the layout's operand type: e4m3 came with 8.9."""
    return layout == "bf16" or arch == INTERPRETER or arch >= 89


def _columns(fam: str) -> int:
    """Most columns (rows times heads) of a tile."""
    return {"interpreter": 128, "sm80": 64, "sm90": 128, "sm100": 64, "sm120": 64}[fam]


def _decode(fam: str, layout: str, heads: int, row_tile: int) -> Config:
    wide = row_tile * heads > 64
    block, warps, stages = {
        "interpreter": (128, 1, 1),
        "sm80": (128, 4, 3),
        "sm90": (64, 4, 4) if wide else (64, 4, 3 if layout == "bf16" else 2),
        "sm100": (128, 4, 3),
        "sm120": (128, 4, 2),
    }[fam]
    return Config("decode", layout, heads, block, row_tile, 2 if fam == "interpreter" else 16, warps, stages)


def _prefill(arch: int, layout: str, heads: int, row_tile: int) -> Config:
    fam = family(arch)
    block, warps, stages, trips = {
        "interpreter": (128, 1, 1, 2),
        "sm80": (128, 4, 3, 128),
        "sm90": (256, 8, 3, 64) if layout == "bf16" else (128, 4, 3, 64),
        "sm100": (128, 4, 3, 64),
        "sm120": (128, 4, 2, 128),
    }[fam]
    # Triton before 3.8 multiplies e4m3 as f16 on sm_121, and with two stages runs out of registers there.
    stages = 3 if (arch, layout) == (121, "fp8") else stages
    return Config("prefill", layout, heads, block, row_tile, trips, warps, stages)


def require_fit(config: Config, arch: int) -> None:
    """Unsupported for a configuration that cannot fit the shared memory that a block has on this architecture."""
    limit = SHARED_LIMIT_KIB.get(arch)
    least = config.least_shared_bytes
    if limit is not None and least > limit * 1024:
        raise Unsupported(
            f"{config} needs {least / 1024:.0f} KiB of shared memory at least, a block on sm_{arch} has {limit} KiB"
        )


@cache
def configurations(arch: int, layout: str, heads: int) -> tuple[Config, ...]:
    """Every configuration that `plan` can pick on this architecture: narrow decode, wide decode, prefill."""
    fam = family(arch)
    most = _columns(fam) // heads
    # On `mma.sync` the order of the head sum follows the number of columns, so that there is only one.
    least = most if fam in ("sm80", "sm120") else max(1, 16 // heads)
    found = [_decode(fam, layout, heads, least)]
    if most > least:
        found.append(_decode(fam, layout, heads, most))
    found.append(_prefill(arch, layout, heads, most if fam == "interpreter" else max(1, 64 // heads)))
    return tuple(found)


def every(arch: int) -> list[Config]:
    """All configurations of an architecture, both layouts where it has them."""
    layouts = [layout for layout in ("bf16", "fp8") if supports(arch, layout)]
    return [config for layout in layouts for heads in HEADS for config in configurations(arch, layout, heads)]


def plan(shapes: Shapes, arch: int, processors: int) -> Plan:
    """Choose by shapes only (never by lengths, which live on the device): Unsupported where nothing fits."""
    if not supports(arch, shapes.layout):
        raise Unsupported(f"{shapes.layout} pages need compute capability 8.9, the device has {arch // 10}.{arch % 10}")
    if shapes.heads not in HEADS:
        raise Unsupported(f"the Triton kernels take 8, 16, 32 or 64 heads, got {shapes.heads}")
    narrow, *wide, rows = configurations(arch, shapes.layout, shapes.heads)
    many = shapes.next_n >= (4 if arch == INTERPRETER else PREFILL_ROWS)
    if many and -(-shapes.max_context_len // rows.block) <= GRID_Y:
        return plan_with(rows, shapes, processors, arch)
    return plan_with(wide[0] if wide and shapes.next_n > narrow.row_tile else narrow, shapes, processors, arch)


def plan_with(config: Config, shapes: Shapes, processors: int, arch: int) -> Plan:
    """Grid and trips of a call with a given configuration: Unsupported where the architecture has no room for it."""
    require_fit(config, arch)
    planner = _plan_decode if config.kernel == "decode" else _plan_prefill
    return planner(config, shapes, processors, arch)


def _plan_decode(config: Config, shapes: Shapes, processors: int, arch: int) -> Plan:
    groups = -(-shapes.next_n // config.row_tile)
    tiles = -(-shapes.max_context_len // config.block)
    trips = min(config.trips, tiles)
    if arch != INTERPRETER:
        # Halve the run of a program until the grid fills the device a few times over.
        while trips > 1 and shapes.requests * groups * -(-tiles // trips) < 4 * processors:
            trips = -(-trips // 2)
        trips = max(trips, -(-tiles // GRID_Y))
    return Plan(config, groups, trips, (shapes.requests * groups, -(-tiles // trips)))


def _plan_prefill(config: Config, shapes: Shapes, processors: int, arch: int) -> Plan:
    steps = -(-shapes.next_n // config.row_tile)
    tiles = -(-shapes.max_context_len // config.block)
    trips = min(config.trips, steps)
    if arch != INTERPRETER:
        while trips > 4 and shapes.requests * -(-steps // trips) * tiles < 4 * processors:
            trips = -(-trips // 2)
    groups = -(-steps // trips)
    return Plan(config, groups, trips, (shapes.requests * groups, tiles))

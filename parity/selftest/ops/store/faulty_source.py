"""One-line edits of the fused store's CUDA source, each a fault that public kernels have had, for tests to reject."""

from pathlib import Path
from typing import NamedTuple

from impl.store_compile import SOURCE
from impl.store_modes import Mode


class StoreFault(NamedTuple):
    """An edit of one line of the source, and the mode in which it must show."""

    name: str
    mode: Mode
    old: str
    new: str


FP8 = Mode("fp8", "fused")
FAULTS = (
    StoreFault(
        "slot -1 writes slot 0",
        FP8,
        "token < n ? out_loc[token] : -1",
        "token < n ? (out_loc[token] < 0 ? 0 : out_loc[token]) : -1",
    ),
    StoreFault("scale one slot off", FP8, "scales[row] = scale", "scales[(row + 1) % PAGE] = scale"),
    StoreFault(
        "scale on page 0",
        FP8,
        "reinterpret_cast<float*>(page + PAGE * DIM)",
        "reinterpret_cast<float*>(kv_cache + PAGE * DIM)",
    ),
    StoreFault(
        "rows of 132 bytes",
        FP8,
        "float* scales = reinterpret_cast<float*>(page + PAGE * DIM);",
        "payload += row; float* scales = reinterpret_cast<float*>(payload) + DIM / 4 - row;",
    ),
    StoreFault(
        "half-split rotary",
        FP8,
        "float &re = x[c].v[i], &im = x[c].v[i + 1], co = turn[c].v[i], si = turn[c].v[i + 1];",
        "const int j = 2 * (c - 2) + i / 2, a = 8 * lane + 2 * j; "
        "float &re = x[2].v[j], &im = x[3].v[j], co = active ? cos_sin[a] : 1.f, si = active ? cos_sin[a + 1] : 0.f;",
    ),
    StoreFault("position off by 3", FP8, "token < n ? positions[token] : 0", "token < n ? positions[token] + 3 : 0"),
    StoreFault(
        "Hadamard without its factor", FP8, "stage<PUBLISHED>(x[c].v[i] * HADAMARD)", "stage<PUBLISHED>(x[c].v[i])"
    ),
    StoreFault("no floor of amax", FP8, "fmaxf(lane_max<LANES>(amax), FP8_FLOOR)", "lane_max<LANES>(amax)"),
    StoreFault(
        "power of two rounded down",
        Mode("fp8_pow2", "fused"),
        "- 127 + ((bits & 0x7fffffu) != 0u)",
        "- 127",
    ),
    StoreFault("bf16 by truncation", Mode("bf16", "fused"), "__float2bfloat16_rn(x)", "__float2bfloat16_rz(x)"),
    StoreFault(
        "fp4 ties toward zero",
        Mode("bf16", "published", True),
        "return rintf(y * inverse) * step;",
        "return ceilf(y * inverse - 0.5f) * step;",
    ),
)
MISSED_SHUFFLE = StoreFault(
    "a token that is left out leaves its shuffles out",
    FP8,
    "    const float r = 1.f",
    "    if (!active) return;\n    const float r = 1.f",
)
OVERRUN = StoreFault("a page too far", FP8, "(slot >> 6) * page_stride", "((slot >> 6) + 1) * page_stride")


def faulty_source(fault: StoreFault, folder: Path) -> Path:
    """A copy of the source with the edit applied; the line must be there exactly once."""
    text = SOURCE.read_text()
    count = text.count(fault.old)
    if count != 1:
        raise ValueError(f"{fault.name}: the source has {count} places like {fault.old!r}, expected one")
    path = folder / "faulty.cu"
    path.write_text(text.replace(fault.old, fault.new))
    return path

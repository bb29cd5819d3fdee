"""The fused store compiled for an architecture without a GPU: registers, spills and static shared memory of every
instantiation, as rows of the compile gate's table.
"""

import re
import time
from collections.abc import Sequence

from impl.checks import Unsupported
from impl.configs import SHARED_LIMIT_KIB
from impl.fused_store import LANES, SMALL_LANES
from impl.store_compile import ELEMENTS, Variant, compile_variants, kept, missing, nvrtc_version
from impl.store_modes import MODES
from parity.build.rows import QUICK, UNKNOWN, Row, store_row

FIGURES = ("registers", "spill_stores", "spill_loads", "shared")
SHORT = {"float32": "f32", "bfloat16": "b16"}
_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_SHARED = re.compile(r"(\d+) bytes smem")


def variants() -> tuple[Variant, ...]:
    """Every instantiation that a call can launch."""
    return tuple(
        Variant(mode, pooled, weight, lanes)
        for lanes in (LANES, SMALL_LANES)
        for mode in MODES
        for pooled in ELEMENTS
        for weight in ELEMENTS
    )


def store_rows(arches: Sequence[int], *, use_cache: bool = True, quick: bool = False) -> list[Row]:
    """One row per instantiation and architecture (compute capability, such as 90).

    Status is `passed`; `failed` (does not compile, spills, uses a stack frame, or more shared memory than the
    architecture has); `unsupported` for an architecture that is not known; `not run` where the compiler is not
    installed, or with `quick`, which compiles for sm_120 only, what is not kept.
    """
    rows: list[Row] = []
    for arch in arches:
        if arch not in SHARED_LIMIT_KIB:
            rows.append(_whole(arch, "unsupported", f"no shared-memory limit is known for sm_{arch}"))
        elif reason := missing():
            rows.append(_whole(arch, "not run", reason))
        elif quick and arch != QUICK and kept(variants(), f"sm_{arch}") is None:
            rows.append(_whole(arch, "not run", UNKNOWN))
        else:
            rows += _compiled(arch, use_cache)
    return rows


def _whole(arch: int, status: str, reason: str) -> Row:
    """The row that stands for all instantiations."""
    return store_row(arch, "", "store", status, reason)


def _compiled(arch: int, use_cache: bool) -> list[Row]:
    started = time.perf_counter()
    wanted = variants()
    cached = use_cache and kept(wanted, f"sm_{arch}") is not None
    try:
        made = compile_variants(wanted, f"sm_{arch}", use_cache=use_cache)
    except Unsupported as error:
        return [_whole(arch, "failed", str(error))]
    found = parse_log(made.log)
    limit = SHARED_LIMIT_KIB[arch] * 1024
    about = {"compiler": f"nvrtc {nvrtc_version()}", "shared_limit": limit, "cached": cached}
    rows = []
    for variant in wanted:
        used = found.get(made.symbols[variant.expression])
        reason = ""
        if used is None:
            reason = "ptxas's log does not name this kernel"
        elif used["spill_stores"] or used["spill_loads"] or used["stack"]:
            reason = f"spills, or a stack frame of {used['stack']} bytes"
        elif used["shared"] > limit:
            reason = f"{used['shared']} bytes of shared memory, sm_{arch} has {limit}"
        figures = {key: used[key] for key in FIGURES} if used else {}
        name = variant.mode.name.removeprefix("store_")
        config = f"{name} {SHORT[variant.pooled]}/{SHORT[variant.weight]} x{variant.lanes}"
        status = "failed" if reason else "passed"
        rows.append(store_row(arch, config, variant.mode.layout, status, reason, **about, **figures))
    rows[0]["seconds"] = round(time.perf_counter() - started, 2)
    return rows


def parse_log(log: str) -> dict[str, dict[str, int]]:
    """Resources by mangled name, from ptxas's verbose log: registers, stack, spill_stores, spill_loads, shared."""
    found: dict[str, dict[str, int]] = {}
    name = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match[1]
            found[name] = {}
        elif name and (match := _SPILLS.search(line)):
            found[name] |= dict(zip(("stack", "spill_stores", "spill_loads"), map(int, match.groups()), strict=True))
        elif name and (match := _USED.search(line)):
            shared = _SHARED.search(match[2])
            found[name] |= {"registers": int(match[1]), "shared": int(shared[1]) if shared else 0}
    return {name: used for name, used in found.items() if {"registers", "stack"} <= set(used)}

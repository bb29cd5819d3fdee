"""Rows of the compile gate, one per kernel and architecture, and their tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

Row = dict[str, Any]
# What a quick run compiles if it has to; it takes the other architectures from the cache.
QUICK = 120
UNKNOWN = "not compiled here yet: `parity compile` does"
STATUSES = ("passed", "failed", "unsupported", "not run")


def kernel_row(arch: int, kernel: str, layout: str, status: str, reason: str = "", **more: Any) -> Row:
    """A row of a Triton kernel: compute capability, kernel (empty: all of the layout), status and its reason.

    implementation, op    whose kernel it is, as a gate's report names it
    config, heads         the configuration
    shown                 names under which the matrix shows it
    registers, spill_stores, spill_loads, shared, shared_limit (bytes), instruction, head_order, compiler, seconds,
    cached                what compiling it gave
    """
    shown = [f"{name} {layout}" for name in ([kernel] if kernel else ["decode", "prefill"])]
    about = {"arch": arch, "kernel": kernel, "layout": layout, "implementation": f"triton-{layout}"}
    return about | {"op": "paged_logits", "shown": shown} | more | {"status": status, "reason": reason}


def store_row(arch: int, config: str, layout: str, status: str, reason: str = "", **more: Any) -> Row:
    """The same of the store; its configurations begin with the mode's name (none: all instantiations)."""
    mode = config.partition(" ")[0]
    name = f"store-{mode}".replace("_", "-").rstrip("-")
    about = {"arch": arch, "kernel": "store", "layout": layout, "implementation": name, "op": "store"}
    about |= {"config": config or "fused store", "shown": [f"store {mode}".rstrip()]}
    return about | more | {"status": status, "reason": reason}


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text, one line per configuration."""
    names = [str(row.get("config", row["layout"])) for row in rows]
    wide = max([len(name) for name in names] + [13]) + 2
    code = max([len(row.get("instruction", "")) for row in rows] + [11]) + 2
    head = f"{'arch':<8}{'configuration':<{wide}}{'regs':>5}{'spill':>7}{'shared KiB':>12}{'limit':>7}"
    lines = [f"{head}  {'instruction':<{code}}status"]
    for row, name in zip(rows, names, strict=True):
        regs, limit = row.get("registers", ""), row.get("shared_limit", 0) // 1024
        spill = row["spill_stores"] + row["spill_loads"] if "spill_stores" in row else ""
        shared = f"{row['shared'] / 1024:.1f}" if "shared" in row else ""
        status = row["status"] + (f": {row['reason']}" if row.get("reason") else "")
        numbers = f"{regs:>5}{spill:>7}{shared:>12}{limit or '':>7}"
        lines.append(f"sm_{row['arch']:<5}{name:<{wide}}{numbers}  {row.get('instruction', ''):<{code}}{status}")
    return "\n".join(lines)


def matrix(rows: Iterable[Row]) -> str:
    """Kernels down, architectures across, the worst status of each: the table at a glance."""
    order = ("failed", "not run", "unsupported", "passed")
    cells: dict[str, dict[int, str]] = {}
    arches: dict[int, None] = {}
    for row in rows:
        arches[row["arch"]] = None
        for name in row["shown"]:
            line = cells.setdefault(name, {})
            line[row["arch"]] = min(line.get(row["arch"], "passed"), row["status"], key=order.index)
    wide = max([len(name) for name in cells] + [6]) + 2
    lines = [f"{'kernel':<{wide}}" + "".join(f"{f'sm_{arch}':<13}" for arch in arches)]
    for name, line in cells.items():
        lines.append(f"{name:<{wide}}" + "".join(f"{line.get(arch, '-'):<13}" for arch in arches))
    return "\n".join(line.rstrip() for line in lines)

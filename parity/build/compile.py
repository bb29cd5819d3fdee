"""`parity compile`: every launch configuration of the Triton kernels and every instantiation of the store, compiled for
each architecture without a GPU: registers, spills, shared memory against the architecture's limit, matrix instruction,
the order of the head sum, and what a golden of the same compiler says.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from parity import results
from parity.build import compile_kernels, compile_store, golden
from parity.build.rows import STATUSES, Row
from parity.command import refuse_in_ci
from parity.golden import stored
from parity.vocabulary import SEVERITY, Status

ARCHES = (80, 90, 100, 120, 121)


def compile_all(arches: Sequence[int] = ARCHES, *, use_cache: bool = True, quick: bool = False) -> list[Row]:
    """The rows of all kernels on these architectures (compute capability, such as 90).

    quick: compile for sm_120 only, take the other architectures from the cache.
    """
    with ThreadPoolExecutor(1) as pool:  # while Triton's processes work, NVRTC does, in this one
        stores = pool.submit(compile_store.store_rows, arches, use_cache=use_cache, quick=quick)
        return compile_kernels.kernel_rows(arches, use_cache=use_cache, quick=quick) + stores.result()


def report(
    arches: Sequence[int] = ARCHES,
    *,
    use_cache: bool = True,
    quick: bool = False,
    fixtures: str | None = None,
    accept: bool = False,
) -> dict[str, Any]:
    """Compile, and judge by the goldens or, with `accept`, replace them: {rows, counts by status, notes}, JSON types.

    CommandError where nothing is accepted (see `golden.accept`)."""
    if accept:
        refuse_in_ci("parity compile --accept")
    folder = stored.locate(golden.FOLDER, fixtures)
    rows = compile_all(arches, use_cache=use_cache, quick=quick)
    notes = golden.accept(rows, folder) if accept else golden.judge(rows, folder)
    return {"rows": rows, "counts": {s: sum(row["status"] == s for row in rows) for s in STATUSES}, "notes": notes}


def _make(folder: Path) -> Iterator[tuple[str, bytes]]:
    return golden.files_of(compile_all(), folder)


TRUTH = stored.Truth("compile", golden.FOLDER, _make)


def rows_of_gate(quick: bool, fixtures: str | None) -> tuple[list[results.Row], list[str]]:
    """Everything compiled, as rows of a gate's report, and notes. A job of the gate's."""
    found = report(quick=quick, fixtures=fixtures)
    return added_up(found["rows"]), found["notes"]


def added_up(rows: Sequence[Row]) -> list[results.Row]:
    """The worst configuration stands for its implementation and architecture."""
    grouped: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        grouped.setdefault((row["implementation"], row["arch"]), []).append(row)
    found = []
    for (name, arch), group in grouped.items():
        worst = min(group, key=lambda row: SEVERITY.index(row["status"]))
        passed = worst["status"] == Status.PASSED
        found.append(
            results.Row(
                name,
                "resources",
                f"compile sm_{arch}",
                Status(worst["status"]),
                examples=sum(row["status"] in (Status.PASSED, Status.FAILED) for row in group),
                op=worst["op"],
                layout=worst["layout"],
                message="" if passed else f"{worst.get('config') or ''}: {worst['reason']}".removeprefix(": "),
                repro=f"parity compile --arch {arch}",
                arch=f"sm_{arch}",
            )
        )
    return found

"""`parity compile`: every launch configuration of the Triton kernels and every instantiation of the store, compiled for
each architecture without a GPU: registers, spills, shared memory against the architecture's limit, matrix instruction,
the order of the head sum, and what a golden of the same compiler says.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from impl import configs
from parity.build import compile_kernels, compile_store, golden
from parity.build.rows import QUICK, STATUSES, Row, matrix, table
from parity.command import CommandError, check_writable, refuse_in_ci, write_json
from parity.golden import stored

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


def architecture(text: str) -> int:
    """Compute capability of `sm_90` or `90`."""
    found = int(text.removeprefix("sm_"))
    if found not in configs.SHARED_LIMIT_KIB:
        known = ", ".join(f"sm_{arch}" for arch in sorted(configs.SHARED_LIMIT_KIB))
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text}")
    return found


architecture.__name__ = "architecture"  # argparse names the type in its messages


def main(words: Sequence[str]) -> int:
    """``parity compile [--json FILE] [--arch SM ...] [--quick] [--no-cache] [--fixtures DIR] [--accept]``.

    Exit code 0: every configuration compiles within the limits and as its golden says; 1: one does not; 2: nothing
    could be compiled."""
    parser = argparse.ArgumentParser(
        prog="parity compile", description="Compile every kernel for every architecture, no GPU needed."
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--arch", action="append", type=architecture, metavar="SM",
        help=f"sm_90 or 90 (repeatable; default {' '.join(f'sm_{arch}' for arch in ARCHES)})",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help=f"compile for sm_{QUICK}, take the rest from the cache")
    parser.add_argument("--no-cache", action="store_true", help="compile again what is known")
    parser.add_argument("--fixtures", metavar="DIR", help="the folder `fixtures` (default: the checkout's)")
    parser.add_argument("--accept", action="store_true", help="write the goldens of these compilers, to be reviewed")
    options = parser.parse_args(words)
    check_writable(options.json)
    arches = list(dict.fromkeys(options.arch or ARCHES))
    how = {"use_cache": not options.no_cache, "quick": options.quick, "fixtures": options.fixtures}
    found = report(arches, **how, accept=options.accept)
    counts = found["counts"]
    print(table(found["rows"]))
    print("\n" + matrix(found["rows"]) + "\n")
    print("\n".join(found["notes"]))
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    write_json(options.json, found)
    if not counts["passed"] and not counts["failed"]:
        raise CommandError("nothing could be compiled here")
    return 1 if counts["failed"] else 0

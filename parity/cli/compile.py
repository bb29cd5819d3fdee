"""`parity compile`: every kernel for every architecture, no GPU needed."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import CommandError, write_json
from parity.vocabulary import FAILED, PASSED


def architecture(text: str) -> int:
    """Compute capability of `sm_90` or `90`."""
    from impl.configs import SHARED_LIMIT_KIB

    found = int(text.removeprefix("sm_"))
    if found not in SHARED_LIMIT_KIB:
        known = ", ".join(f"sm_{arch}" for arch in sorted(SHARED_LIMIT_KIB))
        raise argparse.ArgumentTypeError(f"must be one of {known}, got {text}")
    return found


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arch", action="append", type=architecture, metavar="SM", help="sm_90 or 90 (repeatable; default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="compile for sm_120, take the rest from the cache")
    parser.add_argument("--no-cache", action="store_true", help="compile again what is known")
    parser.add_argument("--accept", action="store_true", help="write the goldens of these compilers, to be reviewed")
    shared.add_fixtures(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.build import compile, rows

    found = compile.report(
        list(dict.fromkeys(options.arch or compile.ARCHES)),
        use_cache=not options.no_cache,
        quick=options.quick,
        fixtures=options.fixtures,
        accept=options.accept,
    )
    print(f"{rows.table(found['rows'])}\n\n{rows.matrix(found['rows'])}\n")
    print("\n".join(found["notes"]))
    counts = found["counts"]
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    write_json(options.json, found)
    if not counts["passed"] and not counts["failed"]:
        raise CommandError("nothing could be compiled here")
    return FAILED if counts["failed"] else PASSED

"""The command line: one module per command, each with `add` (its options) and `run` (parse, call, print).

Parsing answers without torch: what a command needs it imports when it runs. Every error of usage or environment is one
sentence on stderr with exit code 2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType, ModuleType

from parity.cli.options import EXITS, Parser
from parity.command import CommandError, Terminated, check_writable
from parity.run.frames import roomy
from parity.run.processes import claim_packages
from parity.vocabulary import USAGE, TooLarge

COMMANDS = {
    "list": "operations, implementations, levels, checks, profiles and data classes",
    "run": "repeat one case on one implementation through every check that applies",
    "gate": "the pre-merge check: the whole suite and the goldens, one table, one verdict",
    "golden": "verify or renew the golden tensors",
    "recorded": "replay tensors recorded from DeepSeek's code through the reference",
    "merge": "add up the JSON files of several gate runs",
    "probe": "find the arithmetic of this GPU's matrix units",
    "compile": "compile every kernel for every architecture and check its resources",
    "bench": "time the kernels against the GPU's own ceilings",
    "mutants": "the suite's power: every fault model must be rejected",
    "diagnose": "which fault explains a failing function, case or capture",
    "explain": "measure which choice of arithmetic costs the recall",
    "sweep": "curves of recall or of memory against context length",
    "story": "the memory incident step by step, each step asserted",
    "report": "one self-contained HTML page from the JSON of the other commands",
}
PACKAGES = ("parity", "impl", "reference")


def module_of(command: str) -> ModuleType:
    return importlib.import_module(f"parity.cli.{command}")


def build_parser() -> Parser:
    parser = Parser(
        prog="parity", description="Numerical parity tests for DeepSeek-V4's sparse-attention indexer.", epilog=EXITS
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        sub = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", epilog=EXITS)
        module_of(name).add(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code. Errors of usage and environment end here as one sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    prog = f"parity {words[0]}" if words else "parity"
    claim_packages()
    try:
        with _termination():
            return dispatch(words)
    except (CommandError, TooLarge) as error:
        print(f"{prog}: {error}", file=sys.stderr)
    except KeyboardInterrupt as end:
        print(f"{prog}: {str(end) or 'interrupted'}", file=sys.stderr)
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name in PACKAGES:
            raise
        print(f"{prog}: needs the package {name}, which is not installed here: pip install {name}", file=sys.stderr)
    except BrokenPipeError:
        # The reader of our output has gone (`parity list | head`); Python would complain again at exit.
        sys.stdout = None  # type: ignore[assignment]
    return USAGE


@contextlib.contextmanager
def _termination() -> Iterator[None]:
    """SIGTERM as an exception, so that what is open is closed: processes end, temporary folders are removed."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise Terminated("terminated")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@roomy
def dispatch(words: Sequence[str]) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(words)
    if options.version:
        print(version())
        return 0
    if options.command is None:
        parser.print_help()
        return USAGE
    if rest:
        raise CommandError(f"unknown argument {rest[0]!r} (see parity {options.command} --help)")
    check_writable(*(getattr(options, name, None) for name in ("json", "junit", "markdown", "output")))
    return run(options)


def run(options: argparse.Namespace) -> int:
    """The command that was parsed."""
    return int(module_of(options.command).run(options))


def version() -> str:
    from importlib import metadata

    try:
        return f"indexer-parity {metadata.version('indexer-parity')}"
    except metadata.PackageNotFoundError:
        return "indexer-parity (a checkout that is not installed)"

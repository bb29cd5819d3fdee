"""The command line: options, and for each subcommand the module that does the work.

Thin on purpose: parsing answers without torch, a handler imports what it needs, and every error of usage or
environment is one sentence on stderr with exit code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from parity.command import USAGE, CommandError, check_writable, read_json, write_json
from parity.run.frames import roomy

PROFILES = ("smoke", "ci", "nightly", "debug")
STAGES = ("logits", "topk", "store", "compressor")
LAYOUTS = ("bf16", "fp8", "fp4")
TRUTHS = ("golden", "predicted", "digests", "floors", "compile")
LEVELS = ("layout", "rounding", "bits", "selection", "invariance", "semantics", "resources")
# Commands whose modules own their options: module, function, help.
DELEGATED = {
    "probe": ("parity.tensorcore.probe", "main", "find the arithmetic of this card's matrix units"),
    "compile": ("parity.build.compile", "main", "compile every kernel for every architecture and check its resources"),
    "bench": ("parity.bench.report", "main", "time the kernels against the card's own ceilings"),
    "mutants": ("parity.faults.mutants", "main", "the suite's power: every fault model must be rejected"),
    "diagnose": ("parity.faults.diagnose", "main", "which fault explains a failing function, case or capture"),
    "explain": ("parity.explain.command", "explain_main", "measure which choice of arithmetic costs the recall"),
    "sweep": ("parity.explain.command", "sweep_main", "curves of recall or of memory against context length"),
    "story": ("parity.explain.command", "story_main", "the memory incident step by step, each step asserted"),
    "report": ("parity.report.command", "main", "one self-contained HTML page from the JSON of the other commands"),
}
EXITS = "exit codes: 0 passed, 1 parity failed, 2 usage, environment, or nothing judged"


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake costs one sentence and not a page of usage, and options cannot be abbreviated."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | named)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


def positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be 0 or more, got {text}")
    return value


positive.__name__, count.__name__ = "number", "whole number"  # argparse names the type in its messages


def implementation_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is judged")
    group.add_argument(
        "--impl",
        metavar="NAME|MODULE:FUNCTION",
        help="a built-in name (parity list), module:function or path/to/file.py:function; only this one is judged",
    )
    group.add_argument("--layout", choices=LAYOUTS, help="page layout that a function of your own reads")
    group.add_argument("--stage", choices=STAGES, help="what a function of your own computes (default: logits)")
    group.add_argument("--contract", metavar="FILE", help="TOML file of what it promises (docs/concepts.md)")


def device_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    group.add_argument("--require-device", choices=("cpu", "cuda"), help="exit 2 where this device is missing")


def profile_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how much")
    group.add_argument("--profile", choices=PROFILES, default="ci", help="default: %(default)s")
    group.add_argument("--seed", type=count, help="draw other cases, the same for the same seed")
    group.add_argument("--examples", type=count, metavar="N", help="for each implementation and level")
    group.add_argument("--seconds", type=positive, help="draw until this time is used up, or until --examples are had")


def arithmetic_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arithmetic",
        choices=("auto", "bound"),
        default="auto",
        help="auto: dots are exact where the card confirms a model of them; bound: the proved bound alone",
    )


def json_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON too")


def build_parser() -> Parser:
    parser = Parser(
        prog="parity", description="Numerical parity tests for DeepSeek-V4's sparse-attention indexer.", epilog=EXITS
    )
    parser.add_argument("--version", action="store_true", help="print the version and end")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, text: str) -> Parser:
        found = commands.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", epilog=EXITS)
        assert isinstance(found, Parser)
        return found

    sub = command("list", "implementations, levels, checks, profiles and data classes")
    device_options(sub)
    json_option(sub)

    sub = command("run", "repeat one case on one implementation through every check that applies")
    sub.add_argument("--case", required=True, metavar="STRING", help="a problem string, as failures print it")
    sub.add_argument("--check", metavar="LEVEL/NAME", action="append", default=[], help="only this one (repeatable)")
    implementation_options(sub)
    arithmetic_option(sub)
    device_options(sub)
    json_option(sub)

    sub = command("gate", "the pre-merge check: the whole suite and the goldens, one table, one verdict")
    implementation_options(sub)
    arithmetic_option(sub)
    device_options(sub)
    profile_options(sub)
    sub.add_argument("--level", choices=LEVELS, action="append", default=[], help="only this level (repeatable)")
    sub.add_argument(
        "--workers", type=count, metavar="N", help="processes (default: 2 on a CPU; on a card one for 16 GB, at most 8)"
    )
    sub.add_argument("--no-golden", action="store_true", help="leave the goldens out")
    sub.add_argument("--no-faults", action="store_true", help="leave fault models and the diagnosis out")
    sub.add_argument("--no-compile", action="store_true", help="leave the compile gate out (as smoke does)")
    sub.add_argument("--fixtures", metavar="DIR", help="the folder `fixtures` (default: the checkout's, or ./fixtures)")
    json_option(sub)
    sub.add_argument("--junit", metavar="FILE", help="write JUnit XML")
    sub.add_argument("--markdown", metavar="FILE", help="write a Markdown summary (in a GitHub job also its summary)")

    golden_command(command("golden", "verify or renew the golden tensors"))

    sub = command("recorded", "replay tensors recorded from DeepSeek's code through the reference")
    sub.add_argument("folder", metavar="DIR", help="a folder with index.json and its safetensors files")
    json_option(sub)

    sub = command("merge", "add up the JSON files of several gate runs")
    sub.add_argument("files", nargs="+", metavar="FILE", help="files that `parity gate --json` wrote")
    json_option(sub)
    sub.add_argument("--markdown", metavar="FILE", help="write a Markdown summary")

    for name, (_, _, text) in DELEGATED.items():
        # Their modules own their options: they are parsed there.
        commands.add_parser(name, help=text, add_help=False)
    return parser


def golden_command(sub: argparse.ArgumentParser) -> None:
    actions = sub.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    texts = {
        "verify": "check every golden's file and case, and judge the implementations against it",
        "regenerate": "leave pending files of these stored truths and exit 1: look at them, then accept",
        "diff": "what the pending files would change, in numbers; exits 1 if anything is pending",
        "accept": "put the pending files in place",
    }
    for name, text in texts.items():
        action = actions.add_parser(name, help=text, description=text[:1].upper() + text[1:] + ".", epilog=EXITS)
        action.add_argument("--fixtures", metavar="DIR", help="the folder `fixtures` (default: see docs/goldens.md)")
        json_option(action)
        if name == "regenerate":
            action.add_argument("names", nargs="*", metavar="WHAT", help=f"{', '.join(TRUTHS)} (default: golden)")
        if name == "verify":
            action.add_argument("names", nargs="*", metavar="NAME", help="only these goldens")
            action.add_argument("--quiet", action="store_true", help="no table")
            implementation_options(action)
            device_options(action)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse and run; the exit code. Errors of usage and environment end here as one sentence."""
    words = list(sys.argv[1:] if argv is None else argv)
    prog = f"parity {words[0]}" if words else "parity"
    try:
        return dispatch(words)
    except CommandError as error:
        print(f"{prog}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
    except BrokenPipeError:
        # The reader of our output has gone (`parity list | head`); Python would complain again at exit.
        sys.stdout = None  # type: ignore[assignment]
    return USAGE


@roomy
def dispatch(words: list[str]) -> int:
    parser = build_parser()
    options, rest = parser.parse_known_args(words)
    if options.version:
        print(version())
        return 0
    if options.command is None:
        parser.print_help()
        return USAGE
    if options.command in DELEGATED:
        return delegated(options.command, words[words.index(options.command) + 1 :])
    if rest:
        raise CommandError(f"unknown argument {rest[0]!r} (see parity {options.command} --help)")
    check_writable(getattr(options, "json", None))
    handler: Any = HANDLERS[options.command]
    return handler(options)


def version() -> str:
    from importlib import metadata

    try:
        return f"indexer-parity {metadata.version('indexer-parity')}"
    except metadata.PackageNotFoundError:
        return "indexer-parity (a checkout that is not installed)"


def delegated(name: str, words: list[str]) -> int:
    """A command whose module parses its own options, by a function (words) -> exit code."""
    import importlib

    module, function, _ = DELEGATED[name]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise CommandError("not part of this version") from error
    return int(getattr(found, function)(words))


def run_gate(options: argparse.Namespace) -> int:
    from parity.gate import gate

    named = {name: getattr(options, name) for name in gate.Options.__dataclass_fields__ if hasattr(options, name)}
    named |= {"level": tuple(options.level), "golden": not options.no_golden, "compile": not options.no_compile}
    named["faults"] = not options.no_faults
    return gate.gate(gate.Options(**named))


def run_merge(options: argparse.Namespace) -> int:
    from parity.command import write_text
    from parity.gate import summary

    check_writable(options.markdown)
    report = summary.merge([read_json(file) for file in options.files], options.files)
    write_json(options.json, report)
    if options.markdown:
        write_text(options.markdown, summary.markdown(report))
    print(summary.table(report["rows"]))
    for row in summary.complaints(report["rows"]):
        print(f"\n{summary.complaint(row)}")
    print(f"\n{report['sentence']}")
    return int(report["exit"])


def run_list(options: argparse.Namespace) -> int:
    from parity.cli import commands

    return commands.show_list(options)


def run_case(options: argparse.Namespace) -> int:
    from parity.cli import commands

    return commands.run_case(options)


def run_golden(options: argparse.Namespace) -> int:
    from parity.cli import commands

    return commands.golden(options)


def run_recorded(options: argparse.Namespace) -> int:
    from parity.cli import commands

    return commands.recorded(options)


HANDLERS = {
    "list": run_list,
    "run": run_case,
    "gate": run_gate,
    "golden": run_golden,
    "recorded": run_recorded,
    "merge": run_merge,
}

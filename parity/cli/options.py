"""The options that commands share: how they are parsed, and what they stand for. Parsing needs no torch."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any, NoReturn

from parity.command import CommandError, blame
from parity.vocabulary import ARITHMETIC, DEVICES, PROFILES, USAGE

if TYPE_CHECKING:
    import torch

    from parity.run.implementation import Implementation

EXITS = "exit codes: 0 passed, 1 parity failed, 2 usage, environment, or nothing judged"


class Parser(argparse.ArgumentParser):
    """argparse, but a mistake costs one sentence and not a page of usage, and options cannot be abbreviated."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**{"allow_abbrev": False} | named)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {message} (see {self.prog} --help)\n")


# --------------------------------------------------------------------------------------------------------------- types


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


def one_or_more(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return value


def workers(text: str) -> int:
    value, most = one_or_more(text), max(8, 4 * (os.cpu_count() or 1))
    if value > most:
        raise argparse.ArgumentTypeError(f"must be at most {most} here, four per core, got {text}")
    return value


# argparse names the type in its messages.
positive.__name__, count.__name__, one_or_more.__name__, workers.__name__ = ("number", *["whole number"] * 3)


# ------------------------------------------------------------------------------------------------------------- options


def add_implementation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is judged")
    group.add_argument(
        "--impl",
        metavar="NAME|MODULE:FUNCTION",
        help="a built-in name (parity list), module:function or path/to/file.py:function; only this one is judged",
    )
    group.add_argument("--layout", metavar="NAME", help="page layout of a function of your own (parity list)")
    group.add_argument("--op", metavar="NAME", help="what a function of your own computes (default: paged_logits)")
    group.add_argument("--contract", metavar="FILE", help="TOML file of what it promises (docs/concepts.md)")


def add_device(parser: argparse.ArgumentParser, default: str = "auto") -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--device", choices=DEVICES, default=default, help="default: %(default)s")
    group.add_argument("--require-device", choices=DEVICES[1:], help="exit 2 where this device is missing")


def add_amount(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how much")
    group.add_argument("--profile", choices=tuple(PROFILES), default="ci", help="default: %(default)s")
    group.add_argument("--seed", type=count, help="draw other cases, the same for the same seed")
    group.add_argument("--examples", type=one_or_more, metavar="N", help="for each implementation and level")
    group.add_argument("--seconds", type=positive, help="draw until this time is used up, or until --examples are had")


def add_workers(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--workers", type=workers, metavar="N", help=f"processes (default: {default})")


def add_arithmetic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arithmetic",
        choices=ARITHMETIC,
        default="auto",
        help="auto: dots are exact where the GPU confirms a model of them; bound: by the proved bound only",
    )


def add_fixtures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fixtures", metavar="DIR", help="the folder `fixtures` (default: the checkout's)")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON too")


def add_markdown(parser: argparse.ArgumentParser, what: str = "a Markdown summary") -> None:
    parser.add_argument("--markdown", metavar="FILE", help=f"write {what}")


# ------------------------------------------------------------------------------------------------- what they stand for


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that was chosen, with Triton's interpreter decided before anything imports triton."""
    from parity.run import device, interpreter

    required = options.require_device
    with blame("--require-device" if required else "--device"):
        found = device.choose(options.device, required)
    interpreter.prepare(found.type)
    return found


def implementation_of(options: argparse.Namespace, device: torch.device, case: Any = None) -> Implementation:
    """The one that `--impl` names; of a function of one's own a case says what else was left out."""
    from parity.run import operation
    from parity.run.registry import load

    op, layout = options.op, options.layout
    if case is not None and ":" in options.impl:
        op = op or case.op
        if layout is None and not options.contract and operation.find(case.op).layouts:
            layout = case.layout
    with blame(f"--impl {options.impl}"):
        impl = load(options.impl, layout, op, options.contract, device)
    if case is not None:
        require_match(case, impl)
    return impl


def require_match(case: Any, impl: Implementation) -> None:
    """CommandError where the case cannot be this implementation's."""
    if impl.absent:
        raise CommandError(f"--impl {impl.name}: not run: {impl.absent}")
    if case.op != impl.op:
        raise CommandError(f"--case is of {case.op}, {impl.name} is a function of {impl.op}")
    if impl.layout and case.layout != impl.layout:
        raise CommandError(f"--case has {case.layout} pages, {impl.name} {impl.operation.verb} {impl.layout}")


def case_of(text: str) -> Any:
    """The case of a problem string."""
    from parity.run.operation import parse_case

    with blame("--case"):
        return parse_case(text)

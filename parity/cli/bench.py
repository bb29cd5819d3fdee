"""`parity bench`: kernels timed against the ceilings of the GPU that they run on."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import CommandError, write_json

PARTS = ("decode", "prefill", "speculate", "single", "memory", "selection", "store")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="part of the benchmark (repeatable)")
    parser.add_argument(
        "--rounds",
        type=shared.one_or_more,
        metavar="N",
        help="rounds to take medians over (default 9, store 60)",
    )
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    import torch

    from parity.run import device, interpreter

    if not torch.cuda.is_available():
        raise CommandError("there is no CUDA device to time")
    interpreter.prepare("cuda")
    if interpreter.interpreting():
        raise CommandError("TRITON_INTERPRET is set: interpreted kernels are not timed; unset it")
    from parity.bench import report

    found = report.report(device.resolve("cuda"), options.only, options.rounds)
    write_json(options.json, found)
    return int(found["exit"])

"""`parity bench`: kernels timed against the ceilings of the GPU that they run on."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import CommandError, write_json
from parity.vocabulary import FAILED, PASSED

PARTS = ("decode", "prefill", "speculate", "single", "memory", "selection")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", action="append", choices=PARTS, default=[], help="part of the benchmark (repeatable)")
    parser.add_argument("--store", action="store_true", help="time the fused store instead")
    parser.add_argument(
        "--lanes", type=int, choices=(8, 16, 32), action="append", default=[], help="of --store, to tune (repeatable)"
    )
    parser.add_argument(
        "--rounds", type=shared.one_or_more, metavar="N", help="rounds to take medians over (default 9, --store 60)"
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
    if options.store:
        from parity.bench import store

        found = store.run(options.rounds or 60, options.lanes)
        code = PASSED if found["passed"] else FAILED
    else:
        from parity.bench import logits

        found = logits.report(device.resolve("cuda"), options.only, options.rounds or 9, print)
        code = int(found["exit"])
    write_json(options.json, found)
    return code

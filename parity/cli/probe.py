"""`parity probe`: how a GPU's matrix units round."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import CommandError, write_json

OPERANDS = ("bf16", "e4m3", "fp16", "tf32")


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--operand", action="append", choices=OPERANDS, help="operand types to probe (repeatable; default all)"
    )
    shared.add_device(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.run import interpreter
    from parity.tensorcore import probe

    device = shared.device_of(options)
    if device.type != "cuda":
        raise CommandError("there is no CUDA device here to probe")
    if interpreter.interpreting():
        raise CommandError("TRITON_INTERPRET is set: the interpreter's dots say nothing about the GPU; unset it")
    found = probe.report(device, options.operand or OPERANDS)
    print(f"{found['seconds']:.1f} s; " + ("every dot is accounted for" if not found["exit"] else "see above"))
    write_json(options.json, found)
    return int(found["exit"])

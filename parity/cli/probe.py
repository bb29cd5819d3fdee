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
    parser.add_argument("--deepgemm", action="store_true", help="probe the fp8 kernel of the package deep_gemm instead")
    parser.add_argument(
        "--sharpness", action="store_true", help="what a verified model is worth: resolution, faults that it sees"
    )
    shared.add_device(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.run import interpreter

    device = shared.device_of(options)
    if options.sharpness:
        from parity.tensorcore import sharpness

        found = sharpness.report(device, requests=16 if device.type == "cuda" else 2)
    elif device.type != "cuda":
        raise CommandError("there is no CUDA device to ask; only simulated cards can be probed here")
    elif interpreter.interpreting():
        raise CommandError("TRITON_INTERPRET is set: the interpreter's dots say nothing about the GPU; unset it")
    elif options.deepgemm:
        from parity.tensorcore import probe_deepgemm

        found = probe_deepgemm.probe_package(device)
    else:
        from parity.tensorcore import probe

        found = probe.report(device, options.operand or OPERANDS)
        print(f"{found['seconds']:.1f} s; " + ("every dot is accounted for" if not found["exit"] else "see above"))
    write_json(options.json, found)
    return int(found["exit"])

"""`parity diagnose`: which fault explains a failure."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import CommandError, blame, say, write_json
from parity.vocabulary import FAILED, PASSED


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "exit codes: 0 an explanation was found, 1 nothing explains it, 2 usage, or nothing is wrong"
    shared.add_implementation(parser)
    parser.add_argument("--case", metavar="STRING", help="the case on which it fails (default: one is looked for)")
    parser.add_argument("--capture", metavar="FILE", help="a captured call instead (docs/faults.md)")
    shared.add_device(parser, default="cpu")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    import torch

    from parity.faults import building, diagnose
    from parity.run.worker import opened

    if bool(options.impl) == bool(options.capture):
        raise CommandError("say either --impl (with --case, if one is known) or --capture FILE")
    torch.set_num_threads(1)
    if options.capture:
        with blame("--capture"):
            found = diagnose.of_capture(options.capture)
    else:
        case = shared.case_of(options.case) if options.case else None
        device = shared.device_of(options)
        impl = shared.implementation_of(options, device, case)
        with blame(f"--impl {impl.name}"):
            building.diagnosis_of(impl.op)
        with opened(impl, device) as runner:
            case = case or diagnose.failing_case(runner)
            if case is None:
                raise CommandError(f"--impl {impl.name}: no check rejects it, so there is nothing to explain")
            say(f"parity diagnose: {impl.name} on {case}")
            found = diagnose.of_runner(runner, case)
    print("\n".join(diagnose.lines(found)))
    write_json(options.json, diagnose.as_json(found))
    return PASSED if found.explained or found.explained_by_pair else FAILED

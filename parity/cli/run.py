"""`parity run`: one case, one implementation, every check that applies."""

from __future__ import annotations

import argparse

from parity.cli import options as shared
from parity.command import CommandError, blame, say, write_json
from parity.results import RUN, Report, Row
from parity.tables import number
from parity.vocabulary import Status


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", required=True, metavar="STRING", help="a problem string, as failures print it")
    parser.add_argument("--check", metavar="LEVEL/NAME", action="append", default=[], help="only this one (repeatable)")
    shared.add_implementation(parser)
    shared.add_arithmetic(parser)
    shared.add_device(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.ops.check import checks_of, find_check, judge_one
    from parity.run.device import architecture, provenance
    from parity.run.worker import opened
    from parity.tensorcore.verification import verify_models, with_verified_dot

    case = shared.case_of(options.case)
    if not options.impl:
        raise CommandError("--impl is missing: whose result is to be judged? (parity list)")
    device = shared.device_of(options)
    impl = shared.implementation_of(options, device, case)
    # Judged as the suite judges it: by the GPU's own arithmetic where that is verified.
    examined = verify_models(device, [impl], options.arithmetic)
    impl = with_verified_dot(impl, examined, architecture(device))
    for line in examined.lines():
        say(line)
    with blame("--check"):
        wanted = [find_check(name, impl.operation) for name in options.check] or checks_of(impl.operation)
    rows = []
    with opened(impl, device) as runner:
        for check in wanted:
            verdict = judge_one(check, runner, case)
            if verdict is not None:
                named = {"level": check.level, "check": check.name, "examples": int(verdict.status.judged)}
                rows.append(Row.of(verdict, impl.name, op=impl.op, layout=impl.layout or None, **named))
                print(line_of(rows[-1]), flush=True)
    report = Report(tuple(rows), RUN, {"case": str(case), "provenance": provenance(device)})
    print(f"\n{report.sentence}")
    write_json(options.json, report.to_json())
    return report.exit


def line_of(row: Row) -> str:
    """`passed  layout/exact   error/bound 0.001` or what is wrong."""
    head = f"{row.status:<12}{row.level}/{row.check}"
    if row.status is Status.PASSED:
        return f"{head:<44}error/bound {number(row.ratio)}"
    return f"{head}\n    {row.text or 'no reason given'}"

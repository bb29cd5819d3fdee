"""`parity golden`: verify, regenerate, diff, accept."""

from __future__ import annotations

import argparse

from parity import tables
from parity.cli import options as shared
from parity.command import CommandError, say, write_json
from parity.results import GOLDENS, Report, Row, plural
from parity.vocabulary import FAILED, PASSED, Status

TRUTHS = ("golden", "predicted", "digests", "floors", "compile")
ACTIONS = {
    "verify": "check every golden's file and case, and judge the implementations against it",
    "regenerate": "write pending files of the named kinds and exit 1: look at them, then accept",
    "diff": "what the pending files would change, in numbers; exits 1 if anything is pending",
    "accept": "put the pending files in place",
}


def add(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=shared.Parser)
    for name, text in ACTIONS.items():
        described = text[:1].upper() + text[1:] + "."
        action = actions.add_parser(name, help=text, description=described, epilog=shared.EXITS)
        shared.add_fixtures(action)
        shared.add_json(action)
        if name == "regenerate":
            action.add_argument("names", nargs="*", metavar="KIND", help=f"{', '.join(TRUTHS)} (default: golden)")
        if name == "verify":
            action.add_argument("names", nargs="*", metavar="NAME", help="only these goldens")
            shared.add_implementation(action)
            shared.add_device(action)


def run(options: argparse.Namespace) -> int:
    from parity.gate import goldens
    from parity.run import device, interpreter

    if options.action == "verify":
        return verify(options)
    interpreter.prepare(device.resolve("auto").type)
    if options.action == "regenerate":
        left = goldens.regenerate(options.fixtures, options.names or ["golden"])
        count = plural(sum(map(len, left.values())), "pending file")
        print(f"{count} in {', '.join(left)}: see `parity golden diff`, then accept")
        write_json(options.json, {"pending": left})
        return FAILED
    if options.action == "diff":
        pending, lines = goldens.diff(options.fixtures)
        print("\n".join(lines or [f"{plural(len(pending), 'pending file')}, no value differs"]))
        write_json(options.json, {"pending": pending, "differences": lines})
        return FAILED if pending else PASSED
    changed = goldens.accept(options.fixtures)
    print(f"accepted: {', '.join(changed)}")
    write_json(options.json, {"accepted": changed})
    return PASSED


def verify(options: argparse.Namespace) -> int:
    """Progress on stderr and the table of a gate."""
    import numpy

    from parity.gate import goldens
    from parity.golden import stored
    from parity.run.registry import builtin

    folder = stored.locate("golden", options.fixtures)
    device = shared.device_of(options)
    rows: list[Row] = []
    if folder is None:
        rows.append(goldens.none_found())
    else:
        unknown = sorted(set(options.names) - set(goldens.cases()))
        if unknown:
            raise CommandError(f"no golden is called {unknown[0]!r}; there are {', '.join(goldens.cases())}")
        given = [shared.implementation_of(options, device)] if options.impl else list(builtin(device).values())
        # Some goldens hold NaN and infinities on purpose; numpy, under Triton's interpreter, would warn of each.
        with numpy.errstate(all="ignore"):
            for row in goldens.verify(folder, given, device, options.names, only_used=bool(options.impl)):
                rows.append(row)
                if row.status is not Status.PASSED:
                    say(f"{row.status:<12}{row.implementation} golden/{row.check}")
    report = Report(tuple(rows), GOLDENS, {"folder": str(folder)})
    print(f"{tables.text(report)}\n\n{report.sentence}")
    write_json(options.json, report.to_json())
    return report.exit

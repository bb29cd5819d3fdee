"""`parity mutants`: the mutation score as a matrix of models and levels."""

from __future__ import annotations

import argparse
import os
import time

from parity.cli import options as shared
from parity.command import CommandError, say, write_json, write_text
from parity.results import MUTANTS, Report, Row, plural
from parity.vocabulary import PASSED

PROFILES = ("smoke", "ci")


def add(parser: argparse.ArgumentParser) -> None:
    from parity.ops.fault import KINDS

    parser.add_argument("models", nargs="*", metavar="ID", help="only these models (default: all)")
    parser.add_argument("--smoke", action="store_true", help="one model of every kind")
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", default=[], help="only this kind (repeatable)")
    parser.add_argument("--half", choices=("A", "B"), help="only this half of the models")
    parser.add_argument("--full", action="store_true", help="run every level, not only until the first kill")
    parser.add_argument("--profile", choices=PROFILES, default="ci", help="default: %(default)s")
    shared.add_workers(parser, "the number of cores, at most 8")
    parser.add_argument("--list", action="store_true", help="print the catalogue and end")
    shared.add_json(parser)
    shared.add_markdown(parser, "the table as Markdown")


def run(options: argparse.Namespace) -> int:
    from parity.faults import catalogue, mutants, score
    from parity.suite.pool import collect

    if options.list:
        print(mutants.catalogue())
        return PASSED
    unknown = [id for id in options.models if id not in catalogue.BY_ID and id not in score.CORRECT]
    if unknown:
        raise CommandError(f"there is no fault model {unknown[0]!r} (parity mutants --list)")
    ids = options.models or mutants.chosen(options.kind, options.half, options.smoke)
    part = mutants.part(ids, options.profile, options.full, options.workers)
    say(f"parity mutants: {plural(len(ids), 'model')}, profile {options.profile}, {plural(part.workers, 'worker')}")
    started, before = time.time(), sum(os.times()[2:4])
    rows: list[Row] = []
    partial = ""
    try:
        collect(part, rows)
    except KeyboardInterrupt as end:
        partial = f"{str(end) or 'interrupted'} after {len(rows)} of {plural(len(ids), 'model')}"
    rows = mutants.in_order(rows)
    head = {
        "profile": options.profile,
        "duration": round(time.time() - started, 1),
        "processor_seconds": round(sum(os.times()[2:4]) - before, 1),
        "summary": score.summary(rows),
    }
    report = Report(tuple(rows), MUTANTS, head, partial, words=mutants.sentence(rows))
    print(f"{mutants.text(rows)}\n\n" + "\n".join([report.sentence, *mutants.problems(rows), *filter(None, [partial])]))
    print(f"{head['duration']:.0f} s, {head['processor_seconds']:.0f} s of processors")
    write_json(options.json, report.to_json())
    if options.markdown:
        write_text(options.markdown, mutants.markdown(rows))
    return report.exit

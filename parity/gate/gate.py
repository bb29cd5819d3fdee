"""The pre-merge check: suite, goldens, compile gate and fault models in a pool of processes, one table, one verdict.

Everything heavy runs in processes of its own, so that a crash there still ends in a verdict here.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parity import tables
from parity.command import CommandError, append_text, say, write_json, write_text
from parity.domain.profiles import profile
from parity.faults import mutants
from parity.gate import goldens
from parity.golden import stored
from parity.results import Report, Row, plural
from parity.run import device as devices
from parity.run import processes, registry
from parity.suite import jobs
from parity.suite.clock import Clock
from parity.suite.pool import Job, Lost, Part, collect
from parity.suite.session import Session, open_session
from parity.vocabulary import GOLDEN, LEVELS, REFERENCE, SUITE, Grounds, Status

WORKER_BYTES = 16 << 30  # of a GPU's memory, for the largest cases of one process
MOST_WORKERS = 8
EXPLAINED = ("layout", "rounding", "selection", "invariance")
"""Levels whose failures show in a result, which is what fault models can explain."""


@dataclass(frozen=True)
class Options:
    """What `parity gate` is to do; None means the profile's or the suite's own default."""

    device: torch.device
    impl: str | None = None
    layout: str | None = None
    op: str | None = None
    contract: str | None = None
    arithmetic: str | None = None
    profile: str = "ci"
    seed: int | None = None
    examples: int | None = None
    seconds: float | None = None
    workers: int | None = None
    level: tuple[str, ...] = ()
    golden: bool = True
    compile: bool = True
    faults: bool = True
    fixtures: str | None = None
    json: str | None = None
    junit: str | None = None
    markdown: str | None = None

    @property
    def chosen(self) -> dict[str, Any]:
        """Who is judged, as sessions and goldens take it."""
        return {"impl": self.impl, "layout": self.layout, "op": self.op, "contract": self.contract}

    @property
    def whole(self) -> bool:
        """Whether everything built in is judged: only then kernels are compiled and fault models run."""
        return self.impl is None and not self.level


def gate(options: Options) -> int:
    """Run everything that `options` names, print the tables and the verdict line, write the files; the exit code."""
    if options.junit:  # a missing package is refused before the work, and needed for nothing else
        importlib.import_module("parity.gate.junit")
    golden = locate_goldens(options.fixtures)
    started = time.time()
    session = session_of(options)
    head = session.describe() | {"started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started))}
    rows: list[Row] = []
    unfinished = ""
    try:
        run_parts(options, session, golden, rows)
    except KeyboardInterrupt as end:
        unfinished = f"{str(end) or 'interrupted'} before everything was judged"
    head["coverage"], broken = session.coverage(rows)
    rows += broken if not unfinished else []
    head["duration"] = round(time.time() - started, 1)
    report = Report(tuple(rows), head=head, partial=unfinished)
    print(f"\n{tables.text(report)}", flush=True)
    if options.faults and not unfinished:
        show_diagnosis(report.rows, options.device.type, options.contract)
    print(f"\n{report.sentence}", flush=True)
    write_files(options, report)
    return report.exit


def locate_goldens(fixtures: str | None) -> Path | None:
    """Where the goldens are, None for nowhere; CommandError for a folder that is not there, before any work is done."""
    return stored.locate("golden", fixtures)


def session_of(options: Options) -> Session:
    """The session that every process opens too. A bad option ends here, in one sentence."""
    try:
        how = profile(options.profile, seed=options.seed, seconds=options.seconds, examples=options.examples)
        clock = None if options.seconds is None else Clock(options.seconds)
        return open_session(
            impl=options.impl,
            layout=options.layout,
            op=options.op,
            contract=options.contract,
            device=options.device,
            profile=how,
            clock=clock,
            arithmetic=options.arithmetic or "auto",
        )
    except ValueError as error:
        raise CommandError(str(error)) from error


def default_workers(device: str) -> int:
    """Two processes on a CPU of two cores; on a GPU as many as its memory and the cores hold.

    Most cases are small, and drawn and judged on the CPU while the GPU waits; the largest take WORKER_BYTES.
    """
    cores = os.cpu_count() or 1
    if device == "cpu":
        return min(2, cores)
    return max(1, min(MOST_WORKERS, cores - 1, devices.total_memory() // WORKER_BYTES))


# --------------------------------------------------------------------------------------------------------------- parts


def run_parts(options: Options, session: Session, golden: Path | None, rows: list[Row]) -> None:
    """Append the rows of every part, also where one is interrupted."""
    workers = options.workers or default_workers(options.device.type)
    say(f"parity gate: profile {options.profile}, device {options.device.type}, {plural(workers, 'worker')}")
    for line in session.header():
        say(line)
    collect(judging_part(options, session, golden, workers), rows)
    if options.golden and golden is None:
        rows.append(goldens.none_found())
    # A user's own function has no configurations that could be listed.
    if options.compile and options.whole:
        say("parity gate: compiling every kernel for every architecture")
        collect(compile_part(options), rows)
    # The suite itself is judged too: it must reject one fault model of every kind. Smoke is a minute at one's desk.
    if options.faults and options.whole and options.profile != "smoke":
        say("parity gate: one fault model of every kind must be rejected")
        found: list[Row] = []
        try:
            collect(mutants.part(mutants.chosen(small=True), "ci", False, options.workers), found)
        finally:
            rows += [replace(row, implementation=SUITE) for row in mutants.in_order(found)]


def judging_part(options: Options, session: Session, golden: Path | None, workers: int) -> Part:
    """The suite's checks, and in the same processes the goldens."""
    pairs = session.pairs([level for level in LEVELS if level in (options.level or LEVELS)])
    work = jobs.jobs(pairs, session.weight(pairs))
    if options.golden and golden is not None:
        work.append(Job("parity.gate.gate:verify_here", (options.chosen, str(session.device), str(golden))))
    done: list[None] = []

    def read(index: int, result: Any) -> list[Row]:
        if index < len(pairs):
            return [jobs.lost_row(pairs[index], result) if isinstance(result, Lost) else result]
        return [lost_row(REFERENCE, GOLDEN, "verify", result)] if isinstance(result, Lost) else list(result)

    def show(found: list[Row]) -> None:
        for row in found:
            if row.level != GOLDEN:
                done.append(None)
                say(f"[{len(done):>3}/{len(pairs)}] {tables.progress(row)}")
            elif row.status is not Status.PASSED:
                say(f"{row.status:<12}{row.implementation} golden/{row.check}")

    return Part(work, read, show, workers, jobs.setup(options.chosen, session, workers))


def verify_here(chosen: Mapping[str, Any], device: str, folder: str) -> list[Row]:
    """In a process: every golden, judged by contracts as they were declared."""
    where = torch.device(device)
    impl = chosen["impl"]
    targets = (
        [registry.load(impl, chosen["layout"], chosen["op"], chosen["contract"], where)]
        if impl
        else list(registry.builtin(where).values())
    )
    return list(goldens.verify(Path(folder), targets, where, only_used=bool(impl)))


def compile_part(options: Options) -> Part:
    """The compile gate as one job, which starts compilers of its own; a row per implementation and architecture."""

    def read(index: int, result: Any) -> list[Row]:
        if isinstance(result, Lost):
            return [lost_row("kernels", "resources", "compile", result)]
        for note in result[1]:
            say(note)
        return list(result[0])

    # Smoke is a minute at one's desk: one architecture, and whatever is in the cache.
    job = Job("parity.build.compile:rows_of_gate", (options.profile == "smoke", options.fixtures))
    return Part([job], read, lambda rows: None)


def lost_row(name: str, level: str, check: str, lost: Lost) -> Row:
    """The row that stands for a part that broke as a whole."""
    return Row(name, level, check, Status.ERROR, message=lost.message, grounds=Grounds.CRASH)


# -------------------------------------------------------------------------------------------------------------- output


def show_diagnosis(rows: Sequence[Row], device: str, contract: str | None) -> None:
    """Print which fault explains the first failure that one can explain; nothing where there is none.

    A pair of invariance comes last: its case by itself may be answered correctly."""
    known = [row for row in rows if row.status is Status.FAILED and row.level in EXPLAINED and row.case]
    row = min(known, key=lambda row: EXPLAINED.index(row.level), default=None)
    if row is None:
        return
    name, case = row.implementation, row.first_case or row.case
    print(f"\ndiagnosis of {row.level}/{row.check} of {name}", flush=True)
    command = [sys.executable, "-m", "parity", "diagnose", "--impl", name, "--case", case, "--device", device]
    if contract:
        command += ["--contract", contract]
    elif ":" in name:
        command += ["--op", str(row.op)] + (["--layout", row.layout] if row.layout else [])
    processes.call(command, output=1)


def junit_text(report: Report) -> str:
    """The report as JUnit XML."""
    from parity.gate import junit

    return junit.text(report)


def write_files(options: Options, report: Report) -> None:
    """The files that the options name, each tried; CommandError on those that could not be written."""
    text = tables.markdown(report)
    problems = []
    for path, write in (
        (options.json, lambda path: write_json(path, report.to_json())),
        (options.junit, lambda path: write_text(path, junit_text(report))),
        (options.markdown, lambda path: write_text(path, text)),
        (os.environ.get("GITHUB_STEP_SUMMARY"), lambda path: append_text(path, text)),
    ):
        try:
            if path:
                write(path)
        except CommandError as error:
            problems.append(str(error))
    if problems:
        raise CommandError("; ".join(problems))

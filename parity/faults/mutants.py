"""`parity mutants`: the mutation score as a matrix of models and levels, run by a pytest of its own in parallel."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parity.command import FAILED, PASSED, CommandError, check_writable, read_json, say, write_json, write_text
from parity.ops.fault import KINDS

HERE = Path(__file__).resolve().parent
LEVELS = ("layout", "rounding", "selection", "invariance", "resources")
Row = dict[str, Any]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="parity mutants",
        description="Run fault models through the suite: which check rejects each, after how many examples.",
        epilog="exit codes: 0 all models killed and all correct implementations accepted, 1 not so, 2 usage",
        allow_abbrev=False,
    )
    parser.add_argument("models", nargs="*", metavar="ID", help="only these models (default: all)")
    parser.add_argument("--smoke", action="store_true", help="one model of every kind")
    parser.add_argument("--kind", choices=tuple(KINDS), action="append", default=[], help="only this kind (repeatable)")
    parser.add_argument("--half", choices=("A", "B"), help="only this half of the models")
    parser.add_argument("--full", action="store_true", help="ask every level, not only until the first kill")
    parser.add_argument("--profile", choices=("smoke", "ci"), default="ci", help="default: %(default)s")
    parser.add_argument("--workers", type=int, metavar="N", help="processes (default: the number of cores, at most 8)")
    parser.add_argument("--rules", action="store_true", help="the peers' acceptance rules on the same models instead")
    parser.add_argument("--list", action="store_true", help="print the catalogue and end")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON too")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown too")
    return parser


def main(words: Sequence[str]) -> int:
    options = build_parser().parse_args(list(words))
    check_writable(options.json, options.markdown)
    if options.list:
        return show_catalogue(options)
    if options.rules:
        from parity.faults.rules import run_rules

        return run_rules(options.json, options.markdown)
    ids = chosen(options)
    started = time.time()
    report = run(ids, options.profile, options.full, options.workers)
    report |= {
        "kind": "indexer-parity/mutants",
        "format": 1,
        "profile": options.profile,
        "duration": round(time.time() - started, 1),
    }
    write_json(options.json, report)
    if options.markdown:
        write_text(options.markdown, markdown(report))
    print(text(report["rows"]))
    print("\n" + sentence(report))
    print(f"{report['duration']:.0f} s, {report['processor_seconds']:.0f} s of processors")
    return FAILED if report["summary"]["bad"] or report["lost"] else PASSED


def chosen(options: argparse.Namespace) -> list[str]:
    """Ids to run: those that take longest first, so that processes end together."""
    from parity.faults.catalogue import BY_ID, MODELS, smoke
    from parity.faults.score import CORRECT

    unknown = [id for id in options.models if id not in BY_ID and id not in CORRECT]
    if unknown:
        raise CommandError(f"there is no fault model {unknown[0]!r} (parity mutants --list)")
    if options.models:
        return list(options.models)
    models = smoke() if options.smoke else list(MODELS)
    models = [m for m in models if (not options.kind or m.kind in options.kind) and options.half in (None, m.half)]
    correct = [] if options.smoke or options.kind or options.half else list(CORRECT)
    slow = [m for m in models if m.equivalent or m.kind in ("memory", "integers", "launch", "race")]
    return correct + [m.id for m in slow] + [m.id for m in models if m not in slow]


def run(ids: Sequence[str], profile: str, full: bool, workers: int | None) -> Row:
    """Rows of all ids, in the catalogue's order, with their summary; `lost` names tests that ended without a row."""
    from parity.faults.catalogue import MODELS
    from parity.faults.score import CORRECT, summary
    from parity.gate import gate

    count = workers if workers is not None else min(8, os.cpu_count() or 1, len(ids))
    with tempfile.TemporaryDirectory(prefix="parity-mutants-") as folder:
        job, out = Path(folder) / "job.json", Path(folder) / "rows.json"
        job.write_text(json.dumps({"ids": list(ids), "profile": profile, "full": full}), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", str(HERE / "test_models.py"), "-c", str(gate.INI)]
        command += ["--rootdir", str(HERE), "-p", "parity.faults.pytest_models", "-p", "xdist.plugin"]
        command += ["-p", "no:cacheprovider", "-p", "no:terminal", "-n", str(count if count > 1 else 0)]
        command += ["--parity-models", str(job), "--parity-models-json", str(out)]
        say(f"parity mutants: {len(ids)} models, profile {profile}, {max(count, 1)} processes")
        before = sum(os.times()[2:4])
        code = gate.call(command, gate.suite_environment(os.environ) | {"TRITON_INTERPRET": "1"})
        spent = sum(os.times()[2:4]) - before
        if not out.is_file():
            raise CommandError(f"the models' pytest ended with exit code {code} and left no report")
        found = read_json(out)
    place = {id: at for at, id in enumerate([m.id for m in MODELS] + list(CORRECT))}
    rows = sorted(found["rows"], key=lambda row: place[row["id"]])
    missing = [id for id in ids if id not in {row["id"] for row in rows}]
    lost = found["lost"] + [f"{id}: no row" for id in missing]
    return {"rows": rows, "lost": lost, "summary": summary(rows), "processor_seconds": round(spent, 1)}


def cell(row: Row, level: str) -> str:
    """What stands in the matrix: the check that killed it and the examples it took, or nothing."""
    return next((f"{kill['check']} {kill['examples']}" for kill in row["kills"] if kill["level"] == level), "")


def text(rows: Sequence[Row]) -> str:
    """The matrix, aligned."""
    width = max((len(row["id"]) for row in rows), default=2) + 2
    lines = [f"{'model':<{width}}{'kind':<11}" + "".join(f"{level:<18}" for level in LEVELS) + "minimal case"]
    for row in rows:
        cells = "".join(f"{cell(row, level):<18}" for level in LEVELS)
        last = row["kills"][0]["case"] if row["kills"] else row["outcome"]
        lines.append(f"{row['id']:<{width}}{row['kind'] or '':<11}{cells}{last}")
        lines += [f"{'':<{width}}  {crash}" for crash in row["crashes"]] if not row["kills"] else []
    return "\n".join(lines)


def sentence(report: Row) -> str:
    """The score in words."""
    found = report["summary"]
    halves = ", ".join(f"half {h}: {found[f'half_{h}']['killed']} of {found[f'half_{h}']['models']}" for h in "AB")
    line = (
        f"mutation score: {found['killed']} of {found['models']} models killed ({halves}); {found['equivalent']} "
        f"equivalent, {found['correct']} correct implementations, {found['examples_of_correct']} examples of both"
    )
    bad = [f"{row['id']} {row['outcome']}" for row in report["rows"] if row["id"] in found["bad"]]
    return "\n".join([line, *(f"not as it should be: {each}" for each in bad), *report["lost"]])


def markdown(report: Row) -> str:
    """The matrix, the kinds and the equivalent models as Markdown."""
    rows = report["rows"]
    lines = ["# Mutation score", "", sentence(report).splitlines()[0] + ".", ""]
    lines += ["| kind | models | killed |", "|---|--:|--:|"]
    for kind, words in KINDS.items():
        mine = [row for row in rows if row["kind"] == kind and not row["equivalent"]]
        lines.append(f"| {words} | {len(mine)} | {sum(row['outcome'] == 'killed' for row in mine)} |")
    lines += ["", "Check, and examples until it failed:", ""]
    lines += ["| model | half | kind | " + " | ".join(LEVELS) + " | minimal case |", "|---" * (len(LEVELS) + 4) + "|"]
    for row in rows:
        if row["kind"] and not row["equivalent"]:
            case = row["kills"][0]["case"] if row["kills"] else row["outcome"]
            short = case if len(case) <= 90 else case[:87] + "..."
            cells = " | ".join(cell(row, level) for level in LEVELS)
            lines.append(f"| {row['id']} | {row['half']} | {row['kind']} | {cells} | `{short}` |")
    lines += ["", "## Equivalent models", "", "No input tells them from a correct implementation.", ""]
    lines += [
        f"- **{row['id']}** ({row['outcome']}): {row['sentence']}. {row['equivalent']}"
        for row in rows
        if row["equivalent"]
    ]
    lines += ["", "## Correct implementations", "", "| implementation | examples | outcome |", "|---|--:|---|"]
    lines += [f"| {row['id']} | {row['examples']} | {row['outcome']} |" for row in rows if not row["kind"]]
    return "\n".join(lines) + "\n"


def show_catalogue(options: argparse.Namespace) -> int:
    from parity.faults.catalogue import MODELS

    for fault in MODELS:
        report = f" ({fault.report})" if fault.report else ""
        mark = " [equivalent]" if fault.equivalent else ""
        print(f"{fault.id:<32}{fault.op:<13}{fault.kind:<11}{fault.half}  {fault.sentence}{report}{mark}")
    print(f"\n{len(MODELS)} models")
    return PASSED

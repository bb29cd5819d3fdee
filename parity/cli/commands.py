"""The work behind `parity list`, `run`, `golden` and `recorded`; `gate` and `merge` have modules of their own.

Imported by the command line only when one of these is asked for, because everything here needs torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from parity.command import FAILED, PASSED, CommandError, blame, say, write_json
from parity.gate import summary
from parity.ops.paged_logits.case import DATA, Case, parse_case
from parity.run import device as devices
from parity.run import interpreter
from parity.run.registry import Implementation, builtin, load


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that was asked for, with Triton's interpreter decided before anything imports triton."""
    required = options.require_device
    if required and options.device not in ("auto", required):
        raise CommandError(f"--require-device {required} contradicts --device {options.device}")
    with blame("--require-device" if required else "--device"):
        device = devices.resolve(required or options.device)
    interpreter.prepare(device.type)
    return device


def implementation(options: argparse.Namespace, device: torch.device) -> Implementation:
    """The one that `--impl` names."""
    with blame(f"--impl {options.impl}"):
        return load(options.impl, options.layout, options.stage, options.contract, device)


def show_list(options: argparse.Namespace) -> int:
    """What there is to choose from."""
    from parity.domain.profiles import PROFILES
    from parity.ops import check as checks

    device = device_of(options)
    implementations = [
        {
            "name": impl.name,
            "stage": impl.stage,
            "layout": impl.layout if impl.stage != "topk" else None,
            "arithmetic": impl.contract.describe_dot() if impl.stage == "logits" else None,
            "absent": impl.absent,
        }
        for impl in builtin(device).values()
    ]
    found = [{"level": c.level, "name": c.name, "stages": list(c.stages)} for c in checks.all_checks()]
    found.sort(key=lambda item: summary.rank(str(item["level"])))
    value: dict[str, Any] = {
        "device": str(device),
        "implementations": implementations,
        "checks": found,
        "profiles": {name: drawing(profile) for name, profile in PROFILES.items()},
        "data": {stage: list(names) for stage, names in DATA.items()},
        "provenance": devices.provenance(device),
    }
    write_json(options.json, value)
    print(f"device: {device} ({devices.architecture(device)})")
    print("\nimplementations (--impl)")
    width = max(len(str(item["name"])) for item in implementations) + 2
    for item in implementations:
        what = f"{item['stage']} {item['layout'] or ''}".strip()
        state = f"not run: {item['absent']}" if item["absent"] else item["arithmetic"] or ""
        print(f"  {item['name']:<{width}}{what:<14}{state}".rstrip())
    print("  module:function or path/to/file.py:function, a function of your own (docs/concepts.md)")
    print("\nchecks by level")
    for level in dict.fromkeys(item["level"] for item in found):
        names = [f"{i['name']} ({', '.join(i['stages'])})" for i in found if i["level"] == level]
        print(f"  {level:<14}" + f"\n{'':<16}".join(names))
    print("\nprofiles (--profile)")
    for name, profile in value["profiles"].items():
        print(f"  {name:<14}{profile}")
    print("\ndata classes (data= in a case string)")
    for stage, classes in DATA.items():
        print(f"  {stage:<14}{', '.join(classes)}")
    return PASSED


def drawing(profile: Any) -> str:
    """How much a profile draws, in words."""
    how = "the same cases at every run" if profile.derandomised else "new cases at every run"
    return f"{profile.examples} examples a level and implementation, {how}"


def run_case(options: argparse.Namespace) -> int:
    """One case, one implementation, every check that applies."""
    from parity.ops import check as checks
    from parity.pages.pools import TooLarge
    from parity.run.worker import opened
    from parity.tensorcore.verification import examine, sharpened

    with blame("--case"):
        case = parse_case(options.case)
    if not options.impl:
        raise CommandError("--impl is missing: whose result is to be judged? (parity list)")
    device = device_of(options)
    if options.stage is None and ":" in options.impl:
        options.stage = case.stage
    if options.layout is None and case.stage != "topk" and ":" in options.impl and not options.contract:
        options.layout = case.layout
    impl = implementation(options, device)
    mismatch(case, impl)
    # Judged as the suite judges it: by the card's own arithmetic where that is verified.
    examined = examine(device, [impl], options.arithmetic)
    impl = sharpened(impl, examined, devices.architecture(device))
    for line in examined.lines():
        say(line)
    with blame("--check"):
        wanted = [checks.find_check(name) for name in options.check]
    wanted = wanted or checks.all_checks(stage=case.stage)
    rows = []
    with opened(impl, device) as runner:
        for check in wanted:
            try:
                verdict = checks.judge_one(check, runner, case)
            except TooLarge as error:
                raise CommandError(f"--case: {error}") from error
            if verdict is not None:
                rows.append(case_row(verdict.as_dict(), impl, check))
                print(one_line(rows[-1]), flush=True)
    status, code, line = summary.verdict(rows)
    write_json(
        options.json,
        {"case": str(case), "verdict": status, "exit": code, "rows": rows, "provenance": devices.provenance(device)},
    )
    print(f"\n{line}")
    return code


def mismatch(case: Case, impl: Implementation) -> None:
    """CommandError where the case cannot be this implementation's."""
    if impl.absent:
        raise CommandError(f"--impl {impl.name}: not run: {impl.absent}")
    if case.stage != impl.stage:
        raise CommandError(f"--case is of stage {case.stage}, {impl.name} is a {impl.stage} function")
    if case.stage != "topk" and case.layout != impl.layout:
        verb = "writes" if impl.stage == "store" else "reads"
        raise CommandError(f"--case has {case.layout} pages, {impl.name} {verb} {impl.layout}")


def case_row(found: dict[str, Any], impl: Implementation, check: Any) -> dict[str, Any]:
    """A verdict as a row of a report."""
    ratio = found.pop("ratio", None)
    return found | {
        "implementation": impl.name,
        "stage": impl.stage,
        "layout": impl.layout,
        "level": check.level,
        "check": check.name,
        "examples": 1,
        "worst_ratio": ratio,
    }


def one_line(row: dict[str, Any]) -> str:
    """`passed  layout/exact   worst/bound 0.001` or the complaint."""
    head = f"{row['status']:<12}{row['level']}/{row['check']}"
    if row["status"] == "passed":
        return f"{head:<44}worst/bound {summary.number(row['worst_ratio'])}"
    return f"{head}\n    {row.get('message') or 'no reason given'}"


def golden(options: argparse.Namespace) -> int:
    """`parity golden verify|regenerate|diff|accept`."""
    from parity.golden import files as golden_files

    if options.action == "verify":
        return golden_verify(options)
    golden_files_needed = options.action != "regenerate"
    folder = golden_files.locate(options.fixtures)
    if folder is None and golden_files_needed:
        raise CommandError("no goldens found beside the package or in ./fixtures: name the folder with --fixtures DIR")
    if folder is None:
        folder = Path.cwd() / "fixtures" / "golden"
    if options.action in ("regenerate", "accept"):
        golden_files.refuse_in_ci(options.action)
    interpreter.prepare("cpu")
    from parity.golden import goldens

    if options.action == "regenerate":
        names = goldens.regenerate(folder)
        write_json(options.json, {"folder": str(folder), "pending": names})
        print(f"{summary.plural(len(names), 'pending golden')} in {folder}: see `parity golden diff`, then accept")
        return FAILED
    if options.action == "diff":
        lines = goldens.diff(folder)
        pending = golden_files.pending(folder)
        write_json(options.json, {"folder": str(folder), "pending": pending, "differences": lines})
        print("\n".join(lines or [f"{summary.plural(len(pending), 'pending file')}, no value differs"]))
        return FAILED if pending else PASSED
    changed = goldens.accept(folder)
    write_json(options.json, {"folder": str(folder), "accepted": changed})
    print(f"accepted in {folder}: {', '.join(changed)}")
    return PASSED


def golden_verify(options: argparse.Namespace) -> int:
    """Verify, with progress on stderr and the table of a gate."""
    from parity.golden import files as golden_files

    device = device_of(options)
    folder = golden_files.locate(options.fixtures)
    if folder is None:
        message = "no goldens beside the package or in ./fixtures (--fixtures DIR names another place)"
        rows = [{"implementation": summary.REFERENCE, "level": "golden", "check": "verify", "status": "not run"}]
        rows[0]["message"] = message
    else:
        rows = verified_rows(options, device, folder)
    status, code, line = summary.verdict(rows)
    write_json(options.json, {"verdict": status, "exit": code, "folder": str(folder), "rows": rows})
    if not options.quiet:
        print(summary.table(rows))
        for row in summary.complaints(rows):
            print(f"\n{summary.complaint(row)}")
        print("\n".join(["", *summary.reasons(rows), line]))
    return code


def verified_rows(options: argparse.Namespace, device: torch.device, folder: Path) -> list[dict[str, Any]]:
    from parity.golden import goldens

    unknown = sorted(set(options.names) - set(goldens.CASES))
    if unknown:
        raise CommandError(f"no golden is called {unknown[0]!r}; there are {', '.join(goldens.CASES)}")
    targets: Sequence[Implementation]
    targets = [implementation(options, device)] if options.impl else list(builtin(device).values())
    rows = []
    # Some goldens hold NaN and infinities on purpose; numpy, under Triton's interpreter, would warn of each.
    with numpy.errstate(all="ignore"):
        for row in goldens.verify(folder, targets, device, options.names, only_used=bool(options.impl)):
            rows.append(row)
            if row["status"] != "passed":
                say(f"{row['status']:<12}{row['implementation']} golden/{row['check']}")
    return rows


def recorded(options: argparse.Namespace) -> int:
    """Replay recordings; the table and the comparison belong to parity.recorded."""
    from parity.recorded import main_replay

    return int(main_replay(options.folder, options.json))

"""The pre-merge check: the suite in a pytest of its own, then the goldens, one table and one verdict line.

Everything heavy runs in child processes, so a crash there still ends in a verdict here, and the user's own pytest
settings, plugins and conftests cannot change what is judged. Works from an installed package and from a checkout.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.command import CommandError, blame, check_writable, read_json, say, write_json, write_text
from parity.faults import gate_hook
from parity.gate import summary

PACKAGE = Path(__file__).resolve().parents[1]
SUITE = PACKAGE / "suite"
INI = PACKAGE / "gate" / "gate.ini"
PYTEST_USAGE, PYTEST_EMPTY = 4, 5
ENDED = "the suite's pytest ended with exit code"
WORKER_BYTES = 16 << 30  # of a card's memory, for the largest cases of one process
MOST_WORKERS = 8
SHOWN = 8  # rejections printed in full; the JSON file has all of them


@dataclass(frozen=True)
class Options:
    """What `parity gate` was asked for; None means the profile's or the plugin's own default."""

    impl: str | None = None
    layout: str | None = None
    stage: str | None = None
    contract: str | None = None
    arithmetic: str | None = None
    device: str = "auto"
    require_device: str | None = None
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


def gate(options: Options) -> int:
    """Run everything that `options` asks for, print the table and the verdict line, write the files; the exit code."""
    check_writable(options.json, options.junit, options.markdown)
    require_packages()
    device = decide_device(options.device, options.require_device)
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="parity-gate-") as folder:
        report = run_suite(options, device, Path(folder))
        rows = in_order(report)
        if options.golden:
            rows += run_golden(options, device, Path(folder))
        # A user's own function has no configurations that could be listed.
        if options.compile and options.impl is None and not options.level:
            rows += run_compile(options, Path(folder))
        # The suite itself is judged too: it must reject one fault model of every kind. Smoke is a minute at one's desk.
        if options.faults and options.impl is None and not options.level and options.profile != "smoke":
            rows += gate_hook.smoke_rows(Path(folder))
    status, code, line = summary.verdict(rows)
    report |= {
        "kind": summary.KIND,
        "format": summary.FORMAT,
        "verdict": status,
        "exit": code,
        "sentence": line,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started)),
        "duration": round(time.time() - started, 1),
        "rows": rows,
    }
    write_json(options.json, report)
    publish(report, options.markdown)
    show(rows)
    if options.faults:
        gate_hook.show_diagnosis(rows, device, options.contract)
    print(f"\n{line}", flush=True)
    return code


def require_packages() -> None:
    """CommandError naming what the gate needs and this interpreter lacks (a checkout used without installation)."""
    needed = {"torch": "torch", "numpy": "numpy", "safetensors": "safetensors", "hypothesis": "hypothesis"}
    needed |= {"pytest": "pytest", "xdist": "pytest-xdist"}
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise CommandError(f"the gate needs {', '.join(missing)}: pip install {' '.join(missing)}")


def decide_device(choice: str, required: str | None) -> str:
    """`cpu` or `cuda`; also decides, in this process's environment, whether the children interpret kernels."""
    from parity.run import device, interpreter

    if required and choice not in ("auto", required):
        raise CommandError(f"--require-device {required} contradicts --device {choice}")
    with blame("--require-device" if required else "--device"):
        found = device.resolve(required or choice).type
    interpreter.prepare(found)
    return found


def run_suite(options: Options, device: str, folder: Path) -> dict[str, Any]:
    """The suite's own report, {provenance..., rows}; a suite that did not get to write one is a row of status error."""
    out = folder / "suite.json"
    workers = options.workers if options.workers is not None else default_workers(device)
    command = [sys.executable, "-m", "pytest", str(SUITE), "-c", str(INI), "--rootdir", str(SUITE)]
    command += ["-p", "parity.suite.plugin", "-p", "xdist.plugin", "-n", str(workers), "--dist", "worksteal"]
    command += ["-p", "no:cacheprovider", "-p", "no:terminal", "-p", "parity.gate.progress"]
    command += ["--parity-json", str(out), "--parity-device", device, "--parity-profile", options.profile]
    for name, value in (
        ("impl", options.impl),
        ("layout", options.layout),
        ("stage", options.stage),
        ("contract", options.contract),
        ("arithmetic", options.arithmetic),
        ("seed", options.seed),
        ("examples", options.examples),
        ("seconds", options.seconds),
    ):
        if value is not None:
            command += [f"--parity-{name}", str(value)]
    if options.junit:
        command += [f"--junitxml={Path(options.junit).resolve()}"]
    if options.level:
        command += ["-k", " or ".join(f"test_{level}" for level in options.level)]
    say(f"parity gate: profile {options.profile}, device {device}, {summary.plural(max(workers, 1), 'worker')}")
    code = call(command, suite_environment(os.environ))
    if code == PYTEST_USAGE:  # the plugin has said on stderr which option was wrong
        raise CommandError("the suite refused an option, see above")
    report = read_json(out) if out.is_file() else {"rows": [suite_error(f"{ENDED} {code} and left no report")]}
    if not accounted(code, report["rows"]):
        report["rows"].append(suite_error(f"{ENDED} {code}"))
    return report


def accounted(code: int, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the rows explain pytest's exit code; what they do not explain is an error of its own."""
    statuses = {row["status"] for row in rows}
    if statuses & summary.REJECTING or code == 0:
        return True
    # The plugin says 2 when nothing was judged; pytest itself says 2 when collecting failed, and 5 for no tests.
    return code == PYTEST_EMPTY or (code == summary.USAGE and bool(statuses) and "passed" not in statuses)


def in_order(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The suite's rows by implementation as the report names them, not in the order in which processes ended."""
    order = list(report.get("implementations", ()))
    rows = list(report["rows"])
    return sorted(rows, key=lambda row: order.index(name) if (name := row["implementation"]) in order else len(order))


def suite_error(message: str) -> dict[str, Any]:
    """The row that stands for a suite that broke as a whole."""
    return {"implementation": "suite", "level": "layout", "check": "run", "status": "error", "message": message}


def default_workers(device: str) -> int:
    """Two processes on a CPU of two cores; on a card as many as its memory and the cores hold. 0: in the child itself.

    Most cases are small, and drawn and judged on the CPU while the card waits; the largest take WORKER_BYTES.
    """
    cores = os.cpu_count() or 1
    if device == "cpu":
        return 2 if cores >= 2 else 0
    from parity.run.device import total_memory

    found = min(MOST_WORKERS, cores - 1, total_memory() // WORKER_BYTES)
    return found if found >= 2 else 0


def suite_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: one thread a process, no foreign pytest options or plugins, this very package.

    The current folder must not come first on the path, or a user's `test.py` there would shadow a module; the registry
    appends it. PYTHONPATH stays, with the place of this package behind it for a checkout that is not installed.
    """
    kept = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if (PACKAGE.parent / "pyproject.toml").is_file():  # never site-packages: PYTHONPATH would put it before the stdlib
        paths.append(str(PACKAGE.parent))
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONSAFEPATH": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def run_golden(options: Options, device: str, folder: Path) -> list[dict[str, Any]]:
    """The goldens' rows, judged in a child like the suite."""
    out = folder / "golden.json"
    command = [sys.executable, "-m", "parity", "golden", "verify", "--json", str(out), "--device", device, "--quiet"]
    for name, value in (
        ("impl", options.impl),
        ("layout", options.layout),
        ("stage", options.stage),
        ("contract", options.contract),
        ("fixtures", options.fixtures),
    ):
        if value is not None:
            command += [f"--{name}", str(value)]
    say("parity gate: goldens")
    code = call(command, suite_environment(os.environ))
    return list(read_json(out)["rows"]) if out.is_file() else golden_lost(code)


def run_compile(options: Options, folder: Path) -> list[dict[str, Any]]:
    """The rows of `parity compile`, added up: one for an implementation and architecture."""
    out = folder / "compile.json"
    say("parity gate: compiling every kernel for every architecture")
    command = [sys.executable, "-m", "parity", "compile", "--json", str(out)]
    if options.profile == "smoke":  # a minute at one's desk: one architecture, and whatever is in the cache
        command.append("--quick")
    if options.fixtures is not None:
        command += ["--fixtures", options.fixtures]
    code = call(command, suite_environment(os.environ), output=subprocess.DEVNULL)
    if out.is_file():
        report = read_json(out)
        for note in report.get("notes", ()):
            say(note)
        return compile_rows(report["rows"])
    status, message = "error", f"`parity compile` ended with exit code {code} and left no report"
    if code == summary.USAGE:
        status, message = "not run", "no kernel could be compiled here, see `parity compile`"
    row = suite_error(message)
    return [{**row, "implementation": "kernels", "level": "resources", "check": "compile", "status": status}]


def compile_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Configurations as rows of a gate's report: the worst one stands for its implementation and architecture."""
    grouped: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        store = row.get("kernel") == "store"
        mode = str(row.get("config") or "").partition(" ")[0].replace("_", "-")
        name = f"store-{mode}".rstrip("-") if store else f"triton-{row['layout']}"
        grouped.setdefault((name, "store" if store else "logits", f"compile sm_{row['arch']}"), []).append(row)
    found = []
    for (name, stage, check), group in grouped.items():
        worst = min(group, key=lambda row: summary.SEVERITY.index(row["status"]))
        said = (
            f"{worst.get('config') or ''}: {worst['reason']}".removeprefix(": ") if worst["status"] != "passed" else ""
        )
        fields = {"implementation": name, "stage": stage, "layout": worst.get("layout"), "level": "resources"}
        numbers = {"examples": sum(row["status"] in ("passed", "failed") for row in group)}
        arch = check.rpartition("_")[2]
        repro = f"parity compile --arch {arch}"
        found.append(fields | numbers | {"check": check, "status": worst["status"], "message": said, "repro": repro})
    return found


def golden_lost(code: int) -> list[dict[str, Any]]:
    """The row that stands for goldens whose child broke."""
    message = f"`parity golden verify` ended with exit code {code} and left no report"
    return [{**suite_error(message), "implementation": summary.REFERENCE, "level": "golden", "check": "verify"}]


def call(command: Sequence[str], environment: Mapping[str, str], output: int = 2) -> int:
    """Run a child with its output on our stderr. On an interrupt wait for it: it got the same signal."""
    sys.stderr.flush()
    with subprocess.Popen(command, env=dict(environment), stdout=output, stdin=subprocess.DEVNULL) as child:
        try:
            return child.wait()
        except KeyboardInterrupt:
            child.wait()
            raise


def publish(report: Mapping[str, Any], path: str | None) -> None:
    """The Markdown summary: to the file that was asked for, and appended to the step summary of a GitHub job."""
    text = summary.markdown(report)
    if path:
        write_text(path, text)
    step = os.environ.get("GITHUB_STEP_SUMMARY")
    if step:
        with blame(f"GITHUB_STEP_SUMMARY {step}"), open(step, "a", encoding="utf-8") as file:
            file.write(text)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Table, rejections, and what was not judged and why; the verdict comes after it, as the last line."""
    print()
    print(summary.table(rows))
    compiled = summary.compile_table(rows)
    if compiled:
        print("\n" + compiled)
    found = summary.complaints(rows)
    for row in found[:SHOWN]:
        print(f"\n{summary.complaint(row)}")
    if len(found) > SHOWN:
        print(f"\n... and {summary.plural(len(found) - SHOWN, 'more rejection')}, see --json")
    notes = summary.reasons(rows)
    if notes:
        print("\n" + "\n".join(notes))

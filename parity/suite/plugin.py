"""pytest's face of the suite: options, the decision on Triton's interpreter, one test per check, table and JSON file.

Does nothing, and imports nothing heavy, unless a `--parity-...` option is given or `parity.suite` is to be collected.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from parity import tables
from parity.command import write_json
from parity.results import Report, Row
from parity.vocabulary import ARITHMETIC, DEVICES, FAILED, LEVELS, PROFILES, USAGE, Grounds, Status

SUITE = Path(__file__).resolve().parents[1] / "suite"
ROW = "parity"  # name of the user property that carries a row from a worker to the controller

SESSION: pytest.StashKey[Any] = pytest.StashKey()
TOTAL: pytest.StashKey[float] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity", "numerical parity of sparse-attention indexer kernels (parity.suite)")

    def option(name: str, metavar: str, text: str, **more: Any) -> None:
        group.addoption(f"--parity-{name}", metavar=metavar, help=text, **more)

    option("impl", "SPEC", "judge only this: a built-in name, module:function or path/to/file.py:function")
    option("layout", "LAYOUT", "layout of its pages (parity list)")
    option("op", "OPERATION", "what it computes (default: paged_logits; parity list)")
    option("contract", "FILE", "TOML file with what it promises")
    option("device", "DEVICE", "auto (default), cpu or cuda", choices=DEVICES)
    option("require-device", "DEVICE", "refuse to run without it: cpu or cuda", choices=DEVICES[1:])
    parser.addini("parity_profile", "the profile where --parity-profile names none", default="ci")
    option("profile", "NAME", "how much is drawn: smoke, ci (default), nightly or debug", choices=tuple(PROFILES))
    option("seed", "N", "seed of the cases (default: 0; random in nightly)", type=int)
    option("seconds", "S", "time for drawing cases in the whole session; checks get their shares of it", type=float)
    option("examples", "N", "examples for each implementation and level", type=int)
    dots = "auto (default): dots are exact where the GPU confirms a model; bound: never"
    option("arithmetic", "MODE", dots, choices=ARITHMETIC)
    option("json", "FILE", "write what every check found to this file")


def concerned(config: pytest.Config, options: Any) -> bool:
    """Whether this pytest run concerns parity at all."""
    if any(name.startswith("parity_") and value is not None for name, value in vars(options).items()):
        return True
    words = list(getattr(options, "file_or_dir", None) or [])
    if not words and config.invocation_params.dir == config.rootpath:
        words = [str(config.rootpath / path) for path in config.getini("testpaths")]
    return any(_holds_suite(config, word.split("::")[0]) for word in words or ["."])


def _holds_suite(config: pytest.Config, word: str) -> bool:
    if word == "parity" or word.startswith("parity.suite"):
        return True
    path = (config.invocation_params.dir / word).resolve()
    return SUITE in (path, *path.parents) or path in SUITE.parents[:2]


def _prepare(options: Any) -> None:
    from parity.run import interpreter, processes

    processes.claim_packages()
    interpreter.prepare(options.parity_require_device or options.parity_device or "auto")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    # Before any conftest or test module can import triton, which decides on interpretation once and for all.
    if concerned(early_config, early_config.known_args_namespace):
        _prepare(early_config.known_args_namespace)


def pytest_configure(config: pytest.Config) -> None:
    if not concerned(config, config.option) or config.option.help:
        return
    _prepare(config.option)  # again, for a plugin that a conftest has loaded only now
    config.stash[SESSION] = _open(config)
    config.pluginmanager.register(Reporter(config), "parity-reporter")


def _open(config: pytest.Config) -> Any:
    """The session that the options ask for. Every bad option ends here as a usage error of one sentence."""
    from parity.domain.profiles import profile
    from parity.run import device
    from parity.suite.session import open_session
    from parity.tensorcore.verification import Verification

    options = config.option
    path = options.parity_json
    if path and not Path(path).resolve().parent.is_dir():
        raise pytest.UsageError(f"--parity-json {path}: its folder does not exist")
    worker = getattr(config, "workerinput", {})
    try:
        return open_session(
            impl=options.parity_impl,
            layout=options.parity_layout,
            op=options.parity_op,
            contract=options.parity_contract,
            device=device.choose(options.parity_device or "auto", options.parity_require_device, "--parity-device"),
            profile=profile(
                options.parity_profile or config.getini("parity_profile"),
                seed=worker.get("parity_seed", options.parity_seed),
                seconds=options.parity_seconds,
                examples=options.parity_examples,
            ),
            clock=_clock(options.parity_seconds, worker.get("parity_clock", {})),
            arithmetic=options.parity_arithmetic or "auto",
            examined=Verification.from_dict(worker["parity_examined"]) if "parity_examined" in worker else None,
        )
    except ValueError as error:
        raise pytest.UsageError(f"parity: {error}") from error


def _clock(seconds: float | None, shared: dict[str, Any]) -> Any:
    """The session's clock, with what xdist's processes share; None where no time was given."""
    from parity.suite.clock import Clock

    return None if seconds is None else Clock(seconds, **shared)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "parity_pair" not in metafunc.fixturenames:
        return
    if SESSION not in metafunc.config.stash:
        raise pytest.UsageError("parity: the suite is collected, but no option or path named it; name --parity-impl")
    pairs = metafunc.config.stash[SESSION].pairs([metafunc.function.__name__.removeprefix("test_")])
    metafunc.parametrize("parity_pair", pairs, ids=[f"{impl.short}-{check.name}" for impl, check in pairs])


@pytest.fixture
def parity_judge(request: pytest.FixtureRequest, parity_pair: Any) -> Any:
    """A function that runs the check, leaves its row on the report, and fails or skips the test as its verdict says."""

    def judge() -> None:
        impl, check = parity_pair
        row = request.config.stash[SESSION].judge(impl, check, _total(request.session))
        request.node.user_properties.append((ROW, json.dumps(row.to_json())))
        if row.status.counts_against:
            pytest.fail(f"{check.id} {row.status}: {row.text}", pytrace=False)
        if not row.status.judged:
            pytest.skip(f"{row.status}: {row.text}")

    return judge


def _total(session: pytest.Session) -> float:
    """What the checks that were collected weigh, those that cannot run here apart."""
    if TOTAL not in session.config.stash:
        pairs = [pair for item in session.items if (pair := _pair(item)) is not None]
        session.config.stash[TOTAL] = session.config.stash[SESSION].weight(pairs)
    return session.config.stash[TOTAL]


def _pair(item: pytest.Item) -> Any:
    found = getattr(getattr(item, "callspec", None), "params", {}).get("parity_pair")
    return found if isinstance(found, tuple) else None  # a level without checks leaves pytest's own placeholder


class Reporter:
    """Registered where this run concerns parity: collects rows where pytest reports, prints the table, writes JSON."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.session = config.stash[SESSION]
        self.rows: list[Row] = []
        self.started = time.time()
        self.reports_here = not hasattr(config, "workerinput")
        self.folder: tempfile.TemporaryDirectory[str] | None = None

    def pytest_report_header(self) -> list[str]:
        return self.session.header()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """xdist: every worker draws with the seed that the header names, and the GPU's models are verified once."""
        node.workerinput["parity_seed"] = self.session.profile.seed
        node.workerinput["parity_examined"] = self.session.arithmetic.as_dict()
        if self.session.clock is not None:
            self.folder = self.folder or tempfile.TemporaryDirectory(prefix="parity-session-")
            node.workerinput["parity_clock"] = {
                "processes": node.workerinput["workercount"],
                "ledger": str(Path(self.folder.name) / "ended"),
                "started": self.session.clock.started,
            }

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self.reports_here or (report.when != "call" and not report.failed):
            return
        rows = [Row.from_json(json.loads(str(value))) for name, value in report.user_properties if name == ROW]
        self.rows += rows if report.when == "call" else []
        if not rows and report.failed:
            self._lost(report)

    def _lost(self, report: pytest.TestReport) -> None:
        """A test of ours that failed without a row: its process died, or the framework itself broke."""
        place, bracket, rest = report.nodeid.partition("[")
        level = place.rpartition("::test_")[2]
        if bracket and level in LEVELS:
            short, _, check = rest.rstrip("]").rpartition("-")
            names = [impl.name for impl in self.session.implementations.values() if impl.short == short]
            message = str(report.longrepr)[-2000:]
            name = (names or [short])[0]
            self.rows.append(Row(name, level, check, Status.ERROR, message=message, grounds=Grounds.CRASH))

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.session.close()
        if self.folder is not None:
            self.folder.cleanup()
        if not self.reports_here:
            return
        if self.rows and exitstatus == 0:
            if not any(row.status.judged for row in self.rows):
                session.exitstatus = USAGE  # nothing was judged, which must not look like success
            elif self.session.coverage(self.rows)[1]:
                session.exitstatus = FAILED
        if self.config.option.parity_json:
            write_json(self.config.option.parity_json, self.report().to_json())

    def report(self) -> Report:
        """What was found, under the session's head."""
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.started))
        head = {**self.session.describe(), "started": started, "duration": round(time.time() - self.started, 1)}
        head["coverage"], broken = self.session.coverage(self.rows)
        return Report((*self.rows, *broken), head=head)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.rows:
            return
        terminalreporter.section("parity")
        report = self.report()
        for line in (
            tables.table(report.rows),
            *tables.reasons(report.rows),
            *tables.coverage(report),
            report.sentence,
        ):
            terminalreporter.write_line(line)

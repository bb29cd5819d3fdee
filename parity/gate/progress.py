"""The gate's progress: one line on stderr for each check that ends, in place of pytest's own terminal report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from parity.command import say
from parity.gate.summary import number, plural

ROW = "parity"


def pytest_configure(config: pytest.Config) -> None:
    # xdist's workers load the same plugins; only the process that collects their reports speaks.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Progress(), "parity-progress-lines")


class Progress:
    """Counts finished tests and prints what each found."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.done = 0

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        found = session.config.hook.pytest_report_header(
            config=session.config, start_path=session.config.invocation_params.dir
        )
        for lines in reversed(found):
            for line in [lines] if isinstance(lines, str) else lines:
                if line.startswith("parity"):
                    say(line)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items) or self.total

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.total = len(ids)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            say(f"cannot collect {report.nodeid}:\n{report.longrepr}")

    def pytest_internalerror(self, excrepr: Any) -> None:
        say(f"pytest broke:\n{excrepr}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and not report.failed:
            return
        self.done += 1
        rows = [json.loads(str(value)) for name, value in report.user_properties if name == ROW]
        for row in rows:
            say(f"[{self.done:>3}/{self.total or '?'}] {line(row)}")
        if not rows:
            say(f"[{self.done:>3}/{self.total or '?'}] {report.outcome:<12}{report.nodeid}\n{report.longrepr}")


def line(row: dict[str, Any]) -> str:
    """What a row says, on one line."""
    head = f"{row['status']:<12}{row['implementation']} {row['level']}/{row['check']}"
    if row["status"] in ("not run", "unsupported"):
        return f"{head}: {row['message']}"
    parts = [plural(int(row["examples"]), "example")]
    if row.get("worst_ratio") is not None:
        parts.append(f"worst/bound {number(row['worst_ratio'])}")
    return f"{head:<50}{', '.join(parts)}, {float(row.get('seconds') or 0):.1f} s"

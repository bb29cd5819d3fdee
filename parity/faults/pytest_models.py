"""pytest's face of the mutation score: one test a model, its row carried to the process that reports, a JSON file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pytest

ROW = "parity-model"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("parity-models")
    group.addoption("--parity-models", metavar="FILE", help="JSON: ids of models, profile, full")
    group.addoption("--parity-models-json", metavar="FILE", help="where the rows go")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--parity-models")
    if path:
        with open(path, encoding="utf-8") as file:
            config.stash[JOB] = json.load(file)
        config.pluginmanager.register(Rows(config), "parity-models")


JOB: pytest.StashKey[dict[str, Any]] = pytest.StashKey()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "parity_model" in metafunc.fixturenames:
        metafunc.parametrize("parity_model", metafunc.config.stash[JOB]["ids"])


@pytest.fixture
def parity_score(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Scores one model, leaves its row on the report, and fails the test where the row is bad."""

    def judge(id: str) -> None:
        from parity.domain.profiles import profile
        from parity.faults.score import BAD, quick, score

        job = request.config.stash[JOB]
        row = score(id, quick(profile(job["profile"])), full=job["full"])
        request.node.user_properties.append((ROW, json.dumps(row)))
        if row["outcome"] in BAD:
            pytest.fail(f"{id}: {row['outcome']}", pytrace=False)

    return judge


class Rows:
    """Collects rows in the controlling process, with one line of progress each."""

    def __init__(self, config: pytest.Config) -> None:
        self.config, self.rows, self.lost = config, list[Any](), list[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if hasattr(self.config, "workerinput") or (report.when != "call" and not report.failed):
            return
        found = [json.loads(str(value)) for name, value in report.user_properties if name == ROW]
        self.rows += found
        if not found:
            self.lost.append(f"{report.nodeid}: {str(report.longrepr)[-800:]}")
        for row in found:
            total = len(self.config.stash[JOB]["ids"])
            first = row["kills"][0] if row["kills"] else None
            by = f" by {first['level']}/{first['check']} after {first['examples']}" if first else ""
            print(f"[{len(self.rows)}/{total}] {row['id']}: {row['outcome']}{by}", file=sys.stderr, flush=True)

    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--parity-models-json")
        if path and not hasattr(self.config, "workerinput"):
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"rows": self.rows, "lost": self.lost}, file)

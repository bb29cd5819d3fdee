"""The cheap command lines of README and docs run as they stand; commands within sentences have the options they name.

That every line parses is asserted with the other properties of the pages, in `test_docs.py`.
"""

import argparse
import json
import re
import shlex
from pathlib import Path

import pytest

from parity.cli.main import COMMANDS, build_parser
from parity.command import finite
from parity.selftest.report import example
from parity.selftest.test_docs import PAGES, commands
from parity.suite import plugin

ROOT = Path(__file__).resolve().parents[3]
INLINE = re.compile(rf"`parity ({'|'.join(COMMANDS)})([^`\n]*)`")
CHEAP = ("list", "run", "merge", "recorded", "report")
LINES = list(dict.fromkeys(shlex.join(words) for page in PAGES for words in commands(page)))


class Options(argparse.ArgumentParser):
    """Stands for pytest's parser, so that the plugin's own options are the only ones."""

    def getgroup(self, name: str, text: str) -> "Options":
        return self

    def addini(self, name: str, text: str, default: str) -> None:
        """A file says it, and no command line."""

    def addoption(self, name: str, **named: object) -> None:
        self.add_argument(name, **named)  # type: ignore[arg-type]


def test_the_lines_of_pytest_name_options_of_the_plugin():
    parser = Options(allow_abbrev=False)
    plugin.pytest_addoption(parser)  # type: ignore[arg-type]
    lines = [line for line in LINES if line.startswith("pytest")]
    assert any("--parity-impl" in line for line in lines)
    for line in lines:
        _, rest = parser.parse_known_args(shlex.split(line)[1:])
        assert not [word for word in rest if word.startswith("--parity")]


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of its actions."""
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(options_of(each) for each in action.choices.values()))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_within_sentences_have_the_options_that_they_name(page):
    (commands,) = (each for each in build_parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, rest in INLINE.findall(page.read_text(encoding="utf-8")):
        named = set(re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest))
        assert named <= options_of(commands.choices[name]), f"parity {name}{rest}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the lines name."""
    found = tmp_path_factory.mktemp("lines")
    for name in ("fixtures", "examples"):
        (found / name).symlink_to(ROOT / name)
    measured = {"explain": example.explained(), "recall": example.swept(), "memory": example.remembered()}
    gates = {name: example.better() for name in ("gate", "parity", "other", "a", "b", "old", "new")}
    for name, report in (measured | {name: finite(gate.to_json()) for name, gate in gates.items()}).items():
        (found / f"{name}.json").write_text(json.dumps(report))
    for line in LINES:
        options = build_parser().parse_known_args(shlex.split(line)[1:])[0] if line.startswith("parity run") else None
        if options is not None and ":" in options.impl:
            write_function(found, options)
    return found


def write_function(folder: Path, options: argparse.Namespace) -> None:
    """The function of a user's own that a line names: a correct one of its operation and layout."""
    place, _, name = options.impl.rpartition(":")
    path = folder / (place if place.endswith(".py") else place.replace(".", "/") + ".py")
    path.parent.mkdir(exist_ok=True)
    op, layout = options.op or "paged_logits", options.layout or "bf16"
    path.write_text(f"from parity.faults.building import staged\n{name} = staged({op!r}, {layout!r})\n")
    if options.contract:
        (folder / options.contract).write_text(f"op = {op!r}\nlayout = {layout!r}\n")


RECORDED = "parity recorded fixtures/official"


@pytest.mark.parametrize(
    "line", [RECORDED, *(line for line in LINES if line.startswith(tuple(f"parity {name} " for name in CHEAP)))]
)
def test_a_cheap_command_line_runs(line, folder, commands):
    words = shlex.split(line)[1:]
    words += ["--device", "cpu"] if words[0] == "run" else []
    done = commands(*words, folder=folder)
    if done.returncode == 2 and "not run: " in done.stderr:
        pytest.skip(done.stderr.strip())
    # The gate reports of the test have a rejection, which `merge` counts.
    assert done.returncode == (1 if words[0] == "merge" else 0), done.stdout + done.stderr

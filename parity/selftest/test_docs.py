"""README and docs: links resolve, pages of operations hold what the code declares, and closed lists are complete.

`python -m parity.selftest.test_docs NAME` prints the tables that the page of an operation has to hold; without a name,
the files that a case passes on its way, for `docs/architecture.md`.
"""

import contextlib
import dataclasses
import re
import shlex
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from parity.cli.main import COMMANDS, build_parser
from parity.domain.contract import Contract
from parity.domain.fields import CaseString, table
from parity.domain.profiles import profile
from parity.ops.check import LEVELS, checks_of, find_check
from parity.results import Row, Verdict
from parity.run import operation
from parity.run.runner import Outcome
from parity.suite.session import open_session
from parity.vocabulary import PROFILES, Grounds, Status

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "fixtures").glob("*/README.md"))]
HEADINGS = [
    "What it computes",
    "Calling convention",
    "Case strings",
    "Data classes",
    "Checks by level",
    "Contract keys",
    "Built-in implementations",
    "Fault models",
    "A function of your own",
]
SHIPPED = {"parity/truth"}
"""Folders that only a wheel has."""
INTERNAL = {"arithmetic_name", "assumed", "named", "dot_verified"}
"""Fields of a contract that no file can set."""
RENEW = "renew it from the output of `python -m parity.selftest.test_docs"
MOST_FILES = 25

if not README.is_file():
    pytest.skip("not run: README and docs belong to a checkout", allow_module_level=True)


def page_of(name: str) -> Path:
    return DOCS / "operations" / f"{name}.md"


def sections(page: Path) -> dict[str, str]:
    """Text of a page by its headings of the second level."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def data_table(found: operation.Operation) -> str:
    """The data classes of an operation as a Markdown table."""
    rows = (f"| `{name}` | {about.replace('|', chr(92) + '|')} |" for name, about in found.data.items())
    return "\n".join(["| class | what it is |", "|---|---|", *rows])


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# -------------------------------------------------------------------------------------------------------------- README


def code_blocks(text: str) -> list[str]:
    return re.findall(r"```sh\n(.*?)```", text, re.DOTALL)


def test_the_readmes_first_two_commands_are_what_ci_runs():
    first, second = code_blocks(README.read_text())[0].strip().splitlines()
    script = (ROOT / ".ci" / "run").read_text()
    assert first.split("#")[0].strip() == "pip install -e '.[cuda]' -c constraints.txt && parity gate"
    install, test = second.split("#")[0].strip().split(" && ")
    assert (install, test) == ("pip install -e '.[dev]' -c constraints.txt", "pytest")
    assert install.removeprefix("pip install ") in script
    assert f"\n{test}\n" in script
    assert "\nparity gate --profile ci\n" in script
    for command in ("ruff check .", "ruff format --check .", "mypy"):
        assert f"\n{command}\n" in script


def test_the_readme_is_read_in_ten_minutes():
    assert len(README.read_text().splitlines()) <= 130


def commands(page: Path) -> list[list[str]]:
    """The commands of a page's `sh` blocks as arguments, comments left out."""
    lines = "".join(code_blocks(page.read_text())).splitlines()
    found = [command for line in lines for command in line.split(" && ")]
    return [words for command in found if (words := shlex.split(command, comments=True))]


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_every_command_of_a_page_parses(page):
    for words in commands(page):
        program, *rest = words[2:] if words[:2] == ["python", "-m"] else words
        assert program in ("parity", "python", "pip", "pytest"), words
        if program == "parity":
            parsed, left = build_parser().parse_known_args(rest)
            assert parsed.command == rest[0] and not left, words
        elif program == "python":
            assert (ROOT / rest[0]).is_file(), words


# --------------------------------------------------------------------------------------------------------------- links


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        assert "://" not in target, f"{target}: pages must be readable without a network"
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{shown(page)} links to {target}"
        assert not fragment or fragment in anchors(file), f"{shown(page)} links to {target}"


def test_every_page_is_linked_from_the_readme():
    text = README.read_text()
    for page in DOCS.rglob("*.md"):
        assert f"]({shown(page)})" in text, f"README does not link {shown(page)}"


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_files_that_pages_name_exist(page):
    text = re.sub(r"^```(?!sh).*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`((?:parity|impl|reference|fixtures|tools|examples)/[\w./-]+)`", text):
        assert (ROOT / name).exists() or name in SHIPPED, f"{shown(page)} names {name}"


# ---------------------------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("name", operation.BUILTIN)
def test_the_page_of_an_operation_holds_what_its_code_declares(name):
    found, page = operation.find(name), page_of(name)
    parts = sections(page)
    assert list(parts) == HEADINGS
    assert table(found.case) in parts["Case strings"], f"the table of fields of {shown(page)}: {RENEW} {name}`"
    assert data_table(found) in parts["Data classes"], f"the table of data classes of {shown(page)}: {RENEW} {name}`"
    listed = re.findall(r"^\| (\w+) \| `(\w+)` \|", parts["Checks by level"], re.MULTILINE)
    assert listed == [(check.level, check.name) for check in checks_of(found)], f"the checks of {shown(page)}"
    builtin = re.findall(r"`([a-z0-9-]+)`", parts["Built-in implementations"])
    for each in found.implementations(torch.device("cpu")):
        assert each in builtin, f"{shown(page)} does not name {each}"
    for step in dict.fromkeys(fault.step for fault in found.faults()):
        assert re.search(rf"\b{step}\b", parts["Fault models"]), f"{shown(page)} does not name the step {step}"
    assert f"--op {name}" in parts["A function of your own"] or name == operation.DEFAULT


def test_every_page_of_operations_is_of_one_that_there_is():
    assert {page.stem for page in (DOCS / "operations").iterdir()} == set(operation.BUILTIN)


def test_the_pages_of_operations_name_every_contract_key():
    text = "".join(sections(page_of(name))["Contract keys"] for name in operation.BUILTIN)
    named = set(re.findall(r"`(\w+)`", "".join(line.split("|")[1] for line in text.splitlines() if "|" in line)))
    wanted = {field.name for field in dataclasses.fields(Contract)} - INTERNAL
    assert named - {"key"} == wanted


def test_every_case_string_of_the_pages_is_one():
    found = re.findall(r"\bv[12] [a-z_]+=[^'`\"\n]+", "".join(page.read_text() for page in PAGES))
    assert len(found) > 20
    for text in found:
        if "..." not in text:
            operation.parse_case(text.partition(" against the same")[0])


# --------------------------------------------------------------------------------------------------------- closed lists


def test_the_pages_name_every_status_level_profile_ground_and_field_of_a_row():
    parts, gate = sections(DOCS / "concepts.md"), (DOCS / "gate.md").read_text()
    for word in (*LEVELS, *Status):
        assert f"\n| {word} | " in parts["Seven questions"]
    for name in PROFILES:
        assert name in gate
    for ground in Grounds:
        assert f"`{ground}`" in gate
    for field in dataclasses.fields(Row):
        assert f"`{field.name}`" in sections(DOCS / "gate.md")["The JSON file"]


def test_every_command_and_tool_has_a_line():
    text = (DOCS / "commands.md").read_text()
    for name in COMMANDS:
        assert re.search(rf"[` ]{name}\b", text)
    scripts = {path.stem for path in (ROOT / "tools").glob("*.py")}
    assert set(re.findall(r"python tools/(\w+)\.py", text)) == scripts


# -------------------------------------------------------------------------------------------------------- architecture


def test_the_page_on_architecture_names_every_room():
    text = sections(DOCS / "architecture.md")["Rooms"]
    for path in (ROOT / "parity").iterdir():
        name = path.name if path.is_dir() else path.stem if path.suffix == ".py" else ""
        if name.strip("_") == name and name:
            assert re.search(rf"\b{name}\b", text), f"docs/architecture.md does not name {name}"


def carried(value: Any) -> bool:
    """Whether a value is a case, or what comes of one on its way to a row."""
    return isinstance(value, CaseString | Outcome | Verdict | Row) or type(value).__name__.endswith("Operands")


def path_of_a_case() -> list[str]:
    """Files with a function that takes or returns a case, its operands, its outcome or its verdict, as they are met."""
    found: dict[str, None] = {}

    def note(frame: FrameType, event: str, result: Any) -> None:
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [result] if event == "return" else [frame.f_locals.get(name) for name in given]
        ours = code.co_filename.startswith(tuple(f"{ROOT}/{name}/" for name in ("parity", "impl", "reference")))
        if ours and event in ("call", "return") and any(map(carried, values)):
            found[Path(code.co_filename).relative_to(ROOT).as_posix()] = None

    how = profile("smoke", examples=8)
    session = open_session(
        impl="torch-bf16", layout=None, op=None, contract=None, device=torch.device("cpu"), profile=how
    )
    with contextlib.closing(session):
        (impl,) = session.implementations.values()
        check = find_check("rounding/ordinary", impl.operation)
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            assert session.judge(impl, check).status is Status.PASSED
        finally:
            sys.setprofile(before)
    return list(found)


def test_the_page_on_architecture_follows_a_case():
    text = sections(DOCS / "architecture.md")["One case through the rooms"]
    listed = re.findall(r"^\| `(parity/[\w/]+\.py)` \|", text, re.MULTILINE)
    assert set(listed) == set(path_of_a_case()), f"docs/architecture.md: {RENEW}`"
    assert len(listed) == len(set(listed)) <= MOST_FILES


if __name__ == "__main__":
    for each in map(operation.find, sys.argv[1:]):
        print(table(each.case), data_table(each), sep="\n\n")
    if len(sys.argv) == 1:
        print(*path_of_a_case(), sep="\n")

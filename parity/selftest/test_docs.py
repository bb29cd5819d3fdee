"""README and docs: links resolve, pages of operations hold what the code declares, and closed lists are complete.

`python -m parity.selftest.test_docs NAME` prints the tables that the page of an operation has to hold.
"""

import re
from pathlib import Path

from parity.run import operation

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
HEADINGS = (
    "What it computes",
    "Calling convention",
    "Case strings",
    "Data classes",
    "Checks by level",
    "Contract keys",
    "Built-in implementations",
    "Fault models",
    "A function of your own",
)
INTERNAL = {"arithmetic_name", "assumed", "named", "dot_verified"}
"""Fields of a contract that no file of a user's can set."""


def data_table(found: operation.Operation) -> str:
    """The data classes of an operation as a Markdown table."""
    rows = (f"| `{name}` | {about.replace('|', chr(92) + '|')} |" for name, about in found.data.items())
    return "\n".join(["| class | what it is |", "|---|---|", *rows])


def sections(page: Path) -> dict[str, str]:
    """Text of a page by its headings of the second level."""
    parts = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()

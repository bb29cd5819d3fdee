"""Rules of the house, read off the syntax tree: who may import whom, no circles, short modules, no names as strings.

Every rule takes the root of a tree and returns one sentence per breach, so that it can be tried on a made-up tree.
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

KNOWN: dict[str, int] = {}
"""Breaches that this tree is allowed per rule: none."""

# A module imports its own room and rooms to its left. Modules of the top level are rooms of their own.
ROOMS = (
    *("vocabulary", "results", "tables", "command", "golden", "pages", "numerics", "domain", "run", "tensorcore"),
    *("build", "ops", "suite", "faults", "recorded", "explain", "report", "bench", "gate", "cli", "__main__"),
    "selftest",
)
# What kernels and reference may import besides the standard library: neither knows the other nor the framework.
FOREIGN = {"reference": {"torch", "numpy", "reference"}, "impl": {"torch", "triton", "cuda", "impl"}}
LINES = 400
LAYOUTS = {"bf16", "fp8", "fp4"}
OPERATIONS = {"logits", "dots", "paged_logits", "topk", "store", "compressor"}


def modules(root: Path) -> dict[str, Path]:
    """Every module of the tree by its dotted name; a package's name stands for its `__init__`."""
    paths = [path for package in ("reference", "impl", "parity") for path in sorted((root / package).rglob("*.py"))]
    return {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node except what stands under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from (node for each in child.orelse for node in (each, *nodes(each)))
        else:
            yield from (child, *nodes(child))


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name or "") of every import of a file, inside functions too."""
    for node in nodes(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def graph(root: Path) -> dict[str, list[str]]:
    """The modules of the tree that each module outside the self-tests imports."""
    every = modules(root)
    found: dict[str, list[str]] = {}
    for name, path in every.items():
        if not name.startswith("parity.selftest"):
            wanted = (f"{base}.{item}" if f"{base}.{item}" in every else base for base, item in imported(path))
            found[name] = sorted({module for module in wanted if module in every} - {name})
    return found


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def wrong_imports(root: Path) -> list[str]:
    found = []
    for name, wanted in graph(root).items():
        package, _, own = room(name).partition(".")
        if package in FOREIGN:
            others = {base.split(".")[0] for base, _ in imported(modules(root)[name])}
            others -= FOREIGN[package] | set(sys.stdlib_module_names)
            found += [f"{name} imports {other}" for other in sorted(others)]
        elif own and own not in ROOMS:
            found.append(f"{name} stands in no room")
        else:
            ranks = {f"parity.{each}": number for number, each in enumerate(ROOMS)} | {"parity": -1}
            found += [f"{name} imports {w}" for w in wanted if ranks.get(room(w), -1) > ranks[room(name)]]
    return found


def circles(wanted: dict[str, list[str]]) -> list[str]:
    """Circles, one after the other, each broken at one import before the next is looked for."""
    found: list[str] = []
    while True:
        try:
            TopologicalSorter(wanted).prepare()
            return found
        except CycleError as error:
            circle = error.args[1][::-1]
            found.append(" > ".join(circle))
            wanted = wanted | {circle[0]: [each for each in wanted[circle[0]] if each != circle[1]]}


def circles_of_rooms(root: Path) -> list[str]:
    between: dict[str, set[str]] = {}
    for name, wanted in graph(root).items():
        between.setdefault(room(name), set()).update({room(each) for each in wanted} - {room(name)})
    return circles({name: sorted(wanted) for name, wanted in between.items()})


def long_modules(root: Path) -> list[str]:
    counts = {name: len(path.read_text().splitlines()) for name, path in modules(root).items()}
    return [f"{name} has {count} lines" for name, count in counts.items() if count > LINES]


def compared_names(root: Path) -> list[str]:
    """An operation or a layout is a value: only its own folder, and code that shares nothing, may spell its name."""
    operations = OPERATIONS | {path.parent.name for path in root.glob("parity/ops/*/__init__.py")} - {"shared"}
    own = ("reference", "impl", "parity.pages", "parity.selftest", *(f"parity.ops.{name}." for name in operations))
    found = []
    for name, path in modules(root).items():
        if f"{name}.".startswith(own):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.Compare):
                words = {c.value for side in (node.left, *node.comparators) for c in ast.walk(side)
                         if isinstance(c, ast.Constant) and isinstance(c.value, str)}  # fmt: skip
                found += [f"{name}:{node.lineno}: {ast.unparse(node)}"] * bool(words & (LAYOUTS | operations))
    return found


RULES = {
    "imports": wrong_imports,
    "circles of modules": lambda root: circles(graph(root)),
    "circles of rooms": circles_of_rooms,
    "long modules": long_modules,
    "names": compared_names,
    "docstrings": lambda root: [name for name, path in modules(root).items() if not ast.get_docstring(parsed(path))],
}


@pytest.mark.parametrize("rule", RULES)
def test_this_tree_follows(rule):
    found = RULES[rule](ROOT)
    assert len(found) <= KNOWN.get(rule, 0), "\n".join([rule, *found])


GOOD = {
    "reference/exact.py": "import torch, math",
    "impl/kernels.py": "from cuda.core import Device",
    "parity/vocabulary.py": "LEVELS = ()",
    "parity/results.py": "import json",
    "parity/run/call.py": "from parity import vocabulary\nfrom parity.run import worker",
    "parity/run/worker.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from parity.ops.topk import call",
    "parity/ops/topk/call.py": "from parity.run.call import f\nf.op == 'topk'",
    "parity/selftest/test_call.py": "import parity.cli.main\nparity.layout == 'fp8'",
    "parity/cli/main.py": "def f():\n    from parity.ops.topk.call import f\n    return f.name == 'x'",
}
BREACHES = [
    ("imports", "parity/vocabulary.py", "from parity import results", "parity.vocabulary imports parity.results"),
    ("imports", "parity/results.py", "def f():\n  import parity.run.call", "parity.results imports parity.run.call"),
    ("imports", "parity/ops/case.py", "import parity.selftest.test_call",
     "parity.ops.case imports parity.selftest.test_call"),
    ("imports", "parity/attic.py", "import math", "parity.attic stands in no room"),
    ("imports", "impl/launch.py", "from parity.run import call", "impl.launch imports parity"),
    ("imports", "reference/pages.py", "import torch.nn, triton", "reference.pages imports triton"),
    ("circles of modules", "parity/run/worker.py", "def f():\n  from parity.run import call",
     "parity.run.call > parity.run.worker > parity.run.call"),
    ("long modules", "parity/run/worker.py", "pass\n" * LINES, "parity.run.worker has 401 lines"),
    ("names", "parity/run/worker.py", "f = lambda x: x.layout in ('fp8', 'fp4')",
     "parity.run.worker:2: x.layout in ('fp8', 'fp4')"),
    ("docstrings", "parity/run/bare.py", "", "parity.run.bare"),
    ("names", "parity/ops/check.py", "f = lambda x: 'topk' != x.op", "parity.ops.check:2: 'topk' != x.op"),
]  # fmt: skip


def written(root: Path, files: dict[str, str]) -> dict[str, list[str]]:
    """Breaches of a tree of these files, per rule that is broken."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f'"""Docstring."""\n{text.rstrip()}\n' * bool(text))
    return {rule: found for rule, check in RULES.items() if (found := check(root))}


def test_a_good_tree_breaks_no_rule(tmp_path):
    assert written(tmp_path, GOOD) == {}


@pytest.mark.parametrize("rule, name, text, sentence", BREACHES, ids=[f"{b[0]}-{b[1]}" for b in BREACHES])
def test_a_breach_is_found(rule, name, text, sentence, tmp_path):
    assert written(tmp_path, GOOD | {name: text}) == {rule: [sentence]}


def test_a_circle_of_rooms_needs_no_circle_of_modules(tmp_path):
    found = written(tmp_path, GOOD | {"parity/run/one.py": "import parity.cli.two", "parity/cli/two.py": "import math"})
    assert found["circles of rooms"] and "circles of modules" not in found

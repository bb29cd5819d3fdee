"""What is shipped and promised: the wheel's content, requirements, CI script and workflow."""

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("reference", "impl", "parity")
SHIPPED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "NOTICE")
TRUTH = ROOT / "fixtures" / "truth"


def setuptools_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in version("setuptools").split(".")[:1])
    except PackageNotFoundError:
        return (0,)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel of a copy of this tree, so that the build leaves nothing in it."""
    if setuptools_version() < (77,):
        pytest.skip("not run: building the wheel needs setuptools 77 or newer in this environment")
    copy = tmp_path_factory.mktemp("tree")
    for name in SHIPPED:
        shutil.copy(ROOT / name, copy)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TRUTH, copy / "fixtures" / "truth")
    code = "import sys; from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, "dist"], cwd=copy, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return copy / "dist" / done.stdout.split()[-1]


def test_the_wheel_has_every_module_and_data_file(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    wanted = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file()
        and not any(part == "__pycache__" or part.startswith(".") for part in path.relative_to(ROOT).parts)
    }
    truth = {f"parity/truth/{path.name}" for path in TRUTH.glob("*.json")}
    assert names == wanted | truth
    assert "impl/fused_store.cu" in names and len(truth) == 4


def test_the_wheel_names_the_command_the_plugin_and_the_licence(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        info = next(name.split("/")[0] for name in names if ".dist-info/" in name)
        points = configparser.ConfigParser(delimiters=("=",))
        points.read_string(file.read(f"{info}/entry_points.txt").decode())
        metadata = file.read(f"{info}/METADATA").decode()
    assert points["console_scripts"]["parity"] == "parity.cli.main:main"
    # Any other name would register the module twice, beside `-p parity.suite.plugin` and a conftest's pytest_plugins.
    assert dict(points["pytest11"]) == {"parity.suite.plugin": "parity.suite.plugin"}
    assert {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE"} <= set(names)
    assert "License-Expression: MIT" in metadata


def test_an_unpacked_wheel_runs_away_from_the_checkout(wheel, tmp_path):
    place = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(place)
    code = f"import sys; sys.path.insert(0, {str(place)!r}); from parity.cli.main import main; "
    code += "sys.exit(main(sys.argv[1:]))"
    words = ["run", "--case", "v1 lens=3", "--impl", "torch-bf16", "--device", "cpu", "--check", "layout/exact"]
    done = subprocess.run([sys.executable, "-P", "-c", code, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 check of 1 implementation" in done.stdout
    code = "import parity; from parity.ops.store import semantics; "
    code += "from parity.ops.store.digests import known_digests; from parity.numerics import arithmetic; "
    code += "print(parity.__file__, len(known_digests()), len(semantics.floors()), len(arithmetic.stored_models()))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(place)!r}); {code}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout.split()[0].startswith(str(place)) and "0" not in done.stdout.split()[1:], done.stderr


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_requirements_are_lower_bounds_and_pins_are_in_the_constraints():
    names = {re.split(r"[<>=!; \[]", line)[0]: line for line in project()["dependencies"]}
    assert {"torch", "triton", "numpy", "safetensors", "hypothesis", "pytest", "pytest-xdist", "junitparser"} == set(
        names
    )
    assert not [line for line in names.values() if "<" in line or ",==" in line]
    assert "sys_platform == 'linux'" in names["triton"]
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pinned = {re.split(r"[<>=]", line)[0] for line in pins}
    assert "torch==2.13.0" in pins
    assert set(names) | {"ruff", "mypy"} <= pinned
    extras = project()["optional-dependencies"]
    assert "indexer-parity[cuda,report]" in extras["dev"], "the tests run the store and the report, too"
    assert {re.split(r"[<>=\[]", line)[0] for line in extras["cuda"] + extras["report"]} <= pinned


def test_the_pins_leave_room_for_what_torchs_cuda_build_requires():
    """It requires one release of NVIDIA's wheels exactly; a pin of another leaves pip without a solution."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert not [line for line in pins if line.startswith("nvidia-")], "pin the toolkit's release, not its parts"
    assert "cuda-toolkit==13.0.3" in pins, "what torch 2.13.0 requires"
    if not version("torch").startswith("2.13.0"):
        pytest.skip(f"torch {version('torch')} is installed here, not the pinned one")
    for line in metadata.requires("torch") or []:  # a CPU build requires none
        name, number = re.split(r"\[.*\]==|;", line)[:2] if line.startswith("cuda-toolkit") else ("", "")
        assert not name or f"{name}=={number}" in pins


def test_the_ci_script_is_bash_and_starts_from_a_fresh_environment():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    assert "set -euo pipefail" in script.read_text()
    assert "-m venv --clear .venv" in script.read_text()


def test_the_workflow_parses_and_runs_the_gate_on_both_runners():
    yaml = pytest.importorskip("yaml", reason="not run: pyyaml (extra `dev`) is not installed")
    flow = yaml.safe_load((ROOT / ".github" / "workflows" / "parity.yml").read_text())
    jobs = flow["jobs"]
    assert jobs["cpu"]["runs-on"] == "ubuntu-latest"
    assert jobs["cuda"]["runs-on"][0] == "self-hosted"
    gates = {name: [s["run"] for s in job["steps"] if "parity gate" in s.get("run", "")] for name, job in jobs.items()}
    assert len(gates["cpu"]) == len(gates["cuda"]) == 1
    assert "--require-device cuda" in gates["cuda"][0]
    from parity.cli.main import build_parser

    for (command,) in gates.values():
        _, rest = build_parser().parse_known_args(command.split("parity ", 1)[1].split())
        assert not rest

"""The Triton kernels compiled for every architecture, as rows of the compile gate.

Compiling cannot happen under TRITON_INTERPRET=1 and a compiler may abort, so Triton runs in child processes. Results
are cached by the digest of the kernels' sources and of the compiler.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from impl import cache, configs
from parity.build.rows import QUICK, UNKNOWN, Row, kernel_row
from parity.build.triton_child import about

ROOT = Path(__file__).resolve().parents[2]
LAYOUTS = ("bf16", "fp8")
# A foreign assembler is another compiler: no golden speaks of it.
ASSEMBLERS = ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH")


def kernel_rows(
    arches: Sequence[int],
    *,
    layouts: Sequence[str] = LAYOUTS,
    heads: Sequence[int] = configs.HEADS,
    use_cache: bool = True,
    quick: bool = False,
    timeout: float = 600.0,
) -> list[Row]:
    """One row per configuration that `impl.configs` can choose on each architecture (compute capability, such as 90).

    A row holds arch, config, kernel, layout, heads, compiler, status, reason, registers, spill_stores and spill_loads
    (bytes), shared and shared_limit (bytes), instruction, head_order, seconds and cached. Status is `passed`; `failed`
    (does not compile, spills, exceeds the limit, uses no matrix instruction, or sums heads in another order than the
    other configurations of its architecture, layout and head count, so that a row's bits would depend on the choice);
    `unsupported`, with the reason; or `not run` with `quick`, which compiles for sm_120 and takes the rest from the
    cache.
    """
    rows: list[Row] = []
    wanted: list[tuple[int, configs.Config]] = []
    for arch in arches:
        for layout in layouts:
            status, reason = _obstacle(arch, layout)
            if reason:
                rows.append(kernel_row(arch, "", layout, status, reason))
                continue
            wanted += [(arch, c) for count in heads for c in configs.configurations(arch, layout, count)]
    # Named before anything is compiled: a source that changes meanwhile must not own these results.
    file = cache_file() if use_cache and wanted else None
    known = _load_cache(file)
    missing = [(arch, config) for arch, config in wanted if key_of(arch, config) not in known]
    fresh = compile_in_children([item for item in missing if not quick or item[0] == QUICK], timeout)
    if file and fresh:
        cache.write(file, json.dumps(known | fresh, indent=1).encode())
    for arch, config in wanted:
        key = key_of(arch, config)
        found = (known | fresh).get(key) or about(arch, config, "not run", UNKNOWN)
        rows.append(found | {"compiler": compiler(), "cached": key in known})
    _compare_orders(rows)
    return rows


def _obstacle(arch: int, layout: str) -> tuple[str, str]:
    """Why nothing is compiled for an architecture and layout: status and reason, both empty if nothing is."""
    try:
        configs.family(arch)
    except configs.Unsupported as error:
        return "unsupported", str(error)
    if arch not in configs.SHARED_LIMIT_KIB:
        return "unsupported", f"no shared-memory limit is known for sm_{arch}"
    if not configs.supports(arch, layout):
        return "unsupported", f"sm_{arch} has no e4m3 matrix instruction"
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "not run", "triton is not installed"
    return "", ""


def _compare_orders(rows: list[Row]) -> None:
    """Every configuration of an architecture, layout and head count must add the heads in one order."""
    seen: dict[tuple[int, str, int], tuple[str, str]] = {}
    for item in rows:
        if item["status"] != "passed":
            continue
        key = item["arch"], item["layout"], item["heads"]
        order, first = seen.setdefault(key, (item["head_order"], item["config"]))
        if item["head_order"] != order:
            item |= {"status": "failed", "reason": f"adds heads in another order than {first}"}


def compile_in_children(wanted: Sequence[tuple[int, configs.Config]], timeout: float) -> dict[str, Row]:
    """Rows by key, compiled by as many processes as there are cores, two at most."""
    jobs = min(2, os.cpu_count() or 1, len(wanted))
    rows: dict[str, Row] = {}
    if jobs:
        with ThreadPoolExecutor(jobs) as pool:
            for part in pool.map(lambda i: _compile_one_by_one(wanted[i::jobs], timeout), range(jobs)):
                rows |= part
    return rows


def _compile_one_by_one(wanted: Sequence[tuple[int, configs.Config]], timeout: float) -> dict[str, Row]:
    """Rows by key. A child that dies loses the configuration it was at; another one takes the rest."""
    rows: dict[str, Row] = {}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONUNBUFFERED": "1"}
    if (ROOT / "pyproject.toml").is_file():  # a checkout, which need not be installed
        environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), str(ROOT)])
    rest = list(wanted)
    while rest:
        job = json.dumps([[arch, dataclasses.asdict(config)] for arch, config in rest])
        command = [sys.executable, "-m", "parity.build.triton_child"]
        try:
            done = subprocess.run(command, input=job, capture_output=True, text=True, env=environment, timeout=timeout)
            ended, output, errors = f"exit code {done.returncode}", done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            ended = f"no result within {timeout:g} s"
            output, errors = (_text(stream) for stream in (expired.stdout, expired.stderr))
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        rows |= {key_of(arch, config): row for (arch, config), row in zip(rest, found, strict=False)}
        rest = rest[len(found) :]
        if rest:
            arch, config = rest.pop(0)
            last = (errors.strip().splitlines() or ["no message"])[-1]
            reason = f"the compiler process died ({ended}): {last}"
            rows[key_of(arch, config)] = about(arch, config, "failed", reason)
    return rows


def _text(stream: str | bytes | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


def key_of(arch: int, config: configs.Config) -> str:
    """What a result is kept under."""
    return f"sm_{arch} {config!r}"


def compiler() -> str:
    """Triton and its version, and that another assembler than its own is used where the environment says so."""
    foreign = " ".join(f"{name}={os.environ[name]}" for name in ASSEMBLERS if os.environ.get(name))
    return " ".join(filter(None, ["triton", metadata.version("triton"), foreign]))


def digest() -> str:
    """Digest of everything that decides a result: the kernels, how they are compiled, Triton, its assembler."""
    state = hashlib.sha256()
    sources = [ROOT / "impl" / f"{name}.py" for name in ("checks", "configs", "kernels", "tiles")]
    for path in (*sources, Path(__file__).with_name("triton_child.py")):
        state.update(path.name.encode() + path.read_bytes())
    state.update(f"{compiler()} {sys.version_info[:2]}".encode())
    return state.hexdigest()[:16]


def cache_file() -> Path:
    """Where results of this digest are kept, under the user's cache folder."""
    return cache.folder("compile") / f"{digest()}.json"


def _load_cache(file: Path | None) -> dict[str, Row]:
    """Known rows; an unreadable file counts as none, since everything in it can be computed again."""
    try:
        known = json.loads((cache.read(file) if file else None) or b"{}")
    except ValueError:
        return {}
    return known if isinstance(known, dict) else {}

"""Compile every launch configuration of the Triton kernels for an architecture, without a GPU: registers, spills,
shared memory against the architecture's limit, and the order of the head sum.

Compiling cannot happen under TRITON_INTERPRET=1 and a compiler may abort, so it runs in a child process. Results are
cached by the digest of the kernels' sources and of the compiler.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from impl import configs

ROOT = Path(__file__).resolve().parents[2]
ARCHES = (80, 90, 100, 120, 121)
_DIVISIBLE = [["tt.divisibility", 16]]


def compile_all(
    arches: Sequence[int] = ARCHES,
    *,
    layouts: Sequence[str] = ("bf16", "fp8"),
    heads: Sequence[int] = configs.HEADS,
    use_cache: bool = True,
    timeout: float = 600.0,
) -> list[dict[str, Any]]:
    """One row a configuration that `impl.configs` can choose on each architecture (compute capability, such as 90).

    A row holds arch, config, kernel, layout, heads, status, reason, registers, spill_stores and spill_loads (bytes),
    shared and shared_limit (bytes), head_order, seconds and cached. Status is `passed`; `failed` (does not compile,
    spills, exceeds the limit, or sums heads in another order than the other configurations of its architecture, layout
    and head count, so that a row's bits would depend on the choice); or `unsupported`, with the reason.
    """
    rows: list[dict[str, Any]] = []
    wanted: list[tuple[int, configs.Config]] = []
    for arch in arches:
        for layout in layouts:
            reason = _unsupported(arch, layout)
            if reason:
                rows.append({"arch": arch, "layout": layout, "status": "unsupported", "reason": reason})
                continue
            wanted += [(arch, c) for count in heads for c in configs.configurations(arch, layout, count)]
    known = _load_cache() if use_cache else {}
    missing = [(arch, config) for arch, config in wanted if _key(arch, config) not in known]
    fresh = _compile_in_children(missing, timeout)
    if use_cache and fresh:
        _store_cache(known | fresh)
    for arch, config in wanted:
        key = _key(arch, config)
        rows.append((known | fresh)[key] | {"cached": key in known})
    _compare_orders(rows)
    return rows


def table(rows: Iterable[dict[str, Any]]) -> str:
    """The rows as aligned text, one line a configuration."""
    lines = [f"{'arch':<7}{'configuration':<34}{'regs':>5}{'spill':>7}{'shared KiB':>12}{'limit':>7}  status"]
    for row in rows:
        name = row.get("config", row["layout"])
        regs, limit = row.get("registers", ""), row.get("shared_limit", 0) // 1024
        spill = row["spill_stores"] + row["spill_loads"] if "spill_stores" in row else ""
        shared = f"{row['shared'] / 1024:.1f}" if "shared" in row else ""
        status = row["status"] + (f": {row['reason']}" if row.get("reason") else "")
        lines.append(f"sm_{row['arch']:<4}{name:<34}{regs:>5}{spill:>7}{shared:>12}{limit or '':>7}  {status}")
    return "\n".join(lines)


def _unsupported(arch: int, layout: str) -> str:
    try:
        configs.family(arch)
    except configs.Unsupported as error:
        return str(error)
    if arch not in configs.SHARED_LIMIT_KIB:
        return f"no shared-memory limit is known for sm_{arch}"
    if not configs.supports(arch, layout):
        return f"sm_{arch} has no e4m3 matrix instruction"
    try:
        metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "triton is not installed"
    return ""


def _compare_orders(rows: list[dict[str, Any]]) -> None:
    """Every configuration of an architecture, layout and head count must add the heads in one order."""
    seen: dict[tuple[int, str, int], tuple[str, str]] = {}
    for row in rows:
        if row["status"] != "passed":
            continue
        key = row["arch"], row["layout"], row["heads"]
        order, first = seen.setdefault(key, (row["head_order"], row["config"]))
        if row["head_order"] != order:
            row |= {"status": "failed", "reason": f"adds heads in another order than {first}"}


def _compile_in_children(wanted: list[tuple[int, configs.Config]], timeout: float) -> dict[str, dict[str, Any]]:
    """Rows by key. A child that dies loses the configuration it was at; another one takes the rest."""
    rows: dict[str, dict[str, Any]] = {}
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    rest = list(wanted)
    while rest:
        job = json.dumps([[arch, dataclasses.asdict(config)] for arch, config in rest])
        command = [sys.executable, "-m", "parity.run.compile", "--child"]
        try:
            done = subprocess.run(command, input=job, capture_output=True, text=True, env=environment, timeout=timeout)
            ended, output, errors = f"exit code {done.returncode}", done.stdout, done.stderr
        except subprocess.TimeoutExpired as expired:
            ended = f"no result within {timeout:g} s"
            output, errors = (_text(stream) for stream in (expired.stdout, expired.stderr))
        found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        rows |= {_key(arch, config): row for (arch, config), row in zip(rest, found, strict=False)}
        rest = rest[len(found) :]
        if rest:
            arch, config = rest.pop(0)
            last = (errors.strip().splitlines() or ["no message"])[-1]
            rows[_key(arch, config)] = _about(arch, config) | {
                "status": "failed",
                "reason": f"the compiler process died ({ended}): {last}",
            }
    return rows


def _text(stream: str | bytes | None) -> str:
    return stream.decode(errors="replace") if isinstance(stream, bytes) else stream or ""


def _key(arch: int, config: configs.Config) -> str:
    return f"sm_{arch} {config!r}"


def _about(arch: int, config: configs.Config) -> dict[str, Any]:
    return {
        "arch": arch,
        "config": str(config),
        "kernel": config.kernel,
        "layout": config.layout,
        "heads": config.heads,
        "reason": "",
    }


# ---------------------------------------------------------------------------------------------------- the child


def _child() -> None:
    for arch, fields in json.loads(sys.stdin.read()):
        row = _compile_one(arch, configs.Config(**fields))
        print(json.dumps(row), flush=True)


def _compile_one(arch: int, config: configs.Config) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    row = _about(arch, config)
    log, start = io.StringIO(), time.monotonic()
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    try:
        with contextlib.redirect_stdout(log):
            built = triton.compile(_source(config), target=GPUTarget("cuda", arch, 32), options=options)
    # Whatever stops the compiler is the finding: it becomes a failed row, never a skip.
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return row | {"status": "failed", "reason": f"does not compile: {type(error).__name__}: {first}"}
    limit = configs.SHARED_LIMIT_KIB[arch] * 1024
    row |= {
        "registers": _number(r"Used (\d+) registers", log.getvalue()),
        "spill_stores": _number(r"(\d+) bytes spill stores", log.getvalue()),
        "spill_loads": _number(r"(\d+) bytes spill loads", log.getvalue()),
        "shared": built.metadata.shared,
        "shared_limit": limit,
        "head_order": head_order(built.asm["ttgir"]),
        "seconds": round(time.monotonic() - start, 2),
        "status": "passed",
    }
    if row["shared"] > limit:
        row |= {"status": "failed", "reason": f"needs {row['shared']} bytes of shared memory, sm_{arch} has {limit}"}
    elif row["spill_stores"] or row["spill_loads"]:
        row |= {"status": "failed", "reason": "spills registers"}
    return row


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise RuntimeError(f"the assembler's log does not say {pattern!r}: {text!r}")
    return int(found[1])


def _source(config: configs.Config) -> Any:
    """The kernel with the argument types and alignment of a typical call (344 pages wide)."""
    import triton
    from triton.compiler import ASTSource

    from impl import kernels

    kernel, fp8 = getattr(kernels, config.kernel), config.layout == "fp8"
    next_n = config.row_tile if config.kernel == "decode" else 4096
    width = 344 * 64
    pointers = {
        "q": "*fp8e4nv" if fp8 else "*bf16",
        "kv_cache": "*u8" if fp8 else "*bf16",
        "weights": "*fp32",
        "context_lens": "*i32",
        "block_table": "*i32",
        "out": "*fp32",
    }
    integers = {
        "next_n": next_n,
        "groups": 1 if config.kernel == "decode" else 64,
        "limit": width,
        "fill": width,
        "tiles": config.trips,
        "steps": config.trips,
        "q_stride_b": next_n * config.heads * 128,
        "q_stride_n": config.heads * 128,
        "q_stride_h": 128,
        "page_stride": 528 if fp8 else 1024,
        "w_stride_row": config.heads,
        "w_stride_h": 1,
        "len_stride_b": next_n,
        "len_stride_n": 1,
        "table_stride": 344,
        "out_stride": width,
    }
    constants = {
        "FP8": fp8,
        "HEADS": config.heads,
        "BLOCK": config.block,
        "ROW_TILE": config.row_tile,
        "ROWS": triton.next_power_of_2(config.trips * config.row_tile),
        "TILES": 0,
        "STEPS": 0,
        "DOTS": False,
        "INTERPRET": False,
    }
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    fixed: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if name in pointers:
            signature[name] = pointers[name]
            attributes[(index,)] = _DIVISIBLE
        elif name in constants or (integers[name] == 1 and not parameter.do_not_specialize):
            # A launch specialises integers that equal 1 in the same way.
            signature[name] = "constexpr"
            fixed[name] = constants.get(name, 1)
        else:
            signature[name] = "i32"
            if integers[name] % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = _DIVISIBLE
    return ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)


def head_order(ttgir: str) -> str:
    """Which registers, lanes and warps hold the heads that one logit adds up, as the compiled head sum has them.

    Read from the layout of the sum's operand `[keys, rows, heads]`: basis vectors along the heads, in order. Two
    kernels of the same compiler with the same string add in the same order. ValueError when there is no such sum.
    """
    operand = re.search(r"axis = 2 : i32.*?\}\) : \(tensor<\d+x\d+x\d+xf32, (#\w+)>\)", ttgir, re.S)
    if not operand:
        raise ValueError("no reduction over heads in the compiled kernel")
    layout = re.search(rf"^{operand[1]} = (.*)$", ttgir, re.M)
    if not layout or "ttg.linear" not in layout[1]:
        raise ValueError(f"the head sum's layout is not linear: {layout[1] if layout else operand[1]}")
    parts = []
    for place in ("register", "lane", "warp"):
        listed = re.search(rf"{place} = \[((?:\[[\d, ]*\](?:, )?)*)\]", layout[1])
        bases = re.findall(r"\[\d+, \d+, (\d+)\]", listed[1]) if listed else []
        parts.append(f"{place} {' '.join(base for base in bases if base != '0') or '-'}")
    return ", ".join(parts)


# ---------------------------------------------------------------------------------------------------- the cache


def digest() -> str:
    """Digest of everything that decides a result: the kernels' sources, this file, Triton and its assembler."""
    state = hashlib.sha256()
    sources = [ROOT / "impl" / f"{name}.py" for name in ("checks", "configs", "kernels", "tiles")]
    for path in (*sources, Path(__file__)):
        state.update(path.name.encode() + path.read_bytes())
    state.update(f"{metadata.version('triton')} {sys.version_info[:2]}".encode())
    return state.hexdigest()[:16]


def cache_file() -> Path:
    """Where results of this digest are kept, under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "indexer-parity" / f"compile-{digest()}.json"


def _load_cache() -> dict[str, dict[str, Any]]:
    """Known rows; an unreadable file counts as none, since everything in it can be computed again."""
    try:
        known = json.loads(cache_file().read_text())
    except (OSError, ValueError, metadata.PackageNotFoundError):
        return {}
    return known if isinstance(known, dict) else {}


def _store_cache(rows: dict[str, dict[str, Any]]) -> None:
    path = cache_file()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(rows, indent=1))
        scratch.replace(path)


def main(words: Sequence[str]) -> int:
    """``parity compile [--json FILE] [--arch SM ...] [--no-cache]``.

    Exit code 0: every configuration compiles within the limits; 1: one does not; 2: nothing could be compiled."""
    from parity.command import CommandError, check_writable, write_json
    from parity.run.compile_store import store_rows

    parser = argparse.ArgumentParser(
        prog="parity compile", description="Compile every kernel for every architecture, no GPU needed."
    )
    parser.add_argument("--json", metavar="FILE", help="write the rows to FILE")
    parser.add_argument(
        "--arch", action="append", type=int, choices=sorted(configs.SHARED_LIMIT_KIB), metavar="SM",
        help=f"compute capability, such as 90 (repeatable; default {' '.join(map(str, ARCHES))})",
    )  # fmt: skip
    parser.add_argument("--no-cache", action="store_true", help="compile again what is known")
    options = parser.parse_args(words)
    check_writable(options.json)
    rows = compile_all(options.arch or ARCHES, use_cache=not options.no_cache) + store_rows(options.arch or ARCHES)
    print(table(rows))
    statuses = ("passed", "failed", "unsupported", "not run")
    counts = {status: sum(row["status"] == status for row in rows) for status in statuses}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))
    write_json(options.json, {"rows": rows, "counts": counts})
    if not counts["passed"] and not counts["failed"]:
        raise CommandError("nothing could be compiled here")
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    if sys.argv[1:] != ["--child"]:
        sys.exit("run `parity compile`")
    _child()

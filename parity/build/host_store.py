"""Runs the fused store's unchanged CUDA source on the CPU: built with the system's C++ compiler and NVIDIA's headers,
kept in the user's cache, called through ctypes, or as a program under the address and undefined-behaviour sanitizers.

Nothing here imports what a GPU needs. Where a compiler or headers are missing, `missing()` says so in one sentence, and
nothing else answers in the store's place.
"""

import ctypes
import functools
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from impl import cache
from impl.checks import SLOT_BYTES
from impl.store_compile import SOURCE, include_folders
from impl.store_modes import PAGE, Mode, Sizes, check_store

HERE = Path(__file__).parent
RUNNER, SHIM = HERE / "host_store.cpp", HERE / "host_shim.h"
LANES = 8
FLAGS = ("-std=c++17", "-ffp-contract=off", "-fno-fast-math", "-Wno-unknown-pragmas")
SHARED = ("-O1", "-shared", "-fPIC")
# -Og builds three times as fast as -O1 under the sanitizers.
SANITISED = (
    "-Og",
    "-g1",
    "-DPARITY_MAIN",
    "-DPARITY_EQUAL_TYPES",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
NEEDED = ("cuda_bf16.h", "cuda_fp8.h", "crt/host_defines.h", "nv/target")


class HostStoreError(RuntimeError):
    """The source does not build here, or its run broke a rule of the shim; the message holds the first lines."""


@functools.cache
def compiler() -> str | None:
    """Path of the C++ compiler: $CXX, g++ or c++."""
    for name in (os.environ.get("CXX"), "g++", "c++"):
        if name and (found := shutil.which(name)):
            return found
    return None


@functools.cache
def headers() -> tuple[str, ...] | None:
    """Include folders that together hold NVIDIA's conversion headers and what these include, or None."""
    folders = list(include_folders() or ())
    folders += [os.path.join(folder, "cccl") for folder in folders]
    found = [any(os.path.isfile(os.path.join(folder, name)) for folder in folders) for name in NEEDED]
    return tuple(folder for folder in folders if os.path.isdir(folder)) if all(found) else None


@functools.cache
def missing() -> str | None:
    """Why the source cannot run on this machine's CPU, or None."""
    if sys.platform != "linux":
        return f"the host shim switches stacks as Linux's C library does, this is {sys.platform}"
    if compiler() is None:
        return "no C++ compiler was found (looked for $CXX, g++, c++)"
    if headers() is None:
        return "the CUDA headers are not installed; pip install 'cuda-toolkit[cudart,crt,cccl]==13.*'"
    return None


@functools.cache
def _compiler_version() -> str:
    words = [compiler() or "", "-dumpfullversion", "-dumpversion", "-dumpmachine"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


@functools.cache
def _header_digest() -> str:
    parts = []
    for folder in headers() or ():
        for name in sorted(os.listdir(folder)):
            if name.startswith(("cuda_bf16", "cuda_fp8", "cuda_fp16", "cuda_fp4", "cuda_fp6")):
                parts.append(Path(folder, name).read_bytes())
    return cache.digest(*parts)


def build(source: Path = SOURCE, *, sanitised: bool = False, mode: Mode | None = None, lanes: int = LANES) -> Path:
    """The shared library of a store source, or the sanitised program; built now unless it is in the cache.

    mode None builds all modes, lanes 0 all widths. HostStoreError if something is missing or does not compile.
    """
    reason = missing()
    if reason is not None:
        raise HostStoreError(f"the store's CUDA source cannot run on this CPU: {reason}")
    defines = (f"-DPARITY_MODE={-1 if mode is None else mode.index}", f"-DPARITY_LANES={lanes}")
    flags = (*FLAGS, *(SANITISED if sanitised else SHARED), *defines)
    parts = [path.read_bytes() for path in (source, RUNNER, SHIM)]
    key = cache.digest(*parts, flags, _compiler_version(), _header_digest())
    path = cache.folder("host") / (f"{key}.bin" if sanitised else f"{key}.so")
    if path.is_file():
        return path
    with tempfile.TemporaryDirectory(prefix="parity-store-") as folder:
        made = Path(folder) / path.name
        includes = [word for where in headers() or () for word in ("-isystem", where)]
        words = [compiler() or "", *flags, *includes, f'-DPARITY_SOURCE="{source.resolve()}"', str(RUNNER)]
        done = subprocess.run([*words, "-o", str(made)], capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise HostStoreError(f"{Path(words[0]).name} refused {source.name}: {' | '.join(lines[:3])[:500]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        copy = path.with_name(f"{path.name}.{os.getpid()}")
        shutil.copy2(made, copy)
        os.replace(copy, path)
    return path


@functools.cache
def library(path: Path) -> Any:
    """The C function of a built library."""
    function: Any = ctypes.CDLL(str(path)).parity_store
    pointer, wide, narrow = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
    function.restype = ctypes.c_char_p
    function.argtypes = [narrow] * 4 + [pointer, pointer, ctypes.c_float] + [pointer] * 4 + [wide] * 2 + [narrow] * 2
    return function


def store(
    mode: Mode,
    pooled: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    positions: torch.Tensor,
    rope_table: torch.Tensor,
    out_loc: torch.Tensor,
    kv_cache: torch.Tensor,
    validate: bool = False,
    lanes: int = LANES,
    built: Path | None = None,
) -> None:
    """The store of CPU tensors, kv_cache written in place; arguments as in impl.fused_store, `built` from `build`."""
    sizes = check_store(
        mode.layout, pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache, validate=validate
    )
    if pooled.device.type != "cpu":
        raise ValueError(f"pooled must be on the CPU for the host-executed store, got {pooled.device}")
    if sizes.tokens == 0 or sizes.slots == 0:
        return
    wrong = library(built or build())(
        *(mode.index, pooled.dtype == torch.bfloat16, norm_weight.dtype == torch.bfloat16, lanes),
        *(pooled.data_ptr(), norm_weight.data_ptr(), eps, positions.data_ptr(), rope_table.data_ptr()),
        *(out_loc.data_ptr(), kv_cache.data_ptr(), sizes.page_stride, sizes.slots, sizes.max_position, sizes.tokens),
    )
    if wrong:
        raise HostStoreError(f"{mode.name}: {wrong.decode()}")


def store_sanitised(mode: Mode, *, built: Path | None = None, **operands: Any) -> None:
    """The same call in a child process under the sanitizers, every operand in an allocation of its own size.

    HostStoreError with the sanitizer's first lines if it finds anything; bytes between pages count as out of bounds.
    pooled and norm_weight must have the same dtype here.
    """
    sizes = check_store(mode.layout, **operands)
    pooled, norm_weight, kv_cache = (operands[name] for name in ("pooled", "norm_weight", "kv_cache"))
    program = built or build(sanitised=True)
    with tempfile.TemporaryDirectory(prefix="parity-store-") as folder:
        request, result = Path(folder) / "request", Path(folder) / "result"
        pool = pool_bytes(mode.layout, kv_cache, sizes)
        page_bytes = PAGE * SLOT_BYTES[mode.layout]
        head = (
            *(mode.index, pooled.dtype == torch.bfloat16, norm_weight.dtype == torch.bfloat16, LANES),
            *(sizes.tokens, sizes.max_position, kv_cache.shape[0], page_bytes, sizes.page_stride),
        )
        with request.open("wb") as file:
            file.write(struct.pack("<9qd", *map(int, head), operands["eps"]))
            for tensor in (pooled, norm_weight, *(operands[n] for n in ("positions", "rope_table", "out_loc")), pool):
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        environment = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=0"}
        done = subprocess.run(
            [str(program), str(request), str(result)], capture_output=True, text=True, env=environment, timeout=600
        )
        if done.returncode:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip(" =")]
            raise HostStoreError(f"{mode.name}: {' | '.join(lines[:4])[:600] or f'exit code {done.returncode}'}")
        pool.copy_(torch.frombuffer(bytearray(result.read_bytes()), dtype=torch.uint8))


def pool_bytes(layout: str, kv_cache: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """The pool's memory as uint8 [bytes], first page to last, gaps between pages included; a view."""
    pages = kv_cache.shape[0]
    count = (pages - 1) * sizes.page_stride + PAGE * SLOT_BYTES[layout] if pages else 0
    start = kv_cache.storage_offset() * kv_cache.element_size()
    return kv_cache.as_strided((0,), (1,)).view(torch.uint8).as_strided((count,), (1,), start)


def function(mode: Mode, built: Path | None = None) -> Callable[..., None]:
    """The mode's store in the store's calling convention, executed on the CPU, with its contract as an attribute."""
    call: Any = functools.partial(store, mode, built=built)
    call.__name__ = f"host_{mode.name}"
    call.parity_contract = {**mode.contract, "devices": ["cpu"]}
    return call

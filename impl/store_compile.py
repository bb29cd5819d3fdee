"""Compiles the fused store for one GPU architecture with NVRTC, through cuda.core: no toolkit and no GPU needed. Cubins
are kept on disk, keyed by the source, the headers, the options, the compiler and the architecture."""

import functools
import io
import json
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from impl import cache
from impl.checks import Unsupported
from impl.store_modes import FORMATS, Mode

SOURCE = Path(__file__).with_name("fused_store.cu")
HEADERS = ("cuda_bf16.h", "cuda_bf16.hpp", "cuda_fp8.h", "cuda_fp8.hpp")
INSTALL = "pip install 'indexer-parity[cuda]'"
ELEMENTS = {"float32": "float", "bfloat16": "__nv_bfloat16"}
# No contraction to FMA and IEEE division and square root: then a CPU and every GPU agree on every byte.
OPTIONS: dict[str, Any] = {"std": "c++17", "fma": False, "ftz": False, "prec_div": True, "prec_sqrt": True}


@dataclass(frozen=True)
class Variant:
    """One instantiation of the kernel: mode, dtypes of pooled keys and norm weight by name, lanes a token."""

    mode: Mode
    pooled: str = "float32"
    weight: str = "float32"
    lanes: int = 8

    @property
    def expression(self) -> str:
        """The instantiation in C++."""
        flags = ", ".join(str(flag).lower() for flag in (self.mode.schedule == "published", self.mode.fake_fp4))
        types = f"{ELEMENTS[self.pooled]}, {ELEMENTS[self.weight]}"
        return f"indexer::fused_store<{FORMATS.index(self.mode.format)}, {flags}, {types}, {self.lanes}>"

    def __str__(self) -> str:
        return f"{self.mode.name} {self.pooled} {self.weight}"


@dataclass(frozen=True)
class Compiled:
    """A cubin, the mangled names of its kernels by C++ expression, and ptxas's log."""

    cubin: bytes
    symbols: dict[str, str]
    log: str


@functools.cache
def missing() -> str | None:
    """What is not installed that compiling needs, with the remedy; None if all is there."""
    for module, package in (("cuda.core", "cuda-core"), ("cuda.bindings.nvrtc", "cuda-bindings")):
        try:
            __import__(module)
        except ImportError as error:
            return f"the package {package} is not installed ({error}); {INSTALL}"
    try:
        nvrtc_version()
    except Exception as error:  # a missing shared library surfaces as one of several kinds
        return f"NVRTC cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0][:120]}); {INSTALL}"
    if include_folders() is None:
        return f"the CUDA headers {HEADERS[0]} and {HEADERS[2]} are not installed; {INSTALL}"
    return None


@functools.cache
def nvrtc_version() -> str:
    """Version of the compiler library, such as 13.0."""
    from cuda.bindings import nvrtc

    error, major, minor = nvrtc.nvrtcVersion()
    if int(error):
        raise Unsupported(f"NVRTC does not tell its version: {error}")
    return f"{major}.{minor}"


@functools.cache
def include_folders() -> tuple[str, ...] | None:
    """Folder of the CUDA headers, from the pip packages or an installed toolkit, or None."""
    try:
        from cuda import pathfinder
    except ImportError:
        return _from_distribution()
    found = pathfinder.find_nvidia_header_directory("cudart")
    return (found,) if found else _from_distribution()


def _from_distribution() -> tuple[str, ...] | None:
    try:
        files = metadata.files("nvidia-cuda-runtime") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == HEADERS[2]:
            return (str(Path(str(file.locate())).parent),)
    return None


@functools.cache
def header_digest(folder: str) -> str:
    """Digest of the headers whose code ends up in the kernels."""
    return cache.digest(*[(Path(folder) / name).read_bytes() for name in HEADERS if (Path(folder) / name).is_file()])


def compile_variants(
    variants: tuple[Variant, ...], arch: str, source: str | None = None, *, use_cache: bool = True
) -> Compiled:
    """Compile instantiations into one cubin for `arch` ("sm_90"), from the cache where it is there.

    Raises Unsupported if the packages are missing or the compiler refuses; the message holds its first lines.
    """
    reason = missing()
    if reason is not None:
        raise Unsupported(f"the fused store cannot be compiled: {reason}")
    found = kept(variants, arch, source) if use_cache else None
    if found is not None:
        return found
    folders = include_folders()
    assert folders is not None
    path = _path(variants, arch, source)
    made = _compile(_text_of(source), _names(variants), arch, folders)
    cache.write(path.with_suffix(".json"), json.dumps({"symbols": made.symbols, "log": made.log}).encode())
    cache.write(path, made.cubin)
    return made


def kept(variants: tuple[Variant, ...], arch: str, source: str | None = None) -> Compiled | None:
    """What an earlier compilation of the same source, options, compiler and architecture left in the cache, or None."""
    path = _path(variants, arch, source)
    cubin, about = cache.read(path), cache.read(path.with_suffix(".json"))
    if cubin is None or about is None:
        return None
    found = json.loads(about)
    return Compiled(cubin, found["symbols"], found["log"])


def _path(variants: tuple[Variant, ...], arch: str, source: str | None) -> Path:
    """Where the cubin lies; everything that decides its bytes is in the name."""
    headers = [header_digest(folder) for folder in include_folders() or ()]
    key = cache.digest(_text_of(source).encode(), _names(variants), OPTIONS, arch, nvrtc_version(), headers)
    return cache.folder("cubin") / f"{key}.cubin"


def _names(variants: tuple[Variant, ...]) -> tuple[str, ...]:
    return tuple(variant.expression for variant in variants)


def _text_of(source: str | None) -> str:
    return SOURCE.read_text() if source is None else source


def _compile(text: str, names: tuple[str, ...], arch: str, folders: tuple[str, ...]) -> Compiled:
    from cuda.core import Program, ProgramOptions

    log = io.StringIO()
    options = ProgramOptions(arch=arch, include_path=list(folders), ptxas_options="-v", **OPTIONS)
    try:
        code = Program(text, "c++", options).compile("cubin", name_expressions=names, logs=log)
    except Exception as error:
        lines = [line for line in (log.getvalue() + "\n" + str(error)).splitlines() if line.strip()]
        shown = " | ".join(lines[:3])[:400]
        raise Unsupported(f"NVRTC {nvrtc_version()} refused the fused store for {arch}: {shown}") from error
    symbols = {_text(name): _text(symbol) for name, symbol in code.symbol_mapping.items()}
    return Compiled(bytes(code.code), symbols, log.getvalue())


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value

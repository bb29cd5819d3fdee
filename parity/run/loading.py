"""Functions by name: `module:function` or `path/to/file.py:function`. For child processes."""

import importlib
import importlib.util
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any


class SpecError(ValueError):
    """An implementation that cannot be loaded as it was named; the message is for the user (exit code 2)."""


def split_spec(spec: str) -> tuple[str, str]:
    """("module" or "path.py", "function") of a spec; SpecError if it is neither form."""
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name:
        raise SpecError(
            f"impl: expected a built-in name (parity list), module:function or path/to/file.py:function, got {spec!r}"
        )
    return where, name


def resolve_name(spec: str) -> Any:
    """The object that `module:function` or `path/to/file.py:function` names. Imports code: for child processes.

    SpecError for a file or attribute that is not there; what an import itself raises passes through.
    """
    where, name = split_spec(spec)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_path(where)
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            raise SpecError(f"impl: {where} has no {name!r}; it has {_names(module)}")
        value = getattr(value, part)
    if not callable(value):
        raise SpecError(f"impl: {spec} is a {type(value).__name__}, expected a function")
    return value


def _names(module: ModuleType) -> str:
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return ", ".join(names[:8]) or "no function at all"


def _from_file(path: Path) -> ModuleType:
    path = path.resolve()
    if not path.is_file():
        raise SpecError(f"impl: there is no file {path}")
    # A name of its own: the file may be called as one of our packages is, or as a file of another folder.
    name = f"_parity_{path.stem}_{zlib.crc32(str(path).encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that helpers beside the file are found and nothing is shadowed
    found = importlib.util.spec_from_file_location(name, path)
    if found is None or found.loader is None:
        raise SpecError(f"impl: {path} cannot be imported as Python")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_path(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise SpecError(
                f"impl: no module {name!r} on PYTHONPATH or in {os.getcwd()} (or give path/to/file.py:function)"
            ) from error
        raise

"""What every subcommand shares: its one-sentence errors and its files.

Nothing here imports torch, so that `parity --help`, `parity merge` and a mistyped option answer at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class CommandError(Exception):
    """Ends a command with one sentence on stderr and exit code 2 (usage or environment)."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which is answered as Ctrl-C is: what was judged so far is kept, processes and files are not."""


@contextlib.contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn the error of a bad input into a CommandError that names the input: `--case: the length item ...`.

    Other kinds of error are our own mistakes, and pass through with their traceback.
    """
    try:
        yield
    except (ValueError, TypeError, OSError) as error:
        raise CommandError(f"{what}: {sentence(error)}") from error


def sentence(error: BaseException) -> str:
    """The error's text on one line; of a failed system call only the reason: whoever reports it names the file."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror
    return text or type(error).__name__


def read_json(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON file; CommandError naming it where it is missing or is no JSON."""
    with blame(str(path)):
        text = Path(path).read_text(encoding="utf-8")
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"{path}: not JSON: {sentence(error)}") from error


def refuse_in_ci(what: str) -> None:
    """Goldens change on a developer's machine, under review; CommandError where CI is set."""
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        raise CommandError(f"{what}: nothing is written while CI is set in the environment")


def check_writable(*paths: str | None) -> None:
    """Refuse an output path whose folder is missing before the work is done, not after."""
    for path in paths:
        if path and not Path(path).resolve().parent.is_dir():
            raise CommandError(f"cannot write {path}: its folder does not exist")
        if path and Path(path).is_dir():
            raise CommandError(f"cannot write {path}: it is a folder")


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a file in one step, so that an interrupted run leaves the old one or the new one."""
    path = Path(path)
    with blame(f"cannot write {path}"):
        handle, name = tempfile.mkstemp(dir=path.resolve().parent, prefix=path.name, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def append_text(path: str, text: str) -> None:
    """Add to the end of a file."""
    with blame(f"cannot write {path}"), open(path, "a", encoding="utf-8") as file:
        file.write(text)


def write_json(path: str | os.PathLike[str] | None, value: Any) -> None:
    """Write `value` as JSON when a path was given. Non-finite numbers become strings: JSON has none."""
    if path:
        write_text(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """The same value with inf and NaN spelled as strings."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def say(text: str) -> None:
    """Progress goes to stderr, at once: stdout keeps the result."""
    print(text, file=sys.stderr, flush=True)

"""Where compiled things are kept between processes: one folder a user, files named by digests of all that went in."""

import hashlib
import json
import os
import tempfile
from pathlib import Path

VARIABLE = "INDEXER_PARITY_CACHE"


def folder(kind: str) -> Path:
    """Folder for files of a kind, not created: in the user's cache folder, or where INDEXER_PARITY_CACHE says."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given) / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "indexer-parity" / kind


def digest(*parts: object) -> str:
    """Hexadecimal name for JSON-like parts, bytes included; any difference in them changes it."""
    plain = [hashlib.sha256(part).hexdigest() if isinstance(part, bytes) else part for part in parts]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]


def write(path: Path, data: bytes) -> None:
    """Write a file at once, so that another process sees all of it or nothing. A folder that cannot be written is no
    error: the next process does the work again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)


def read(path: Path) -> bytes | None:
    """The file's bytes, or None where there is no such file."""
    try:
        return path.read_bytes()
    except OSError:
        return None

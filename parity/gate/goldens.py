"""`parity golden`: implementations held against golden tensors, and every stored truth made anew, shown and accepted.

`verify` asks three things of every golden: is the file what the manifest says, does its case still give the same
operands and the same exact result, and does every implementation that it suits stay within the bound. `regenerate`
leaves pending files, `diff` shows what they would change in numbers, `accept` puts them in place.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from parity.build.compile import TRUTH as COMPILED
from parity.command import CommandError
from parity.golden import changes, goldens, stored
from parity.golden.changes import bits
from parity.golden.goldens import Golden
from parity.golden.stored import MANIFEST, StoredError, Truth
from parity.results import Row
from parity.run.device import triton_version
from parity.run.implementation import Implementation
from parity.run.operation import all_operations, find, parse_case
from parity.run.worker import opened
from parity.vocabulary import GOLDEN, REFERENCE, Status

SOURCES = ("parity/pages", "parity/domain", "parity/numerics", "parity/ops", "reference")
KNOBS = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION", "OMP_NUM_THREADS")
CPU = torch.device("cpu")


def hook_of(case: Any) -> Golden:
    """What the operation of a case says about its goldens; ValueError where it has none."""
    found = find(case.op).hook("golden")
    if found is None:
        raise ValueError(f"the operation {case.op} has no goldens")
    return found


def suits(target: Implementation, case: Any) -> bool:
    """Whether a golden of this case is one for the implementation."""
    return target.op == case.op and (not target.operation.layouts or target.layout == case.layout)


def cases() -> dict[str, str]:
    """The case string of every golden there should be, by name."""
    hooks = filter(None, (operation.hook("golden") for operation in all_operations()))
    return {name: case for hook in hooks for name, case in hook.cases.items()}


def truths() -> dict[str, Truth]:
    """Every kind of stored truth that this software can make anew, by name."""
    of_operations = [truth for operation in all_operations() for truth in operation.hook("truths") or ()]
    found = (Truth("golden", "golden", lambda folder: make()), *of_operations, COMPILED)
    return {truth.name: truth for truth in found}


# ------------------------------------------------------------------------------------------------------------- verify


def row(name: str, golden: str, status: Status, message: str = "", **more: Any) -> Row:
    """A row of the report, as the suite makes them."""
    named = {"repro": f"parity golden verify {golden}"} | more
    return Row(name, GOLDEN, golden, status, examples=1, message=message, **named)


def verify(
    folder: Path,
    targets: Sequence[Implementation],
    device: torch.device,
    names: Sequence[str] = (),
    *,
    only_used: bool = False,
) -> Iterator[Row]:
    """Rows of every golden (or those named): the file, the rebuilt case, then each implementation that it suits.

    only_used: leave out the goldens that no target is judged by.
    """
    try:
        manifest = goldens.read_manifest(folder)
    except StoredError as error:
        yield row(REFERENCE, "manifest", Status.ERROR, str(error), repro="")
        return
    if not names:
        yield from housekeeping(folder, manifest)
    for name, entry in manifest.items():
        if names and name not in names:
            continue
        try:
            case = parse_case(entry["case"])
            hook = hook_of(case)
        except ValueError as error:
            message = f"the case cannot be built any more: {error}"
            yield row(REFERENCE, name, Status.FAILED, message, case=entry["case"])
            continue
        suited = [target for target in targets if suits(target, case)]
        if only_used and not suited:
            continue
        try:
            tensors = goldens.read_golden(folder, entry, hook.parts)
        except StoredError as error:
            yield row(REFERENCE, name, Status.ERROR, str(error))
            continue
        difference = rebuilt(case, tensors)
        status = Status.FAILED if difference else Status.PASSED
        yield row(REFERENCE, name, status, difference or "", case=entry["case"])
        if not difference:
            for target in suited:
                yield judged(name, case, tensors, target, device)


def none_found() -> Row:
    """The row that says that no goldens were found."""
    message = "no goldens beside the package or in ./fixtures (--fixtures DIR names another place)"
    return Row(REFERENCE, GOLDEN, "verify", Status.NOT_RUN, message=message)


def housekeeping(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each golden that nothing uses, that is missing, or that waits to be accepted."""
    wanted = cases()
    found = {name: f"{folder / manifest[name]['file']}: unused golden: no case has its name"
             for name in sorted(set(manifest) - set(wanted))}  # fmt: skip
    for name in sorted(set(wanted) - set(manifest)):
        found[name] = f"{folder}: the case {name!r} has no golden: parity golden regenerate"
    for name in sorted(set(wanted) & set(manifest)):
        if manifest[name]["case"] != wanted[name]:
            found[name] = f"{folder / manifest[name]['file']}: made from another case than {name!r} now names"
    for file in goldens.strays(folder, manifest):
        found[file] = f"{folder / file}: unused file: the manifest does not list it"
    for file in stored.pending(folder):
        found[file] = f"{folder / file}: pending: parity golden diff, then accept or delete"
    yield from (row(REFERENCE, name, Status.FAILED, message) for name, message in found.items())


def rebuilt(case: Any, stored: Mapping[str, torch.Tensor]) -> str | None:
    """How the tensors that the case gives today differ from the stored ones, or None."""
    hook = hook_of(case)
    try:
        operands = find(case.op).build(case, CPU)
        fresh = hook.tensors(case, operands)
    except ValueError as error:
        return f"the case cannot be built any more: {error}"
    slack = hook.slack(operands, fresh)
    for name, tensor in fresh.items():
        old = stored[name]
        if old.shape != tensor.shape or old.dtype != tensor.dtype:
            here, there = f"{tensor.dtype} {list(tensor.shape)}", f"{old.dtype} {list(old.shape)}"
            return f"{name}: the case gives {here}, the golden has {there}"
        if name in slack:
            difference = apart(name, old, tensor, slack[name])
        elif differing := int((bits(old) != bits(tensor)).sum()):
            difference = f"{name}: {differing:,} of {old.numel():,} elements are not those that the case gives"
        else:
            difference = None
        if difference:
            return difference
    return None


def apart(name: str, old: torch.Tensor, new: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """The sentence that says where two float64 tensors differ by more than allowed (NaN equals NaN), or None."""
    same = (old == new) | (old.isnan() & new.isnan()) | ((old - new).abs() <= allowed)
    if bool(same.all()):
        return None
    where = (~same).nonzero()[0].tolist()
    count = int((~same).sum())
    return f"{name}: {count:,} elements differ, first at {where}: {old[*where]!s} stored, {new[*where]!s} now"


def judged(
    name: str, case: Any, stored: Mapping[str, torch.Tensor], target: Implementation, device: torch.device
) -> Row:
    """One implementation against one golden: within its own contract's bound of the stored exact result."""
    more: dict[str, Any] = {"case": str(case), "op": case.op, "layout": target.layout or None}
    more["repro"] = f"parity golden verify {name} {' '.join(target.arguments)}"
    if target.absent:
        return row(target.name, name, Status.NOT_RUN, target.absent, **more)
    with opened(target, device) as runner:
        outcome = runner.run(case)
    if outcome.unsupported:
        return row(target.name, name, Status.UNSUPPORTED, outcome.unsupported, **more)
    if outcome.output is None:
        return row(target.name, name, Status.FAILED if outcome.defect else Status.ERROR, str(outcome.complaint), **more)
    verdict = hook_of(case).compare(stored, outcome.output, outcome.operands, target)
    more |= {"ratio": verdict.ratio, "resolution": verdict.resolution}
    return row(target.name, name, verdict.status, verdict.message, **more)


# ------------------------------------------------------------------------------------------------- regenerate, accept


def make(texts: Mapping[str, str] | None = None) -> Iterator[tuple[str, bytes]]:
    """The golden of every case, and the manifest that lists them."""
    entries, made = {}, provenance()
    for name, text in (cases() if texts is None else texts).items():
        case = parse_case(text)
        file = f"{name}.safetensors"
        tensors = hook_of(case).tensors(case, find(case.op).build(case, CPU))
        content = goldens.encode(tensors, {"case": text})
        entries[name] = {"file": file, **goldens.digest(content), "case": text, **made}
        yield file, content
    yield MANIFEST, goldens.manifest_text(entries)


def provenance() -> dict[str, Any]:
    """What made a golden: versions, compiler knobs, and the digest of the sources that decide its content."""
    return {
        "versions": {"torch": torch.__version__, "triton": triton_version(), "python": platform.python_version()},
        "compiler": {knob: os.environ.get(knob) for knob in KNOBS},
        "sources": source_digest(),
    }


def source_digest() -> str:
    """sha256 over the names and texts of the modules that build cases and evaluate them."""
    digest = hashlib.sha256()
    for file in sorted(path for folder in SOURCES for path in (stored.ROOT / folder).rglob("*.py")):
        digest.update(file.relative_to(stored.ROOT).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def regenerate(given: str | None, names: Iterable[str] = ("golden",)) -> dict[str, list[str]]:
    """Leave pending files for these kinds of truth under the fixtures; what was left, by folder.

    CommandError for a name that is none, before anything is computed, and while CI is set.
    """
    known = truths()
    for name in names:
        if name not in known:
            raise CommandError(f"no stored truth is called {name!r}; there are {', '.join(known)}")
    stored.refuse_in_ci("parity golden regenerate")
    places = [(known[name], locate(known[name].folder, given)) for name in names]
    left: dict[str, list[str]] = {}
    for truth, folder in places:
        left.setdefault(str(folder), []).extend(stored.leave(folder, truth.make(folder)))
    return left


def locate(folder: str, given: str | None) -> Path:
    """A folder of the fixtures, ./fixtures where there is none yet."""
    return stored.locate(folder, given) or Path.cwd() / "fixtures" / folder


def diff(given: str | None) -> tuple[list[str], list[str]]:
    """(pending files, what accepting them would change, one line each), over all folders of the fixtures."""
    folders = waiting(given)
    files = [f"{folder.name}/{file}" for folder in folders for file in stored.pending(folder)]
    return files, [f"{folder.name}/{line}" for folder in folders for line in changes.diff(folder)]


def accept(given: str | None) -> list[str]:
    """Put all pending files in place; what changed. CommandError where nothing is pending, and while CI is set."""
    stored.refuse_in_ci("parity golden accept")
    folders = waiting(given)
    if not folders:
        raise CommandError("parity golden accept: nothing is pending")
    return [f"{folder.name}/{name}" for folder in folders for name in stored.accept(folder)]


def waiting(given: str | None) -> list[Path]:
    """The folders of the fixtures in which files are pending; CommandError where there are no fixtures."""
    places = dict.fromkeys(filter(None, (stored.locate(folder, given) for folder in stored.FOLDERS)))
    if not places:
        raise CommandError("no stored truths beside the package or in ./fixtures: name the folder with --fixtures DIR")
    return [place for place in places if stored.pending(place)]

"""Golden tensors of the kernels: operands, exact float64 result and bound, kept in files that a review can see change.

`verify` asks three things of every golden: is the file what the manifest says, does its case still give the same
operands and the same exact result, and does every implementation of its layout stay within the bound. `regenerate`
leaves pending files, `diff` shows what they would change in numbers, `accept` puts them in place.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from parity.domain.contract import Contract
from parity.golden import files
from parity.golden.files import GoldenError
from parity.numerics.bounds import exact_expected, expected, is_exact_data
from parity.numerics.selection import judge_selection
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.judge import Status, Verdict, compare_bounded, compare_exact, compare_tail
from parity.ops.paged_logits.operands import build_logits as build
from parity.pages.layout import PAGE
from parity.results import Row
from parity.run.device import triton_version
from parity.run.implementation import Implementation
from parity.run.operation import parse_case
from parity.run.worker import opened
from parity.vocabulary import GOLDEN, REFERENCE
from reference import exact, pages

CASES = {
    "bf16-exact": "v1 lens=0,1,63,64,65,130 data=exact seed=11 perm=3",
    "bf16-octaves": (
        "v1 lens=7,128,129,70 next_n=2 data=octaves seed=12 perm=5 tail=huge poison=huge width=5 max_len=200"
    ),
    "bf16-wide": "v1 lens=64,66 data=exact_wide seed=18 perm=4",
    "bf16-grid": "v1 lens=p170+3 next_n=3 data=fp4_grid seed=17 perm=1",
    "bf16-negative": "v1 lens=100,90 data=negative seed=13 perm=2 tail=canary poison=canary",
    "bf16-ties": "v1 lens=p250+4 next_n=4 heads=32 data=near_ties seed=14 perm=4",
    "bf16-shared": "v1 lens=140,150 heads=16 data=outliers seed=15 prefix=2 gap=64 perm=9 strides=q+table",
    "bf16-nonfinite": "v1 lens=66,40 heads=8 data=nonfinite seed=16 perm=7",
    "fp8-exact": "v1 lens=0,1,63,64,65,130 layout=fp8 data=exact seed=21 perm=3",
    "fp8-octaves": (
        "v1 lens=7,128,129,70 next_n=2 layout=fp8 data=octaves seed=22 perm=5 tail=huge poison=huge width=5 max_len=200"
    ),
    "fp8-wide": "v1 lens=64,66 layout=fp8 data=exact_wide seed=28 perm=4",
    "fp8-grid": "v1 lens=p170+3 next_n=3 layout=fp8 data=fp4_grid seed=27 perm=1",
    "fp8-saturating": "v1 lens=100,90 layout=fp8 data=saturating seed=23 perm=2 tail=canary poison=canary",
    "fp8-ties": "v1 lens=p250+4 next_n=4 layout=fp8 heads=32 data=near_ties seed=24 perm=4",
    "fp8-shared": "v1 lens=140,150 layout=fp8 heads=16 data=outliers seed=25 prefix=2 gap=64 perm=9 strides=q+table",
    "fp8-nonfinite": "v1 lens=66,40 layout=fp8 heads=8 data=nonfinite seed=26 perm=7",
    "topk-random": "v1 lens=0,63,64,65,200 stage=topk k=64 data=random seed=31 perm=3",
    "topk-equal": "v1 lens=150,40 stage=topk k=64 data=equal seed=32 perm=5 tail=huge",
    "topk-neginf": "v1 lens=p500+3 next_n=3 stage=topk k=100 data=neginf seed=33 perm=6",
}
U64 = 2.0**-53
SOURCES = ("parity/cases", "parity/judge", "reference")
KNOBS = ("TRITON_INTERPRET", "TRITON_DEFAULT_FP_FUSION", "OMP_NUM_THREADS")


def evaluate(operands: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact logits of all rows and what float64 may have lost of them, both float64 [T, longest length].

    Row by row and page by page, as the formula reads: keys through the block table, dot, ReLU, weights, scale. The loss
    is (D + H + 8) 2^-53 of the sum of absolute terms. Past a row's length: -inf and 0.
    """
    lens = operands.context_lens.flatten().tolist()
    next_n = operands.context_lens.shape[1]
    layout = operands.case.layout
    shape = (len(lens), max(lens, default=0))
    result = torch.full(shape, float("-inf"), dtype=torch.float64)
    loss = torch.zeros(shape, dtype=torch.float64)
    for row, length in enumerate(lens):
        if not length:
            continue
        q = operands.q.flatten(0, 1)[row][None]
        weights = operands.weights[row][None]
        positions = torch.arange(length)
        slots = operands.block_table[row // next_n].long()[positions // PAGE] * PAGE + positions % PAGE
        keys, scales = pages.read_keys(operands.kv_cache, layout, slots)
        dot, absolute = exact.dots(q, keys)
        result[row, :length] = exact.logits_from_dots(dot, weights, scales)[0]
        terms = exact.logits_from_dots(absolute, weights.abs(), scales)[0]
        loss[row, :length] = (q.shape[-1] + q.shape[-2] + 8) * U64 * terms
    return result, loss


def best(operands: Any) -> torch.Tensor:
    """The k largest visible logits of each row, descending, float64 [T, k]; -inf where a row has fewer."""
    lens = operands.context_lens.flatten().tolist()
    result = torch.full((len(lens), operands.k), float("-inf"), dtype=torch.float64)
    for row, length in enumerate(lens):
        values = operands.logits[row, :length].double().sort(descending=True).values[: operands.k]
        result[row, : len(values)] = values
    return result


def make(text: str) -> dict[str, torch.Tensor]:
    """All tensors of the golden of one case, on the CPU. The bound is that of an IEEE float32 contract."""
    case = parse_case(text)
    operands = build(case, torch.device("cpu"))
    tensors = {name: getattr(operands, name) for name in sorted(files.TENSORS[case.stage] - {"exact", "bound"})}
    if case.stage == "topk":
        return tensors | {"exact": best(operands)}
    bound = expected(operands, Contract.default(case.layout, "cpu")).bound
    return tensors | {"exact": evaluate(operands)[0], "bound": bound}


def row(name: str, golden: str, status: Status, message: str = "", **more: Any) -> Row:
    """A row of the report, as the suite writes them."""
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
    """Rows of every golden (or those named): the file, the rebuilt case, then each implementation of its layout.

    only_used: leave out the goldens that no target is judged by.
    """
    try:
        manifest = files.read_manifest(folder)
    except GoldenError as error:
        yield row(REFERENCE, "manifest", Status.ERROR, str(error), repro="")
        return
    if not names:
        yield from housekeeping(folder, manifest)
    for name, entry in manifest.items():
        suited = [t for t in targets if t.stage == entry["stage"] and entry["layout"] in (None, t.layout)]
        if (names and name not in names) or (only_used and not suited):
            continue
        try:
            tensors, _ = files.read_golden(folder, name, entry)
        except GoldenError as error:
            yield row(REFERENCE, name, Status.ERROR, str(error))
            continue
        complaint = rebuilt(entry["case"], tensors)
        yield row(REFERENCE, name, Status.FAILED if complaint else Status.PASSED, complaint or "", case=entry["case"])
        if complaint:
            continue
        case = parse_case(entry["case"])
        for target in suited:
            yield judged(name, case, tensors, target, device)


def housekeeping(folder: Path, manifest: Mapping[str, Any]) -> Iterator[Row]:
    """One row for each golden that nothing uses, that is missing, or that waits to be accepted."""
    for name in sorted(set(manifest) - set(CASES)):
        yield row(
            REFERENCE, name, Status.FAILED, f"{folder / manifest[name]['file']}: unused golden: no case has its name"
        )
    for name in sorted(set(CASES) - set(manifest)):
        yield row(
            REFERENCE, name, Status.FAILED, f"{folder}: the case {name!r} has no golden: parity golden regenerate"
        )
    for name in sorted(set(CASES) & set(manifest)):
        if manifest[name]["case"] != CASES[name]:
            message = f"{folder / manifest[name]['file']}: made from another case than {name!r} now names"
            yield row(REFERENCE, name, Status.FAILED, message)
    for file in files.strays(folder, manifest):
        yield row(REFERENCE, file, Status.FAILED, f"{folder / file}: unused file: the manifest does not list it")
    for file in files.pending(folder):
        yield row(
            REFERENCE, file, Status.FAILED, f"{folder / file}: pending: parity golden diff, then accept or delete"
        )


def rebuilt(text: str, stored: Mapping[str, torch.Tensor]) -> str | None:
    """How the tensors that the case gives today differ from the stored ones, or None.

    Operands must agree to the bit. Exact results may differ by what two float64 evaluations in different orders may
    lose; bounds are sums of positive terms, which float64 keeps within a few hundred roundings.
    """
    try:
        case = parse_case(text)
        fresh = make(text)
    except ValueError as error:
        return f"the case cannot be built any more: {error}"
    for name, tensor in fresh.items():
        old = stored[name]
        if old.shape != tensor.shape or old.dtype != tensor.dtype:
            here, there = f"{tensor.dtype} {list(tensor.shape)}", f"{old.dtype} {list(old.shape)}"
            return f"{name}: the case gives {here}, the golden has {there}"
        if name in ("exact", "bound") and case.stage == "logits":
            continue
        differing = int((bits(old) != bits(tensor)).sum())
        if differing:
            return f"{name}: {differing:,} of {old.numel():,} elements are not those that the case gives"
    if case.stage == "logits":
        loss = evaluate(build(case, torch.device("cpu")))[1]
        return apart("exact", stored["exact"], fresh["exact"], 2 * loss) or apart(
            "bound", stored["bound"], fresh["bound"], 1024 * U64 * fresh["bound"].abs()
        )
    return None


def apart(name: str, old: torch.Tensor, new: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """The sentence that says where two float64 tensors differ by more than allowed (NaN equals NaN), or None."""
    same = (old == new) | (old.isnan() & new.isnan()) | ((old - new).abs() <= allowed)
    if bool(same.all()):
        return None
    where = (~same).nonzero()[0].tolist()
    return (
        f"{name}: {int((~same).sum()):,} elements differ, first at {where}: {old[*where]!s} stored, {new[*where]!s} now"
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, so that NaN compares equal to itself and -0 does not to +0."""
    return tensor.contiguous().view(torch.uint8)


def judged(
    name: str, case: Case, stored: Mapping[str, torch.Tensor], target: Implementation, device: torch.device
) -> Row:
    """One implementation against one golden: within its own contract's bound of the stored exact result."""
    more: dict[str, Any] = {"case": str(case), "op": case.stage, "layout": target.layout}
    more["repro"] = f"parity golden verify {name} {' '.join(target.arguments)}"
    if target.absent:
        return row(target.name, name, Status.NOT_RUN, target.absent, **more)
    with opened(target, device) as runner:
        outcome = runner.run(case)
    if outcome.unsupported:
        return row(target.name, name, Status.UNSUPPORTED, outcome.unsupported, **more)
    if outcome.output is None:
        return row(target.name, name, Status.FAILED if outcome.defect else Status.ERROR, str(outcome.complaint), **more)
    verdict = against(stored, outcome.output, outcome.operands, target)
    more |= {"ratio": verdict.ratio, "resolution": verdict.resolution}
    return row(target.name, name, verdict.status, verdict.message, **more)


def against(stored: Mapping[str, torch.Tensor], output: Any, operands: Any, target: Implementation) -> Verdict:
    """The verdict on one output. The exact values are the golden's; only the bound follows the contract."""
    if target.stage == "topk":
        slots, positions = output
        lens, table = operands.context_lens, operands.block_table
        more = {"case": operands.case, "impl": target.name, "level": "golden"}
        return judge_selection(slots, positions, operands.logits, operands.logits, lens, table, operands.k, **more)
    impl, level = target.name, "golden"
    tail = compare_tail(output, operands, target.contract, impl=impl, level=level)
    if not tail.passed:
        return tail
    if is_exact_data(operands, target.contract):
        return compare_exact(output, exact_expected(operands, target.contract), operands, impl=impl, level=level)
    wanted = expected(operands, target.contract)
    wanted = replace(wanted, logits=stored["exact"].to(wanted.logits.device))
    return compare_bounded(output, wanted, operands, contract=target.contract, impl=impl, level=level)


def provenance() -> dict[str, Any]:
    """What made a golden: versions, compiler knobs, and the digest of the sources that decide its content."""
    return {
        "versions": {"torch": torch.__version__, "triton": triton_version(), "python": platform.python_version()},
        "compiler": {knob: os.environ.get(knob) for knob in KNOBS},
        "sources": source_digest(),
    }


def source_digest() -> str:
    """sha256 over the names and texts of the modules that build cases and evaluate them."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for file in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def regenerate(folder: Path, cases: Mapping[str, str] | None = None) -> list[str]:
    """Write a pending file for every case and a pending manifest; the names written. Refused where CI is set."""
    files.refuse_in_ci("regenerate")
    folder.mkdir(parents=True, exist_ok=True)
    entries, made = {}, provenance()
    for name, text in (CASES if cases is None else cases).items():
        case = parse_case(text)
        file = f"{name}.safetensors"
        size, digest = files.write_golden(folder / files.pending_name(file), make(text), {"case": text})
        entries[name] = {"file": file, "bytes": size, "sha256": digest, "case": text, "stage": case.stage}
        entries[name] |= {"layout": case.layout if case.stage == "logits" else None, **made}
    (folder / files.pending_name(files.MANIFEST)).write_text(files.manifest_text(entries), encoding="utf-8")
    return list(entries)


def accept(folder: Path) -> list[str]:
    """Put the pending files in place; the names of the goldens that changed. Refused where CI is set."""
    files.refuse_in_ci("accept")
    return files.accept(folder)


def diff(folder: Path) -> list[str]:
    """What accepting the pending files would change, one line a tensor: elements, largest difference, or shape."""
    lines = []
    for pending in files.pending(folder):
        if not pending.endswith(".safetensors"):
            continue
        file = pending.replace(files.PENDING, "")
        new, _ = files.parse(folder / pending)
        if not (folder / file).is_file():
            lines.append(f"{file}: new, " + ", ".join(f"{name} {list(t.shape)}" for name, t in sorted(new.items())))
            continue
        try:
            old, _ = files.parse(folder / file)
        except GoldenError as error:
            lines.append(f"{error}; would be replaced")
            continue
        lines += [f"{file}: {line}" for line in compare(old, new)]
    return lines


def compare(old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Lines for the tensors of one golden that differ."""
    for name in sorted(set(old) | set(new)):
        if name not in old or name not in new:
            yield f"{name}: {'new' if name in new else 'gone'}"
        elif old[name].shape != new[name].shape or old[name].dtype != new[name].dtype:
            yield f"{name}: {old[name].dtype} {list(old[name].shape)} -> {new[name].dtype} {list(new[name].shape)}"
        elif not torch.equal(bits(old[name]), bits(new[name])):
            left, right = exact.widen(old[name]) if old[name].is_floating_point() else old[name].double(), None
            right = exact.widen(new[name]) if new[name].is_floating_point() else new[name].double()
            gap = (left - right).abs().nan_to_num(0.0)
            unequal = (left != right) & ~(left.isnan() & right.isnan())
            yield f"{name}: {int(unequal.sum()):,} of {left.numel():,} values differ, by at most {float(gap.max()):.3g}"

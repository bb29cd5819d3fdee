"""``parity probe``: learns the arithmetic of a GPU's dots, and the quick check of a stored model before it is used.

The search is in ``probe_search``, random dots are in ``probe_check``, Triton's dots in ``probe_kernel``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from parity.numerics.arithmetic import Grouped, named_model, stored_models
from parity.pages import layout as layouts
from parity.run import device as devices
from parity.tensorcore.probe_check import Finding, count_mismatches, probe
from parity.tensorcore.probe_search import DotUnit

DOTS = 65_536


def operand_of(layout: str) -> str | None:
    """Operand type of a layout's dots, as stored models name it; None where none was measured."""
    core = layouts.find(layout).core
    return named_model(core).operand if core else None


class Verified(NamedTuple):
    """A stored model compared with today's GPU. ``verified``: none of ``dots`` random dots differed."""

    operand: str
    model: Grouped
    verified: bool
    dots: int
    mismatches: int
    name: str

    def __str__(self) -> str:
        state = f"verified on {self.dots:,} dots"
        if not self.verified:
            state = f"contradicted by {self.mismatches:,} of {self.dots:,} dots; the proved bound serves"
        return f"{self.name} {self.model}, {state}"


def compare_on(
    device: torch.device | str = "cuda", *, names: Iterable[str] | None = None, dots: int = DOTS
) -> list[Verified]:
    """Checks the stored models of this architecture: those named, or those of the kernels' operands, bf16 and e4m3.

    Hypotheses are tried like measured models: what counts is that the dots of today's GPU, driver and compiler agree.
    Empty without a CUDA device or without a stored model; about a second each, most of it compiling one tile."""
    device = torch.device(device)
    if device.type != "cuda":
        return []
    from parity.tensorcore.probe_kernel import triton_unit

    def unit_of(operand: str, imprecise: int | None = None) -> DotUnit:
        return triton_unit(operand, device, imprecise=imprecise)

    return compare_models(devices.architecture(device), unit_of, names=names, dots=dots)


def compare_models(
    architecture: str,
    unit_of: Callable[..., DotUnit],
    *,
    names: Iterable[str] | None = None,
    dots: int = DOTS,
) -> list[Verified]:
    """``compare_on`` for any architecture name and any way to get a unit for an operand.

    ``unit_of(operand)``, or ``unit_of(operand, n)`` for a model of ``max_num_imprecise_acc=n``."""
    found = []
    wanted = usual_models(architecture) if names is None else set(names)
    for stored in stored_models():
        if stored.architecture != architecture or stored.name not in wanted:
            continue
        mode = () if stored.max_num_imprecise_acc is None else (stored.max_num_imprecise_acc,)
        wrong, compared = count_mismatches(unit_of(stored.operand, *mode), stored.arithmetic, dots)
        found.append(Verified(stored.operand, stored.arithmetic, not wrong, compared, wrong, stored.name))
    return found


def usual_models(architecture: str) -> set[str]:
    """Names of the stored models of the kernels' own dots on an architecture: bf16 and e4m3 in the default mode."""
    return {
        stored.name
        for stored in stored_models()
        if stored.architecture == architecture
        and stored.max_num_imprecise_acc is None
        and stored.operand in map(operand_of, layouts.names())
    }


def tile_shapes(architecture: int, layout: str) -> list[tuple[int, int, int]]:
    """(rows, columns, warps) of every tile that the kernels' configurations use on an architecture such as 90."""
    from impl import configs

    found = {
        (config.block, config.columns, config.num_warps)
        for config in configs.every(architecture)
        if config.layout == layout
    }
    return sorted(found, key=lambda shape: (-shape[0] * shape[1], shape))


def units(device: torch.device, operands: Sequence[str]) -> Iterable[tuple[DotUnit, bool]]:
    """Every unit to probe, and whether it is the first of its operand (which gets the full check)."""
    from impl import configs
    from parity.tensorcore.probe_kernel import triton_unit

    major, minor = torch.cuda.get_device_capability(device)
    architecture = 10 * major + minor
    for layout in layouts.names():
        operand = operand_of(layout)
        if operand is None or operand not in operands or not configs.supports(architecture, layout):
            continue
        for index, (rows, columns, warps) in enumerate(tile_shapes(architecture, layout)):
            unit = triton_unit(operand, device, rows=rows, columns=columns, warps=warps)
            yield dataclasses.replace(unit, name=f"{operand}, tile {rows} x {columns}, {warps} warps"), index == 0
        if operand == "e4m3" and major == 9:
            yield triton_unit(operand, device, imprecise=32), True
    for operand in ("fp16", "tf32"):
        if operand in operands:
            yield triton_unit(operand, device), True


def report(device: torch.device, operands: Sequence[str], say: Callable[[str], None] = print) -> dict[str, Any]:
    """Probes the GPU; prints as it goes and returns what ``--json`` writes.

    Each operand is searched and checked on more than a million random dots in its largest tile; the other tile shapes
    of the kernels are searched anew and checked on 65,536 each."""
    start = time.perf_counter()
    findings: list[Finding] = []
    for unit, first in units(device, operands):
        per_distribution = (1 << 20) // 5 + 1 if first else DOTS // 5 + 1
        finding = probe(unit, tiles=-(-per_distribution // (unit.rows * unit.columns)))
        findings.append(finding)
        lines = finding.lines()
        for line in lines if first else lines[:1] if finding.model else lines[:2]:
            say(line)
    stored = compare_on(device)
    for result in stored:
        say(f"stored: {result}")
    return {
        "provenance": devices.provenance(device),
        "findings": [finding.as_dict() for finding in findings],
        "stored": [{**result._asdict(), "model": dataclasses.asdict(result.model)} for result in stored],
        "seconds": time.perf_counter() - start,
        "exit": 0 if all(map(fits, findings)) and all(result.verified for result in stored) else 1,
    }


def fits(finding: Finding) -> bool:
    """Whether a unit's dots are accounted for: by a model, or by the bound of an ieee dot."""
    return finding.model is not None or finding.ieee_ratio <= 1

"""What the verified model is worth on a GPU: the resolution of an fp8 verdict before and after, and three faults that
only the finer one sees.

`python tools/sharpness.py [--json FILE]`. On a CPU the models simulate the GPU, which tests the judgement but no GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import torch

from parity.command import write_json
from parity.domain.contract import Contract
from parity.explain.live import Operands
from parity.numerics.arithmetic import named_model
from parity.numerics.bounds import expected
from parity.numerics.headsum import HeadSum
from parity.ops.paged_logits.judge import Verdict, compare_bounded
from parity.run import device as devices
from parity.run import interpreter
from parity.run.implementation import Implementation
from parity.tensorcore.probe import compare_models, compare_on
from parity.tensorcore.probe_search import DotUnit
from parity.tensorcore.verification import Verification, with_verified_dot
from reference.formats import e4m3_encode, fp8_amax_scale
from reference.pages import PAGE, page_bytes, write_keys

HEADS = 64
KEY, HEAD = 77, 5
"""The key whose scale and the head whose weight the faults touch."""

Kernel = Callable[[Operands], torch.Tensor]
Dots = Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]


def gaussian(device: torch.device, *, requests: int, positive: bool) -> Operands:
    """fp8 operands of gaussian queries and keys, ``requests`` rows of 64 heads against 512 keys each.

    positive: head weights of one sign, so that logits do not cancel."""
    g = torch.Generator().manual_seed(0)
    keys = 512
    pages = keys // PAGE
    order = torch.randperm(requests * pages, generator=g)
    pool = torch.zeros(order.numel(), page_bytes("fp8"), dtype=torch.uint8)
    kv_cache = pool.view(order.numel(), PAGE, 1, page_bytes("fp8") // PAGE)
    position = torch.arange(keys)
    for request in range(requests):
        own = order[request * pages : (request + 1) * pages]
        values = torch.randn(keys, 128, generator=g)
        scales = fp8_amax_scale(values)
        codes = e4m3_encode(values / scales[:, None]).view(torch.float8_e4m3fn)
        write_keys(kv_cache, "fp8", own[position // PAGE] * PAGE + position % PAGE, codes, scales)
    q = torch.randn(requests, 1, HEADS, 128, generator=g)
    scale = fp8_amax_scale(q)
    weights = torch.randn(requests, HEADS, generator=g) * scale[:, 0]
    return Operands(
        q=e4m3_encode(q / scale[..., None]).view(torch.float8_e4m3fn).to(device),
        kv_cache=kv_cache.to(device),
        weights=(weights.abs() if positive else weights).to(device),
        context_lens=torch.full((requests, 1), keys, dtype=torch.int32, device=device),
        block_table=order.view(requests, pages).to(torch.int32).to(device),
        max_context_len=keys,
    )


def from_dots(operands: Operands, dots: Dots, imprecise: bool) -> torch.Tensor:
    """Logits float32 [T, W] from a matrix unit's dots, heads added in sequence."""
    from reference.pages import read_keys

    order = HeadSum(".".join(map(str, range(HEADS))))
    rows = []
    position = torch.arange(operands.max_context_len, device=operands.q.device)
    for row in range(operands.q.shape[0]):
        slots = operands.block_table[row].long()[position // PAGE] * PAGE + position % PAGE
        keys, scales = read_keys(operands.kv_cache, "fp8", slots)
        assert scales is not None
        per_head = dots(operands.q[row, 0], keys, imprecise)
        rows.append(order.evaluate(per_head, operands.weights[row], scales))
    return torch.stack(rows)


def gpu_dots(device: torch.device) -> Dots:
    """Dots [H, S] of e4m3 q [H, 128] and keys [S, 128] from the GPU's own instruction; S a multiple of 128."""
    from parity.tensorcore.probe_kernel import triton_unit

    units = {mode: triton_unit("e4m3", device, imprecise=32 if mode else None) for mode in (False, True)}

    def dots(q: torch.Tensor, keys: torch.Tensor, imprecise: bool) -> torch.Tensor:
        tiles = keys.contiguous().view(torch.uint8).view(-1, 128, 128).view(keys.dtype)
        b = q.contiguous().view(torch.uint8).expand(tiles.shape[0], *q.shape).contiguous().view(q.dtype)
        return units[imprecise].dot(tiles, b).flatten(0, 1).T.contiguous()

    return dots


def simulated_dots(q: torch.Tensor, keys: torch.Tensor, imprecise: bool) -> torch.Tensor:
    """The same from the stored models of sm_90."""
    return named_model("sm_90 e4m3 imprecise 32" if imprecise else "sm_90 e4m3").arithmetic.exact_dot(q, keys)


def perturbed(operands: Operands, fault: str) -> Operands:
    """Operands as a faulty kernel would read them."""
    if fault == "weight":
        weights = operands.weights.clone()
        weights[:, HEAD] *= 1 + 1e-3
        return dataclasses.replace(operands, weights=weights)
    pool = operands.kv_cache.clone()
    for slot in (operands.block_table[:, KEY // PAGE].long() * PAGE + KEY % PAGE).tolist():
        page = pool.view(-1, page_bytes("fp8"))[slot // PAGE]
        page[PAGE * 128 :].view(torch.float32)[slot % PAGE] *= 1 + 1e-4
    return dataclasses.replace(operands, kv_cache=pool)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One kernel, right or faulty, under both contracts."""

    name: str
    wrong: bool
    coarse: Verdict
    fine: Verdict

    @property
    def shown(self) -> bool:
        """Whether the finer contract tells, and only it: the coarse one passes everything here."""
        return self.coarse.passed and self.fine.passed != self.wrong

    def as_dict(self) -> dict[str, Any]:
        """JSON types only."""
        verdicts = {"bound": self.coarse, "verified": self.fine}
        return {
            "name": self.name,
            "wrong": self.wrong,
            "shown": self.shown,
            **{
                key: {"status": str(v.status), "ratio": v.ratio, "resolution": v.resolution, "message": v.message}
                for key, v in verdicts.items()
            },
        }


def trials(operands: Operands, kernel: Kernel, dots: Dots, coarse: Contract, fine: Contract) -> list[Trial]:
    """The kernel as it is, the same logits from dots, then the three faults; judged on the true operands."""
    outputs = [
        ("the kernel", False, kernel(operands)),
        ("the same from its dots, heads in sequence", False, from_dots(operands, dots, False)),
        ("one key's scale 1.0001 times too large", True, kernel(perturbed(operands, "scale"))),
        ("max_num_imprecise_acc=32", True, from_dots(operands, dots, True)),
        ("one head's weight 1.001 times too large", True, kernel(perturbed(operands, "weight"))),
    ]
    wanted = {contract: expected(operands, contract) for contract in (coarse, fine)}
    return [
        Trial(name, wrong, *(compare_bounded(out, wanted[c], operands, contract=c) for c in (coarse, fine)))
        for name, wrong, out in outputs
    ]


def on_gpu(device: torch.device) -> tuple[list[Any], Kernel, Dots, Contract]:
    """The GPU's verified models, our kernel, the GPU's dots, and the contract before verification."""
    from impl.logits_fp8 import fp8_paged_mqa_logits

    def kernel(operands: Operands) -> torch.Tensor:
        return fp8_paged_mqa_logits(**operands.kwargs())

    found = compare_on(device, names=["sm_90 e4m3", "sm_90 e4m3 imprecise 32"])
    return list(found), kernel, gpu_dots(device), Contract.default("fp8", device)


def simulated() -> tuple[list[Any], Kernel, Dots, Contract]:
    """The same of a GPU that the stored models of sm_90 play."""

    def unit_of(operand: str) -> DotUnit:
        return DotUnit(operand, named_model("sm_90 e4m3").arithmetic.exact_dot)

    def kernel(operands: Operands) -> torch.Tensor:
        return from_dots(operands, simulated_dots, False)

    found = compare_models("sm_90", unit_of, names=["sm_90 e4m3"], dots=5)
    return found, kernel, simulated_dots, Contract.default("fp8", "cuda", capability=(9, 0))


def report(device: torch.device, say: Callable[[str], None] = print, *, requests: int = 16) -> dict[str, Any]:
    """Everything that ``--json`` writes. ``exit`` is 0 where each trial of weights of both signs came out as it must:
    the coarse contract passes all five, the fine one only the right two."""
    found, kernel, dots, coarse = on_gpu(device) if device.type == "cuda" else simulated()
    kernel_of_ours = Implementation("triton-fp8", "paged_logits", "fp8", coarse, kernel="triton")
    fine = with_verified_dot(kernel_of_ours, Verification(models=tuple(found)), "sm_90").contract
    for result in found:
        say(f"dot arithmetic: {result}")
    tables: list[dict[str, Any]] = []
    for signs, positive in (("both signs", False), ("one sign", True)):
        operands = gaussian(device, requests=requests, positive=positive)
        rows = trials(operands, kernel, dots, coarse, fine)
        before, after = rows[0].coarse.resolution, rows[0].fine.resolution
        say(f"weights of {signs}: resolution {before:.3g} by the bound, {after:.3g} by the model")
        for row in rows:
            said = [f"{name} {v.status} ({v.ratio:.3g})" for name, v in (("bound", row.coarse), ("model", row.fine))]
            say(f"  {row.name}: {', '.join(said)}")
        tables.append({"weights": signs, "before": before, "after": after, "trials": [row.as_dict() for row in rows]})
    good = fine.dot_verified and all(trial["shown"] for trial in tables[0]["trials"])
    return {
        "provenance": devices.provenance(device),
        "simulated": device.type != "cuda",
        "models": [str(result) for result in found],
        "tables": tables,
        "exit": 0 if good else 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write everything found to FILE")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    options = parser.parse_args()
    device = devices.resolve(options.device)
    interpreter.prepare(device.type)
    found = report(device, requests=16 if device.type == "cuda" else 2)
    write_json(options.json, found)
    return int(found["exit"])


if __name__ == "__main__":
    sys.exit(main())

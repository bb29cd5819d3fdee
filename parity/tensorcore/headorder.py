"""Reads the order in which a compiled Triton kernel adds the heads of a logit, from its PTX; no GPU is needed.

Follows the accumulators of `wgmma` through ReLU, products, fused multiply-adds, additions and lane shuffles to where
the sum is used. Only kernels whose matrix instruction is wgmma (sm_90) can be read.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

from parity.numerics.headsum import HeadSum

LANES = 4
"""Lanes that share a row of a wgmma accumulator."""
_INSTRUCTION = re.compile(r"(?:@!?%\w+\s+)?([\w.]+)\s+(%\w+), (.*);")
_MULTIPLY_ADD = re.compile(r"wgmma\.mma_async\S* \{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class _Node:
    """What a register holds: an accumulator element, its ReLU, a product, a sum, or another lane's value.

    kind "dot" and "relu": set, index; "product", "fma": weight register and parts; "add"; "shuffle": distance;
    "scaled": a sum times one register."""

    kind: str
    parts: tuple[Any, ...]


@functools.lru_cache(maxsize=256)
def read_order(ptx: str, heads: int) -> HeadSum:
    """The one order in which every logit of the kernel is added. ValueError where there is no such order: a head is
    missing or added twice, two logits are added differently, or an instruction in between is not known."""
    roots = list(_roots(ptx))
    if not roots:
        raise ValueError("the kernel has no sum of wgmma accumulators that could be read")
    found: dict[HeadSum, int] = {}
    weights: dict[int, str] = {}
    for root in roots:
        body = root.parts[0] if root.kind == "scaled" else root
        for lane in range(LANES):
            rows: set[tuple[Any, ...]] = set()
            text = _text(_tree(body, lane, heads, rows, weights))
            if len(rows) != 1:
                raise ValueError(f"a sum adds heads of {len(rows)} logits")
            order = HeadSum(text)  # refuses a head that is missing or comes twice
            found[order] = found.get(order, 0) + 1
    if len(found) != 1:
        listed = "; ".join(f"{count} of {text}" for text, count in found.items())
        raise ValueError(f"the logits of one kernel are added in {len(found)} orders: {listed}")
    columns: dict[str, int] = {}
    for column, register in weights.items():
        if columns.setdefault(register, column) != column:
            raise ValueError(f"columns {columns[register]} and {column} are multiplied by one weight")
    order = next(iter(found))
    if order.heads != heads:
        raise ValueError(f"the sum adds {order.heads} heads, expected {heads}")
    return order


def _roots(ptx: str) -> Iterator[_Node]:
    """Each sum of accumulators at the place where something else than arithmetic uses it."""
    known: dict[str, _Node] = {}
    seen: set[int] = set()
    for line in ptx.splitlines():
        line = line.strip()
        multiply = _MULTIPLY_ADD.match(line)
        if multiply:
            registers = [name.strip() for name in multiply[1].split(",")]
            known |= {name: _Node("dot", (registers[0], i)) for i, name in enumerate(registers)}
            continue
        instruction = _INSTRUCTION.match(line)
        if not instruction:
            continue
        name, target, rest = instruction[1], instruction[2], instruction[3]
        arguments = [part.strip() for part in rest.split(",")]
        operands = [known.get(argument) for argument in arguments]
        if not any(operands):
            known.pop(target, None)
            continue
        node = _node(name, arguments, operands)
        if node is not None:
            known[target] = node
            continue
        known.pop(target, None)
        for operand in operands:
            if operand is not None and operand.kind in ("add", "fma", "scaled") and id(operand) not in seen:
                seen.add(id(operand))
                yield operand


def _node(name: str, arguments: list[str], operands: list[_Node | None]) -> _Node | None:
    """The node that an instruction makes of known operands; None if it is no part of a sum."""
    if name == "mov.b32":
        return operands[0]
    if name == "max.NaN.f32" and operands[0] is not None and arguments[1] == "0f00000000":
        return _Node("relu", operands[0].parts)
    if name.startswith("shfl.sync.bfly") and operands[0] is not None:
        return _Node("shuffle", (operands[0], int(arguments[1])))
    if name in ("mul.f32", "mul.rn.f32"):
        for place in (0, 1):
            part = operands[place]
            if part is not None and operands[1 - place] is None:
                return _Node("product" if part.kind == "relu" else "scaled", (part, arguments[1 - place]))
    if name == "fma.rn.f32" and operands[2] is not None:
        for place in (0, 1):
            part = operands[place]
            if part is not None and part.kind == "relu" and operands[1 - place] is None:
                return _Node("fma", (part, arguments[1 - place], operands[2]))
    if name in ("add.f32", "add.rn.f32") and all(operands):
        return _Node("add", (operands[0], operands[1]))
    return None


def _tree(node: _Node, lane: int, heads: int, rows: set[tuple[Any, ...]], weights: dict[int, str]) -> Any:
    """The tree of a lane: chains as lists of heads, sums as pairs. Notes which logit and which weights it takes."""
    if node.kind == "shuffle":
        return _tree(node.parts[0], lane ^ node.parts[1], heads, rows, weights)
    if node.kind == "add":
        left, right = (_tree(part, lane, heads, rows, weights) for part in node.parts)
        # Addition commutes; the part with the smallest head comes first, so that every lane has the same text.
        return (left, right) if min(_heads(left)) < min(_heads(right)) else (right, left)
    if node.kind not in ("product", "fma"):
        raise ValueError(f"a {node.kind} stands inside a head sum")
    part, register = node.parts[0], node.parts[1]
    block, index = part.parts
    # m64nNk: a lane of a quad holds columns 2l and 2l + 1 of every eight, of one row and of the row eight further down.
    column = index // 4 * 8 + index % 2
    if weights.setdefault(column, register) != register:
        raise ValueError(f"column {column} is multiplied by two weights")
    head = column + 2 * lane
    rows.add((block, index // 2 % 2, head // heads))
    if node.kind == "product":
        return [head % heads]
    chain = _tree(node.parts[2], lane, heads, rows, weights)
    if not isinstance(chain, list):
        raise ValueError("a product is fused onto a sum of chains")
    return [*chain, head % heads]


def _heads(tree: Any) -> list[int]:
    return tree if isinstance(tree, list) else [head for part in tree for head in _heads(part)]


def _text(tree: Any) -> str:
    return ".".join(map(str, tree)) if isinstance(tree, list) else f"({_text(tree[0])}+{_text(tree[1])})"


def compiler() -> tuple[str, bool]:
    """Triton's version, and whether it contracts products and sums of our kernels."""
    import triton

    from impl import configs

    return str(triton.__version__), configs.fused()


def compiled(config: str) -> list[str]:
    """The orders of every kernel of a configuration that this process has compiled for its devices: one text each, or
    the reason why there is no single order."""
    from impl import kernels

    found = []
    for kernel in (kernels.decode, kernels.prefill):
        for caches in kernel.device_caches.values():
            for built in caches[0].values():
                name, heads, dots = _configuration(kernel, built)
                if name == config and not dots:
                    try:
                        found.append(str(read_order(built.asm["ptx"], heads)))
                    except ValueError as error:
                        found.append(str(error))
    return found


def _configuration(kernel: Any, built: Any) -> tuple[str, int, bool]:
    """(a compiled kernel's configuration as it prints, its heads, whether it returns dots)."""
    from impl.configs import Config

    values = {kernel.arg_names[path[0]]: getattr(value, "value", value) for path, value in built.src.constants.items()}
    layout = "fp8" if values["FP8"] else "bf16"
    meta = built.metadata
    shape = (values["HEADS"], values["BLOCK"], values["ROW_TILE"], 0, meta.num_warps, meta.num_stages)
    return str(Config(kernel.__name__, layout, *shape)), values["HEADS"], bool(values["DOTS"])

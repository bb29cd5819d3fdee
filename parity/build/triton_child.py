"""One Triton kernel compiled for an architecture, and what the compiler says about it: the child process of the compile
gate, in which nothing is interpreted and in which a compiler may abort.

Reads a JSON list of [architecture, configuration's fields] from stdin and writes one JSON row per line.
"""

import contextlib
import io
import json
import re
import sys
import time
from typing import Any

from impl import configs
from parity.build.rows import Row, kernel_row
from parity.pages.layout import find

_DIVISIBLE = [["tt.divisibility", 16]]
# The three generations of warp- and block-wide matrix instructions in PTX; their names hold shape and operand type.
_MATRIX = re.compile(r"(?<![\w.])(wgmma\.mma_async|tcgen05\.mma|mma)\.([\w.:]+)")
_TYPES = re.compile(r"e4m3|bf16|f16|tf32|f8f6f4|s8")


def compile_one(arch: int, config: configs.Config) -> Row:
    """Row of one configuration (see `parity.build.rows`): registers, spills, shared memory, instruction, status."""
    import triton
    from triton.backends.compiler import GPUTarget

    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True
    log, start = io.StringIO(), time.monotonic()
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": configs.fused()}
    try:
        with contextlib.redirect_stdout(log):
            built = triton.compile(source(config), target=GPUTarget("cuda", arch, 32), options=options)
    # Whatever stops the compiler is the finding: it becomes a failed row, never a skip.
    except Exception as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        return about(arch, config, "failed", f"does not compile: {type(error).__name__}: {first}")
    limit = configs.SHARED_LIMIT_KIB[arch] * 1024
    found = about(arch, config) | {
        "registers": _number(r"Used (\d+) registers", log.getvalue()),
        "spill_stores": _number(r"(\d+) bytes spill stores", log.getvalue()),
        "spill_loads": _number(r"(\d+) bytes spill loads", log.getvalue()),
        "shared": built.metadata.shared,
        "shared_limit": limit,
        "instruction": instruction(built.asm["ptx"]),
        "head_order": head_order(built.asm["ttgir"]),
        "seconds": round(time.monotonic() - start, 2),
    }
    reason = ""
    if found["shared"] > limit:
        reason = f"needs {found['shared']} bytes of shared memory, sm_{arch} has {limit}"
    elif found["spill_stores"] or found["spill_loads"]:
        reason = "spills registers"
    elif not found["instruction"]:
        reason = "uses no matrix instruction"
    return found | ({"status": "failed", "reason": reason} if reason else {})


def about(arch: int, config: configs.Config, status: str = "passed", reason: str = "") -> Row:
    """The row of a configuration without what compiling it gives."""
    return kernel_row(arch, config.kernel, config.layout, status, reason, config=str(config), heads=config.heads)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if not found:
        raise RuntimeError(f"the assembler's log does not say {pattern!r}: {text!r}")
    return int(found[1])


def instruction(ptx: str) -> str:
    """The matrix instructions of a kernel's PTX: kind, shape and operand type, such as `wgmma m64n64k16 bf16`; empty if
    there is none, and joined by commas if there are several."""
    found: dict[str, None] = {}
    for match in _MATRIX.finditer(ptx):
        kind = {"wgmma.mma_async": "wgmma", "tcgen05.mma": "tcgen05", "mma": "mma.sync"}[match[1]]
        shape = re.search(r"m\d+n\d+k\d+", match[2])
        types = _TYPES.findall(match[2])
        found[" ".join(filter(None, [kind, shape and shape[0], types[0] if types else ""]))] = None
    return ", ".join(found)


def source(config: configs.Config) -> Any:
    """The kernel with the argument types and alignment of a typical call (344 pages wide)."""
    import triton
    from triton.compiler import ASTSource

    from impl import kernels

    kernel, fp8 = getattr(kernels, config.kernel), find(config.layout).scale > 0
    next_n = config.row_tile if config.kernel == "decode" else 4096
    width = 344 * 64
    pointers = {
        "q": "*fp8e4nv" if fp8 else "*bf16",
        "kv_cache": "*u8" if fp8 else "*bf16",
        "weights": "*fp32",
        "context_lens": "*i32",
        "block_table": "*i32",
        "out": "*fp32",
    }
    integers = {
        "next_n": next_n,
        "groups": 1 if config.kernel == "decode" else 64,
        "limit": width,
        "fill": width,
        "tiles": config.trips,
        "steps": config.trips,
        "q_stride_b": next_n * config.heads * 128,
        "q_stride_n": config.heads * 128,
        "q_stride_h": 128,
        "page_stride": 528 if fp8 else 1024,
        "w_stride_row": config.heads,
        "w_stride_h": 1,
        "len_stride_b": next_n,
        "len_stride_n": 1,
        "table_stride": 344,
        "out_stride": width,
    }
    constants = {
        "FP8": fp8,
        "HEADS": config.heads,
        "BLOCK": config.block,
        "ROW_TILE": config.row_tile,
        "ROWS": triton.next_power_of_2(config.trips * config.row_tile),
        "TILES": 0,
        "STEPS": 0,
        "DOTS": False,
        "INTERPRET": False,
    }
    signature: dict[str, str] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    fixed: dict[str, Any] = {}
    for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True)):
        if name in pointers:
            signature[name] = pointers[name]
            attributes[(index,)] = _DIVISIBLE
        elif name in constants or (integers[name] == 1 and not parameter.do_not_specialize):
            # A launch specialises integers that equal 1 in the same way.
            signature[name] = "constexpr"
            fixed[name] = constants.get(name, 1)
        else:
            signature[name] = "i32"
            if integers[name] % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = _DIVISIBLE
    return ASTSource(kernel, signature=signature, constexprs=fixed, attrs=attributes)


def head_order(ttgir: str) -> str:
    """Which registers, lanes and warps hold the heads that one logit adds up, as the compiled head sum has them.

    Read from the layout of the sum's operand `[keys, rows, heads]`: basis vectors along the heads, in order. Two
    kernels of the same compiler with the same string add in the same order. ValueError when there is no such sum.
    """
    operand = re.search(r"axis = 2 : i32.*?\}\) : \(tensor<\d+x\d+x\d+xf32, (#\w+)>\)", ttgir, re.S)
    if not operand:
        raise ValueError("no reduction over heads in the compiled kernel")
    layout = re.search(rf"^{operand[1]} = (.*)$", ttgir, re.M)
    if not layout or "ttg.linear" not in layout[1]:
        raise ValueError(f"the head sum's layout is not linear: {layout[1] if layout else operand[1]}")
    parts = []
    for place in ("register", "lane", "warp"):
        listed = re.search(rf"{place} = \[((?:\[[\d, ]*\](?:, )?)*)\]", layout[1])
        bases = re.findall(r"\[\d+, \d+, (\d+)\]", listed[1]) if listed else []
        parts.append(f"{place} {' '.join(base for base in bases if base != '0') or '-'}")
    return ", ".join(parts)


def main() -> None:
    for arch, fields in json.loads(sys.stdin.read()):
        print(json.dumps(compile_one(arch, configs.Config(**fields))), flush=True)


if __name__ == "__main__":
    main()

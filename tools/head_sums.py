"""Reads the order of the head sum off every launch configuration that the present Triton compiles; no GPU is needed.

`python tools/head_sums.py [ARCHITECTURE]` prints a record for `fixtures/truth/head_sums.json`.
"""

import collections
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

from impl import configs
from parity.build.triton_child import source
from parity.tensorcore.headorder import read_order


def read_all(arch: int) -> dict[str, Any]:
    """The record of an architecture under the present compiler.

    ``orders`` by heads (what most configurations have), ``exceptions`` by configuration: another order's text, or None
    where the kernel has no single one. Compiles each kernel, so never under TRITON_INTERPRET=1."""
    found: dict[int, dict[str, str | None]] = collections.defaultdict(dict)
    for config in configs.every(arch):
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": configs.fused()}
        built = triton.compile(source(config), target=GPUTarget("cuda", arch, 32), options=options)
        try:
            found[config.heads][str(config)] = str(read_order(built.asm["ptx"], config.heads))
        except ValueError as error:
            if "in 2 orders" not in str(error):
                raise
            found[config.heads][str(config)] = None
    orders: dict[str, str | None] = {}
    exceptions: dict[str, str | None] = {}
    for heads, texts in sorted(found.items()):
        usual = collections.Counter(texts.values()).most_common(1)[0][0]
        orders[str(heads)] = usual
        exceptions |= {config: text for config, text in texts.items() if text != usual}
    fused = configs.fused()
    return {
        "architecture": f"sm_{arch}",
        "triton": [triton.__version__],
        "fp_fusion": fused,
        "orders": orders,
        "exceptions": exceptions,
    }


if __name__ == "__main__":
    print(json.dumps(read_all(int(sys.argv[1].removeprefix("sm_")) if len(sys.argv) > 1 else 90), indent=1))

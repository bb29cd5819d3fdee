"""The operation store: pooled keys through norm, rotary, Hadamard and rounding into pages."""

from parity.ops.store import call
from parity.ops.store.case import ABOUT, StoreCase
from parity.ops.store.operands import build_store
from parity.run.operation import Operation, later

OPERATION = Operation(
    name="store",
    about="pooled keys through norm, rotary, Hadamard and rounding into pages",
    case=StoreCase,
    build=build_store,
    inspect=call.inspect,
    collect=call.collect,
    kept=call.kept,
    restore=lambda operands: operands.restore(),
    replay=call.replay,
    light=call.light,
    layouts=True,
    verb="writes",
    reduce=later("parity.ops.store.reduce:reduce"),
    data=ABOUT,
    domain=later("parity.ops.store.domain:DOMAIN"),
    checks=later("parity.ops.store.checks:CHECKS"),
    implementations=later("parity.ops.store.builtin:implementations"),
    faults=later("parity.ops.store.faults:MODELS"),
    staged=later("parity.ops.store.faults.diagnosis:function"),
    hooks={
        "truths": later("parity.ops.store.floors:TRUTHS"),
        "diagnosis": later("parity.ops.store.faults.diagnosis:DIAGNOSIS"),
    },
)

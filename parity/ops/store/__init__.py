"""The operation store: pooled keys through norm, rotary, Hadamard and rounding into pages."""

from collections.abc import Mapping, Sequence
from typing import Any

from parity.ops.store import call
from parity.ops.store.case import ABOUT, StoreCase
from parity.ops.store.operands import build_store
from parity.run.operation import Operation


def _checks() -> Sequence[Any]:
    from parity.ops.store import checks, semantics

    return [*checks.CHECKS, *semantics.CHECKS]


def _reduce(*given: Any) -> Any:
    from parity.ops.store.reduce import reduce

    return reduce(*given)


def _implementations(device: Any) -> Mapping[str, Any]:
    from parity.ops.store.builtin import implementations

    return implementations(device)


OPERATION = Operation(
    name="store",
    about="pooled keys through norm, rotary, Hadamard and rounding into pages",
    case=StoreCase,
    build=build_store,
    inspect=call.inspect,
    collect=call.collect,
    restore=lambda operands: operands.restore(),
    replay=call.replay,
    light=call.light,
    layouts=True,
    verb="writes",
    reduce=_reduce,
    data=ABOUT,
    checks=_checks,
    implementations=_implementations,
)

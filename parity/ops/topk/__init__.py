"""The operation topk: the slots of the k largest scores of each row."""

from collections.abc import Mapping, Sequence
from typing import Any

from parity.ops.topk import call
from parity.ops.topk.case import TopkCase
from parity.ops.topk.operands import build_topk
from parity.ops.topk.scores import ABOUT
from parity.run import graph
from parity.run.operation import Operation


def _checks() -> Sequence[Any]:
    from parity.ops.topk.checks import CHECKS

    return CHECKS


def _reduce(*given: Any) -> Any:
    from parity.ops.topk.reduce import reduce

    return reduce(*given)


def _implementations(device: Any) -> Mapping[str, Any]:
    from parity.ops.topk.builtin import implementations

    return implementations(device)


OPERATION = Operation(
    name="topk",
    about="the slots of the k largest scores of each row",
    case=TopkCase,
    build=build_topk,
    inspect=call.inspect,
    replay=graph.replay,
    light=call.light,
    reduce=_reduce,
    data=ABOUT,
    checks=_checks,
    implementations=_implementations,
)

"""The operation topk: the slots of the k largest scores of each row."""

from parity.ops.topk import call
from parity.ops.topk.case import TopkCase
from parity.ops.topk.operands import build_topk
from parity.ops.topk.scores import ABOUT
from parity.run import graph
from parity.run.operation import Operation, later

OPERATION = Operation(
    name="topk",
    about="the slots of the k largest scores of each row",
    case=TopkCase,
    build=build_topk,
    inspect=call.inspect,
    replay=graph.replay,
    light=call.light,
    reduce=later("parity.ops.topk.reduce:reduce"),
    data=ABOUT,
    domain=later("parity.ops.topk.domain:DOMAIN"),
    checks=later("parity.ops.topk.checks:CHECKS"),
    implementations=later("parity.ops.topk.builtin:implementations"),
    faults=later("parity.ops.topk.faults:MODELS"),
    staged=later("parity.ops.topk.faults.diagnosis:function"),
    hooks={
        "golden": later("parity.ops.topk.golden:GOLDEN"),
        "diagnosis": later("parity.ops.topk.faults.diagnosis:DIAGNOSIS"),
    },
)

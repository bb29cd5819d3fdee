"""The operation paged_logits: the indexer's score of every key for every row, over a paged cache."""

from dataclasses import replace

from parity.ops.paged_logits import call
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.operands import build_logits
from parity.pages.values import CLASSES
from parity.run import graph
from parity.run.operation import Operation, later

DOTS = Operation(
    name="paged_logits.dots",
    about="the dots of every head, which logits hide",
    case=Case,
    build=build_logits,
    arguments=call.dots_arguments,
    inspect=call.inspect_dots,
    light=call.light,
    layouts=True,
)

OPERATION = replace(
    DOTS,
    name="paged_logits",
    about="the indexer's score of every key for every row, over a paged cache",
    arguments=call.arguments,
    inspect=call.inspect,
    replay=graph.replay,
    arithmetic=lambda contract: contract.describe_dot(),
    companion=DOTS,
    reduce=later("parity.ops.paged_logits.reduce:reduce"),
    data={name: each.about for name, each in CLASSES.items()},
    checks=later("parity.ops.paged_logits.checks:CHECKS"),
    implementations=later("parity.ops.paged_logits.builtin:implementations"),
    faults=later("parity.ops.paged_logits.faults:MODELS"),
    domain=later("parity.ops.paged_logits.domain:DOMAIN"),
    staged=later("parity.ops.paged_logits.faults.diagnosis:function"),
    hooks={
        "golden": later("parity.ops.paged_logits.golden:GOLDEN"),
        "truths": later("parity.ops.paged_logits.predicted:TRUTHS"),
        "diagnosis": later("parity.ops.paged_logits.faults.diagnosis:DIAGNOSIS"),
    },
)

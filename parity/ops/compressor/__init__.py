"""The operation compressor: tokens to pooled keys, call by call."""

from parity.ops.compressor import call
from parity.ops.compressor.case import ABOUT, CompressorCase
from parity.ops.compressor.operands import build_compressor
from parity.run.operation import Operation, later

OPERATION = Operation(
    name="compressor",
    about="tokens to pooled keys, call by call",
    case=CompressorCase,
    build=build_compressor,
    inspect=call.inspect,
    invoke=call.invoke,
    collect=call.collect,
    kept=call.kept,
    equal=call.equal,
    restore=call.restore,
    reduce=lambda case, still_fails, budget: case,  # a script of calls is as small as Hypothesis has made it
    data=ABOUT,
    checks=later("parity.ops.compressor.checks:CHECKS"),
    faults=later("parity.ops.compressor.faults:MODELS"),
    staged=later("parity.ops.compressor.faults.diagnosis:function"),
    hooks={"diagnosis": later("parity.ops.compressor.faults.diagnosis:DIAGNOSIS")},
)

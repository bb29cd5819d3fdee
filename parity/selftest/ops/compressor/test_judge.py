"""Compressor cases and their judgement: against the reference module, and against the nearest wrong answers."""

import pytest
import torch

from parity.domain.contract import Contract
from parity.ops.check import judge_case
from parity.ops.compressor.case import CompressorCase
from parity.ops.compressor.faults import staged
from parity.ops.compressor.judge import expected, judge_compressor, windows
from parity.ops.compressor.operands import build_compressor
from parity.results import Labels, Status
from parity.run.implementation import Implementation
from parity.run.operation import parse_case
from parity.run.registry import load
from parity.run.runner import InProcess
from parity.run.worker import opened
from parity.selftest.case_reading import bad_strings
from parity.selftest.helpers import CPU
from reference.compressor import CompressorState, add_ape, pool
from reference.config import TINY

SCRIPT = "v2 op=compressor calls=0:5+1:3/0:9-2/1:4/0:1/0:7-8+1:1/2:9 data=random seed=4"


@pytest.mark.parametrize("text", [SCRIPT, "v2 op=compressor calls=0:1", "v2 op=compressor calls=3:4+0:2/3:1-3 perm=2"])
def test_a_case_string_is_its_case(text):
    case = parse_case(text)
    assert isinstance(case, CompressorCase) and str(case) == text


test_bad_cases_are_refused_in_one_sentence = bad_strings(
    {
        "v2 op=compressor": "must say the calls",
        "v2 op=compressor calls=0:1-1": "can drop at most 0",
        "v2 op=compressor calls=0:9/0:1-9": "can drop at most 8",
        "v2 op=compressor calls=0:9/0:1-8/0:1-2": "can drop at most 1",
        "v2 op=compressor calls=0:0": "at least 1",
        "v2 op=compressor calls=0:1+0:1": "at most once",
        "v2 op=compressor calls=x": "calls must look like",
        "v2 op=compressor calls=0:1 data=gauss": "data must be one of",
        "v2 op=compressor calls=0:1 k=3": "unknown name",
        "v2 op=compressor calls=0:1 calls=0:1": "stands twice",
    }
)


def test_windows_are_those_of_the_reference_state():
    case = parse_case(SCRIPT)
    operands, state = build_compressor(case), CompressorState(TINY, slots=3)
    for step, call, (closes, window) in zip(operands.steps, case.calls, windows(operands), strict=True):
        at, parts = 0, []
        for request, count, undone in call:
            state.rollback(undone, request)
            rows = slice(at, at + count)
            at += count
            score = add_ape(step.score[rows], operands.ape, step.positions[rows].long())
            kv, scores = state.append(step.kv[rows], score, request)
            parts.append((kv, scores))
            state.add_keys(torch.zeros((len(kv), 128), dtype=torch.bfloat16), request)
        kv, scores = (torch.cat(side) for side in zip(*parts, strict=True))
        assert int(closes.sum()) == len(kv)
        assert torch.equal(kv.double(), window[0]) and torch.equal(scores.double(), window[1])
        if len(kv):
            wanted, bound = expected(window)
            assert bool(((pool(kv, scores).double() - wanted).abs() <= bound).all())


def judged(text, spoil=lambda outputs: outputs):
    impl = Implementation("correct", "compressor", "", Contract(op="compressor"), staged.function())
    outcome = InProcess(impl, CPU).run(parse_case(text))
    assert outcome.complaint is None
    return judge_compressor(spoil(outcome.output), outcome.operands, Labels(case=text))


@pytest.mark.parametrize(
    "text", [SCRIPT, SCRIPT.replace("data=random ", ""), "v2 op=compressor calls=0:21/0:2 poison=stale"]
)
def test_the_staged_compressor_passes(text):
    found = judged(text)
    assert found.passed and found.cells


def test_one_last_bit_of_an_exact_value_is_seen():
    def spoil(outputs):
        pooled, closes = outputs[0]
        row = int(closes.nonzero()[0])
        pooled[row, 5] = torch.nextafter(pooled[row, 5], torch.tensor(9e9))
        return outputs

    found = judged("v2 op=compressor calls=0:9", spoil)
    assert found.status is Status.FAILED and "channel 5" in found.message


def test_a_random_value_past_the_bound_is_seen_and_the_bound_is_small():
    def spoil(outputs):
        pooled, closes = outputs[0]
        pooled[closes] *= 1 + 2.0**-15
        return outputs

    assert judged("v2 op=compressor calls=0:9 data=random", spoil).status is Status.FAILED
    assert (judged("v2 op=compressor calls=0:9 data=random").ratio or 0.0) < 0.5


def test_a_group_that_closes_early_is_seen():
    def spoil(outputs):
        outputs[0][1][-1] = True
        return outputs

    found = judged("v2 op=compressor calls=0:6", spoil)
    assert found.status is Status.FAILED and "closes a group" in found.message


def test_requests_take_over_free_rows_uncleared():
    operands = build_compressor(parse_case("v2 op=compressor calls=0:5/1:4/1:4/2:5"))
    assert int(operands.steps[0].slots[0]) == int(operands.steps[1].slots[0]) == int(operands.steps[3].slots[0])
    assert bool(operands.state.isnan().all())


def test_a_function_of_ones_own_is_judged_through_the_registry(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "def early(kv, score, ape, positions, slots, state):\n"
        "    return torch.zeros(len(kv), 128), positions % 4 == 2\n"
    )
    impl = load(f"{file}:early", op="compressor")
    with opened(impl, CPU) as runner:
        found = judge_case(runner, parse_case("v2 op=compressor calls=0:9"))
    failed = {verdict.check for verdict in found if verdict.status is Status.FAILED}
    # The same wrong keys whatever stood in the state before.
    assert failed == {"chunks", "repeat", "history", "processes"}

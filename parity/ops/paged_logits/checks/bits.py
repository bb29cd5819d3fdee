"""Level bits: on a GPU whose arithmetic is verified, dots and whole logits are those that the models predict, bit for
bit.

Dots are compared for any implementation that can return them, logits only for our own Triton kernels, since the order
in which another function adds its heads is not known.
"""

import torch
from hypothesis import strategies as st

from parity.domain.dimensions import mostly
from parity.domain.notation import causal_lengths
from parity.domain.profiles import Profile
from parity.numerics.arithmetic import Grouped
from parity.numerics.headsum import HeadSum, predicted_logits, recorded_order
from parity.ops.check import Check, failed_call, named, verdict
from parity.ops.paged_logits import predicted, shapes
from parity.ops.paged_logits.case import Case
from parity.ops.paged_logits.dots import compare_dots
from parity.ops.paged_logits.judge import compare_bits
from parity.ops.paged_logits.oracle import sampled_rows
from parity.results import Status, Verdict
from parity.run import device as devices
from parity.run.implementation import Implementation
from parity.run.operation import parse_case
from parity.run.runner import Outcome, Runner
from parity.tensorcore import headorder

DATA = ("octaves", "near_ties", "outliers", "saturating", "negative", "needle", "fp4_grid", "subnormal")
DOT_BYTES = 1 << 28
"""Largest tensor of dots that a case may ask for."""


def unverified(impl: Implementation, device: torch.device) -> str | None:
    """Why no model predicts the dots, or None."""
    contract = impl.contract
    if isinstance(contract.arithmetic, Grouped) and contract.dot_verified:
        return None
    if device.type != "cuda":
        return "a model predicts the bits of a GPU's matrix unit; here dots are float32 sums of no fixed order"
    if impl.kernel == "torch":
        return "its dots come from a library whose order of summation is not known"
    return f"no verified model of its dots ({contract.describe_dot()})"


def no_dots(impl: Implementation, device: torch.device) -> str | None:
    """Why its dots cannot be compared, or None."""
    reason = unverified(impl, device)
    if reason is None and impl.companion is None and impl.contract.dots is None:
        return "it names no function that returns its dots (contract key `dots`)"
    return reason


def no_order(impl: Implementation, device: torch.device) -> str | None:
    """Why its logits cannot be predicted, or None."""
    reason = unverified(impl, device)
    if reason is None and impl.kernel != "triton":
        return "the order in which it adds its heads is not known"
    return reason


def no_golden(impl: Implementation, device: torch.device) -> str | None:
    """Why the stored predictions do not concern it, or None."""
    reason = no_dots(impl, device)
    if reason is not None:
        return reason
    if predicted.folder() is None:
        return "the stored predictions (fixtures/predicted) belong to a checkout and are not here"
    here = devices.architecture(device)
    if here not in ("cpu", predicted.ARCHITECTURE):
        return f"the stored predictions are those of {predicted.ARCHITECTURE}, this is {here}"
    return None


def model_of(runner: Runner) -> Grouped:
    """The verified model; only where ``unverified`` gave no reason."""
    arithmetic = runner.impl.contract.arithmetic
    assert isinstance(arithmetic, Grouped)
    return arithmetic


def dots_of(runner: Runner, check: str, case: Case) -> tuple[Outcome | None, Verdict | None]:
    """The outcome of asking for the dots, or the verdict on why there is none."""
    beside = runner.companion()
    if beside is None:
        return None, verdict(runner, check, case, Status.UNSUPPORTED, "it names no function that returns its dots")
    outcome = beside.run(case)
    bad = failed_call(runner, check, case, outcome)
    return (None, bad) if bad is not None else (outcome, None)


def judge_dots(runner: Runner, case: Case, check: str = "bits/dots") -> Verdict:
    """Every dot of every head has the bits of the verified model."""
    outcome, bad = dots_of(runner, check, case)
    if outcome is None:
        assert bad is not None
        return bad
    rows = sampled_rows(case, runner.device)
    words = named(runner, check)
    return compare_dots(outcome.output, outcome.operands, case.layout, model_of(runner), rows=rows, **words)


def order_of(runner: Runner, case: Case) -> HeadSum | str:
    """The order in which the kernel that ran last adds its heads, or the reason why none is known.

    It is the one on record for this compiler and configuration, and only if the compiled kernels show it too: a
    record that today's compiler contradicts predicts nothing."""
    from impl import dispatch

    route = dispatch.last_route()
    config = route.config if route is not None else ""
    version, fused = headorder.compiler()
    found = recorded_order(devices.architecture(runner.device), version, fused, config, case.heads)
    if isinstance(found, str):
        return found
    for text in headorder.compiled(config):
        if text != str(found.order):
            return f"{config} as compiled here does not add its heads in the order on record ({found.name}): {text}"
    return found.order


def judge_logits(runner: Runner, case: Case, check: str = "bits/logits") -> Verdict:
    """Every logit has the bits that the model's dots give in the recorded order of the head sum."""
    outcome = runner.run(case)
    bad = failed_call(runner, check, case, outcome)
    if bad is not None:
        return bad
    if not outcome.output.numel():
        return verdict(runner, check, case, Status.PASSED)
    order = order_of(runner, case)
    if isinstance(order, str):
        return verdict(runner, check, case, Status.NOT_RUN, order)
    rows = sampled_rows(case, runner.device)
    wanted = predicted_logits(outcome.operands, case.layout, model_of(runner), order, rows)
    return compare_bits(
        outcome.output,
        wanted.logits.to(torch.float32),
        outcome.operands,
        rows=wanted.rows,
        other_rows=torch.arange(wanted.rows.numel(), device=wanted.rows.device),
        **named(runner, check),
    )


def judge_golden(runner: Runner, case: Case, check: str = "bits/golden") -> Verdict:
    """Dots, and logits where the order is the stored one, equal those that were computed on a CPU beforehand."""
    name = next((name for name, text in predicted.CASES.items() if parse_case(text) == case), None)
    if name is None:
        return verdict(runner, check, case, Status.NOT_RUN, "no prediction is stored for this case")
    stored, stored_order = predicted.stored(name)
    outcome, bad = dots_of(runner, check, case)
    if outcome is None:
        assert bad is not None
        return bad
    wanted = stored["dots"].to(outcome.output.device)
    got = outcome.output[..., : wanted.shape[2]]
    visible = ~wanted.isnan()
    wrong = visible & (got.contiguous().view(torch.int32) != wanted.view(torch.int32))
    if bool(wrong.any()):
        row, head, key = (int(i) for i in wrong.nonzero()[0])
        message = (
            f"{int(wrong.sum()):,} of {int(visible.sum()):,} dots differ from {name}, first row {row}, head {head}, "
            f"key {key}: got {float(got[row, head, key]):.9g}, wanted {float(wanted[row, head, key]):.9g}"
        )
        return verdict(runner, check, case, Status.FAILED, message)
    unknown = no_order(runner.impl, runner.device)
    if unknown is None:
        outcome = runner.run(case)
        bad = failed_call(runner, check, case, outcome)
        if bad is not None:
            return bad
        order = order_of(runner, case)
        if order == stored_order:
            return compare_bits(outcome.output, stored["logits"], outcome.operands, **named(runner, check))
        unknown = order if isinstance(order, str) else "heads are added here in another order than the stored one"
    note = f"only dots were compared: {unknown}"
    return verdict(runner, check, case, Status.PASSED, cells=int(visible.sum()), note=note)


# ------------------------------------------------------------------------------------------------------ cases


def data_for(impl: Implementation) -> tuple[str, ...]:
    """The classes that its contract allows."""
    return tuple(name for name in DATA if not (name == "subnormal" and impl.contract.flush_to_zero))


def _drawn(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    return shapes.drawn(impl, profile, device, data_for(impl))


def _dots(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    """Small cases, and on CUDA decode, speculation and prefill of some thousand keys whose dots fit the memory."""
    plain = shapes.small(impl, profile, data_for(impl))
    if device.type != "cuda" or not profile.large:
        return plain

    @st.composite
    def larger(draw: st.DrawFn) -> Case:
        heads = draw(st.sampled_from(shapes.heads_of(impl)))
        requests, next_n = draw(st.sampled_from(((7, 1), (3, 2), (1, 64), (1, 130))))
        most = DOT_BYTES // (4 * heads * requests * next_n)
        ends = [draw(st.integers(next_n, min(most, 6000))) for _ in range(requests)]
        lengths = tuple(causal_lengths(4 * end - next_n, next_n) for end in ends)
        seed, perm = draw(st.integers(0, 1 << 16)), draw(st.integers(1, 1 << 16))
        data = draw(st.sampled_from(data_for(impl)))
        return Case(lengths=lengths, layout=impl.layout, heads=heads, data=data, seed=seed, perm=perm)

    return mostly(plain, larger(), shapes.REAL_EVERY)


def _golden(impl: Implementation, profile: Profile, device: torch.device) -> st.SearchStrategy[Case]:
    return st.sampled_from(
        [case for text in predicted.CASES.values() if (case := parse_case(text)).layout == impl.layout]
    )


def _fits(case: Case) -> bool:
    longest = max((length for request in case.lengths for length in request), default=0)
    return 4 * case.rows * case.heads * max(longest, case.max_len or 0) <= DOT_BYTES and case.data != "nonfinite"


CHECKS = [
    Check("bits", "dots", _dots, judge_dots, 2.0, _fits, needs=no_dots),
    Check("bits", "logits", _drawn, judge_logits, 2.0, lambda case: True, needs=no_order),
    Check(
        "bits",
        "golden",
        _golden,
        judge_golden,
        0.0,
        lambda case: str(case) in map(str, map(parse_case, predicted.CASES.values())),
        needs=no_golden,
        shrinks=False,
        listed=lambda impl: True,
    ),
]

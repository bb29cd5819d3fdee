"""`parity diagnose`: which fault explains a failing function, a failing case, or a captured call.

The function is observed once, then every model of its operation is evaluated on the same inputs, pairs of the best ones
too; what no model explains is described by what its wrong cells have in common.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parity.faults import pattern
from parity.faults.explaining import (
    CORRECT,
    Explanation,
    Problem,
    Ruler,
    distance,
    equals,
    function_of,
    near_cells,
    observe,
    problem_of,
    rank,
    rank_pairs,
    warm_case,
)
from parity.ops.fault import OPS

SHOWN, PAIRED = 5, 20
PROBES = 12  # further cases that --impl is asked on, to tell equals apart
DRAWS = 30
Row = dict[str, Any]


@dataclass(eq=False)
class Diagnosis:
    """Singles and pairs by what they leave, the best one's equals, sentences on the pattern, and a separating case."""

    problem: Problem
    observed: list[Any]
    ranked: list[Explanation]
    best: list[Explanation]
    pairs: list[Explanation] = field(default_factory=list)
    unsteady: bool = False
    sentences: list[str] = field(default_factory=list)
    separating: str = ""

    @property
    def explained(self) -> bool:
        return self.best[0].explains and self.best[0].faults != (CORRECT,)


# ---------------------------------------------------------------------------------------------------- what is observed


def of_capture(path: str) -> Diagnosis:
    """The diagnosis of a captured call: one run, and nothing known of the calls before it."""
    from types import SimpleNamespace

    from parity.faults.capture import load_capture

    capture = load_capture(path)
    if capture.stage == "store":
        problem = Problem("store", capture.layout, lambda: _captured_store(capture), runs=1)
        return diagnose(problem, [_bytes(capture.output)])

    def fresh() -> Any:
        named = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in capture.named.items()}
        return SimpleNamespace(**named, kwargs=lambda: named)

    problem = Problem(OPS[capture.stage], capture.layout, fresh, runs=1)
    return diagnose(problem, [capture.output])


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).reshape(-1).clone()


def _captured_store(capture: Any) -> Any:
    from types import SimpleNamespace

    named = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in capture.named.items()}
    return SimpleNamespace(
        **named,
        kwargs=lambda: named,
        contents=lambda: _bytes(named["kv_cache"]),
        restore=lambda: named["kv_cache"].copy_(capture.named["kv_cache"]),
    )


def failing_case(runner: Any) -> Any:
    """A case that the suite rejects, as it was drawn: an unshrunk one tells more faults apart."""
    from parity.domain.profiles import profile
    from parity.faults.score import ordered
    from parity.run.operation import parse_case
    from parity.suite.search import run_check
    from parity.vocabulary import Status

    quick = replace(profile("ci"), shrink_seconds=0.01, reduce_calls=1)
    for check in ordered(runner.impl.operation):
        found = run_check(check, runner, quick)
        if found.verdict.status is Status.FAILED and (found.first_case or found.verdict.case):
            return parse_case(found.first_case or found.verdict.case)
    return None


def store_facts(contract: Any) -> dict[str, Any]:
    """What a store's contract says about how keys are stored."""
    return {"schedule": contract.schedule, "scale": contract.scale, "fake_fp4": contract.fake_fp4}


def of_runner(runner: Any, case: Any) -> Diagnosis:
    """Observe a runner on a case by the protocol, and explain it; further cases tell equals apart."""
    extra = store_facts(runner.impl.contract) if runner.impl.stage == "store" else {}

    def ask(which: Any) -> Any:
        outcome = runner.run(which)
        return _on_cpu(outcome.output)

    def observed_on(which: Any) -> tuple[Problem, list[Any]]:
        problem = problem_of(which, extra)
        ask(warm_case(which))
        return problem, [ask(which) for _ in range(problem.runs)]

    found = diagnose(*observed_on(case))
    for _ in range(PROBES):
        probe = telling_case(case, found, extra)
        if probe is None:
            break
        problem, observed = observed_on(probe)
        ranked = rank(problem, observed, [each.faults[0] for each in found.best if each.faults != (CORRECT,)])
        kept = {each.name for each in equals(problem, [each for each in ranked if each.faults != (CORRECT,)])}
        found.best = [each for each in found.best if each.name in kept]
    if not found.best[0].explains:
        found.sentences += _heads(ask, case)
    found.separating = separating_case(case, found, extra)
    return found


def _on_cpu(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(x) for x in value)
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _heads(ask: Callable[[Any], Any], case: Any) -> list[str]:
    if case.stage != "logits" or case.heads > 64 or case.data == "nonfinite":
        return []

    def right(which: Any) -> torch.Tensor:
        problem = problem_of(which)
        return observe(replace(problem, warm=None, runs=1), function_of(problem, []))[0]

    def differs(which: Any) -> tuple[Any, Any]:
        got, wanted = ask(which), right(which)
        ruler = Ruler(problem_of(which))
        wrong = 1 if got is None else distance(ruler, [got], [wanted]).wrong
        return torch.tensor(wrong), torch.tensor(0)

    wrong = pattern.wrong_heads(lambda c: differs(c)[0], case, lambda c: torch.tensor(0))
    if not wrong or len(wrong) == case.heads:
        return []
    return [f"with one head at a time, heads {pattern.listed(wrong)} are wrong of {case.heads}"]


# ----------------------------------------------------------------------------------------------------- what explains it


def diagnose(problem: Problem, observed: list[Any]) -> Diagnosis:
    """Rank all models of the problem, pairs of the best too if no single one explains it, and describe the rest."""
    ranked = rank(problem, observed)
    found = Diagnosis(problem, observed, ranked, equals(problem, ranked))
    ruler = Ruler(problem)
    if len(observed) > 1 and observed[0] is not None and observed[1] is not None:
        found.unsteady = distance(ruler, observed[:1], observed[1:2]).wrong > 0
    if not ranked[0].explains:
        found.pairs = rank_pairs(problem, observed, ranked[:PAIRED])
        better = found.pairs and found.pairs[0].distance.key < ranked[0].distance.key
        if not (better and found.pairs[0].explains):
            found.sentences += describe(problem, ruler, observed)
    return found


def describe(problem: Problem, ruler: Ruler, observed: list[Any]) -> list[str]:
    """Sentences on what the wrong cells have in common."""
    if problem.op != "paged_logits" or observed[0] is None:
        return ["the call gave no result"] if observed[0] is None else []
    right = observe(replace(problem, warm=None, runs=1), function_of(problem, []))[0]
    bad = torch.zeros_like(ruler.judged)
    bad[ruler.judged] = ~near_cells(ruler, observed[0], right)[0]
    return pattern.describe(bad, ruler.operands)


def rivals_differ(which: Any, rivals: Sequence[Explanation], extra: dict[str, Any]) -> bool:
    """Whether two explanations give different results on a case."""
    problem = problem_of(which, extra)
    one, two = (observe(problem, function_of(problem, each.faults)) for each in rivals[:2])
    return distance(Ruler(problem), one, two).wrong > 0


def telling_case(case: Any, found: Diagnosis, extra: dict[str, Any], rivals: Sequence[Explanation] = ()) -> Any:
    """A case, the given one or a drawn one, on which two explanations differ (default: the best one and its first
    equal); None where there are no two, or none was found."""
    import random

    from parity.faults.drawing import draw_case

    rivals = rivals or [each for each in found.best if each.faults != (CORRECT,)]
    if len(rivals) < 2 or not found.explained:
        return None
    source = random.Random(f"{case} {rivals[0].name} {rivals[1].name}")
    like = replace(rivals[0].faults[0], layout=found.problem.layout)
    drawn = (case if at == 0 else draw_case(like, source) for at in range(DRAWS))
    return next((each for each in drawn if rivals_differ(each, rivals, extra)), None)


def separating_case(case: Any, found: Diagnosis, extra: dict[str, Any]) -> str:
    """The smallest case on which the two best explanations give different results, or "" where none was found."""
    from parity.ops.shared.reducer import reduce_case

    rivals = [each for each in found.best if each.faults != (CORRECT,)]
    rivals += [each for each in found.ranked if each.faults != (CORRECT,) and each not in rivals]
    start = telling_case(case, found, extra, rivals[:2])
    if start is None:
        return ""
    return str(reduce_case(start, lambda which: rivals_differ(which, rivals, extra), 150))


# -------------------------------------------------------------------------------------------------------------- report


def as_json(found: Diagnosis) -> Row:
    """Plain values: rankings, pattern and the separating case."""

    def row(each: Explanation) -> Row:
        return {
            "faults": [fault.id for fault in each.faults],
            "step": each.faults[0].step,
            "sentence": " and ".join(fault.sentence for fault in each.faults),
            "reports": [fault.report for fault in each.faults if fault.report],
            "wrong": each.distance.wrong,
            "rest": each.distance.rest,
            "cells": each.distance.cells,
        }

    return {
        "kind": "indexer-parity/diagnosis",
        "format": 1,
        "explained": found.explained,
        "first_bad_step": found.best[0].faults[0].step if found.explained else None,
        "best": [row(each) for each in found.best],
        "ranked": [row(each) for each in found.ranked[:PAIRED]],
        "pairs": [row(each) for each in found.pairs[:SHOWN]],
        "unsteady": found.unsteady,
        "pattern": found.sentences,
        "separating_case": found.separating,
    }


def lines(found: Diagnosis) -> list[str]:
    """The diagnosis in words."""
    best = found.best[0]
    said = []
    if found.unsteady:
        said.append("two runs on the same operands differ: a race, or memory kept between calls")
    if best.faults == (CORRECT,) and best.explains:
        said.append("on this input the result is that of a correct implementation")
    elif found.explained:
        said.append(f"first bad step: {best.faults[0].step}")
        equal = len(found.best) > 1
        said.append("explained by, indistinguishable here:" if equal else "explained by:")
        said += [_line(each) for each in found.best[:SHOWN]]
    else:
        said.append("no single fault of the catalogue explains it; the nearest:")
        said += [_line(each) for each in found.ranked[:SHOWN]]
        if found.pairs and found.pairs[0].distance.key < found.ranked[0].distance.key:
            said.append("two faults at once:")
            said += [
                _line(each) for each in found.pairs[:SHOWN] if each.distance.wrong == found.pairs[0].distance.wrong
            ]
    if found.explained:
        named = {CORRECT.id, *(each.name for each in found.best)}
        others = [each for each in found.ranked if each.name not in named][:3]
        said.append("next:")
        said += [_line(each) + (": ruled out by a further case" if each.explains else "") for each in others]
    if found.sentences:
        said += ["pattern:", *(f"  {sentence}" for sentence in found.sentences)]
    if found.separating:
        said.append(f"the smallest input that tells the best two apart: {found.separating}")
    return said


def _line(each: Explanation) -> str:
    reports = ", ".join(fault.report for fault in each.faults if fault.report)
    text = " and ".join(fault.sentence for fault in each.faults)
    left = each.distance
    score = f"leaves {left.wrong} of {left.cells} cells" if left.wrong < 1 << 40 else "gives no result"
    return f"  {each.name}: {text} ({score}, rest {left.rest:.2g})" + (f" [{reports}]" if reports else "")

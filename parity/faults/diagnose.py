"""Which fault explains a failing function, a failing case, or a captured call.

The function is observed once, then every model of its operation is run on the same inputs, pairs of the best ones too;
what no model explains is described by what its wrong cells have in common.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from parity.domain.profiles import profile
from parity.domain.reducer import reduce_case
from parity.faults.building import diagnosis_of
from parity.faults.capture import load_capture
from parity.faults.explaining import (
    CORRECT,
    NO_RESULT,
    Explanation,
    Problem,
    Ruler,
    distance,
    equals,
    function_of,
    observe,
    problem_of,
    rank,
    rank_pairs,
)
from parity.faults.score import ordered
from parity.run.operation import parse_case
from parity.run.runner import Runner, over_tensors
from parity.suite.search import run_check
from parity.vocabulary import Status

SHOWN, PAIRED = 5, 20
PROBES = 12  # further cases that a function is called on, to tell equals apart
DRAWS = 30
Row = dict[str, Any]


@dataclass(eq=False)
class Finding:
    """Singles and pairs by what they leave, the best one's equals, sentences on the pattern, and a separating case; or
    the obstacle, one sentence on why no model can be compared."""

    problem: Problem
    ranked: list[Explanation] = field(default_factory=list)
    best: list[Explanation] = field(default_factory=list)
    pairs: list[Explanation] = field(default_factory=list)
    unsteady: bool = False
    sentences: list[str] = field(default_factory=list)
    separating: str = ""
    obstacle: str = ""

    @property
    def explained(self) -> bool:
        """Whether one fault explains the result."""
        return bool(self.best) and self.best[0].explains and not self.best[0].correct

    @property
    def explained_by_pair(self) -> bool:
        """Whether two faults at once do."""
        return any(pair.explains for pair in self.pairs)


# ---------------------------------------------------------------------------------------------------- what is observed


def of_capture(path: str | os.PathLike[str]) -> Finding:
    """The finding on a captured call: one run, and nothing known of the calls before it. ValueError names what is wrong
    with the file."""
    capture = load_capture(path)
    build = diagnosis_of(capture.op).captured
    return diagnose(Problem(capture.op, capture.layout, lambda: build(capture.named), runs=1), [capture.output])


def failing_case(runner: Runner) -> Any:
    """A case that the suite rejects, as it was drawn: an unshrunk one tells more faults apart. One on which the call
    crashes, if there is no other; None if there is none."""
    quick = replace(profile("ci"), shrink_seconds=0.01, reduce_calls=1)
    crashed = None
    for check in ordered(runner.impl.operation):
        found = run_check(check, runner, quick)
        case = found.first_case or found.verdict.case
        if found.verdict.status is Status.FAILED and case:
            return parse_case(case)
        if found.verdict.status is Status.ERROR and case:
            crashed = crashed or case
    return parse_case(crashed) if crashed else None


def of_runner(runner: Runner, case: Any) -> Finding:
    """Observe a runner on a case by the protocol, and explain it; further cases tell equals apart."""
    extra = diagnosis_of(case.op).facts(runner.impl.contract)
    reasons: list[str | None] = []

    def run(which: Any) -> Any:
        outcome = runner.run(which)
        reasons.append(outcome.error or outcome.defect or outcome.unsupported)
        return over_tensors(Tensor.cpu, outcome.output)

    def observed_on(which: Any) -> tuple[Problem, list[Any]]:
        problem = problem_of(which, extra)
        run(diagnosis_of(which.op).before(which))
        return problem, [run(which) for _ in range(problem.runs)]

    problem, observed = observed_on(case)
    if all(result is None for result in observed):
        return Finding(problem, obstacle=f"the call gives no result to compare: {reasons[-1]}")
    found = diagnose(problem, observed)
    for _ in range(PROBES):
        probe = discriminating_case(case, found, extra)
        if probe is None:
            break
        problem, observed = observed_on(probe)
        ranked = rank(problem, observed, [each.faults[0] for each in found.best if not each.correct])
        kept = {each.name for each in equals(problem, [each for each in ranked if not each.correct])}
        found.best = [each for each in found.best if each.name in kept]
    if not found.best or not found.best[0].explains:
        found.sentences += diagnosis_of(case.op).describe_parts(case, problem.layout, run)
    found.separating = separating_case(case, found, extra)
    return found


# ----------------------------------------------------------------------------------------------------- what explains it


def diagnose(problem: Problem, observed: list[Any]) -> Finding:
    """Rank all models of the problem, pairs of the best too if no single one explains it, and describe the rest."""
    found = Finding(problem, obstacle=problem.obstacle)
    results = [result for result in observed if result is not None]
    if not problem.obstacle:
        found.ranked = rank(problem, observed)
        found.best = equals(problem, found.ranked)
        if len(results) > 1:
            found.unsteady = distance(Ruler(problem), results[:1], results[1:2]).wrong > 0
        if found.ranked[0].explains:
            return found
        found.pairs = rank_pairs(problem, observed, found.ranked[:PAIRED])
        if found.explained_by_pair:
            return found
    describe = problem.diagnosis.describe
    found.sentences = describe(problem.fresh(), problem.layout, observed[0]) if observed[0] is not None else []
    return found


def rivals_differ(which: Any, rivals: Sequence[Explanation], extra: dict[str, Any]) -> bool:
    """Whether two explanations give different results on a case."""
    problem = problem_of(which, extra)
    one, two = (observe(problem, function_of(problem, each.faults)) for each in rivals[:2])
    return distance(Ruler(problem), one, two).wrong > 0


def discriminating_case(case: Any, found: Finding, extra: dict[str, Any], rivals: Sequence[Explanation] = ()) -> Any:
    """A case, the given one or a drawn one, on which two explanations differ (default: the best one and its first
    equal); None where there are no two, or none was found."""
    rivals = rivals or [each for each in found.best if not each.correct]
    if len(rivals) < 2 or not found.explained:
        return None
    source = random.Random(f"{case} {rivals[0].name} {rivals[1].name}")
    like = replace(rivals[0].faults[0], layout=found.problem.layout)
    drawn = (case if at == 0 else found.problem.diagnosis.draw(like, source) for at in range(DRAWS))
    return next((each for each in drawn if rivals_differ(each, rivals, extra)), None)


def separating_case(case: Any, found: Finding, extra: dict[str, Any]) -> str:
    """The smallest case on which the two best explanations give different results, or "" where none was found."""
    rivals = [each for each in found.best if not each.correct]
    rivals += [each for each in found.ranked if not each.correct and each not in rivals]
    start = discriminating_case(case, found, extra, rivals[:2])
    if start is None:
        return ""
    reduce = found.problem.operation.reduce or reduce_case
    return str(reduce(start, lambda which: rivals_differ(which, rivals, extra), 150))


# -------------------------------------------------------------------------------------------------------------- report


def as_json(found: Finding) -> Row:
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
        "obstacle": found.obstacle,
        "first_bad_step": found.best[0].faults[0].step if found.explained else None,
        "best": [row(each) for each in found.best],
        "ranked": [row(each) for each in found.ranked[:PAIRED]],
        "pairs": [row(each) for each in found.pairs[:SHOWN]],
        "unsteady": found.unsteady,
        "pattern": found.sentences,
        "separating_case": found.separating,
    }


def lines(found: Finding) -> list[str]:
    """The finding in words."""
    said = [f"no diagnosis: {found.obstacle}"] if found.obstacle else _ranking(found)
    if found.sentences:
        said += ["pattern:", *(f"  {sentence}" for sentence in found.sentences)]
    if found.separating:
        said.append(f"the smallest input that tells the best two apart: {found.separating}")
    return said


def _ranking(found: Finding) -> list[str]:
    best = found.best[0]
    said = []
    if found.unsteady:
        said.append("two runs on the same operands differ: a race, or memory kept between calls")
    if best.correct and best.explains:
        said.append("on this input the result is that of a correct implementation")
    elif found.explained:
        said.append(f"first bad step: {best.faults[0].step}")
        equal = len(found.best) > 1
        said.append("explained by, indistinguishable here:" if equal else "explained by:")
        said += [_line(each) for each in found.best[:SHOWN]]
        named = {CORRECT.id, *(each.name for each in found.best)}
        others = [each for each in found.ranked if each.name not in named][:3]
        said.append("next:")
        said += [_line(each) + (": ruled out by a further case" if each.explains else "") for each in others]
    else:
        said.append("no single fault of the catalogue explains it; the nearest:")
        said += [_line(each) for each in found.ranked[:SHOWN]]
        if found.pairs and found.pairs[0].distance.key < found.ranked[0].distance.key:
            least = found.pairs[0].distance.wrong
            said.append("two faults at once:")
            said += [_line(each) for each in found.pairs[:SHOWN] if each.distance.wrong == least]
    return said


def _line(each: Explanation) -> str:
    reports = ", ".join(fault.report for fault in each.faults if fault.report)
    text = " and ".join(fault.sentence for fault in each.faults)
    left = each.distance
    score = f"leaves {left.wrong} of {left.cells} cells" if left.wrong < NO_RESULT else "gives no result"
    return f"  {each.name}: {text} ({score}, rest {left.rest:.2g})" + (f" [{reports}]" if reports else "")

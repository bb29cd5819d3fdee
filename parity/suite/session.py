"""One session of the suite: who is judged under which profile, in whichever process it lives."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from parity.domain.dimensions import Coverage
from parity.domain.profiles import PROFILES, Profile
from parity.ops.check import Check, checks_of
from parity.results import Row, Verdict
from parity.run import registry
from parity.run.device import architecture, provenance
from parity.run.implementation import Implementation
from parity.run.loading import SpecError
from parity.run.runner import Runner
from parity.run.worker import runner_for
from parity.suite.clock import Clock
from parity.suite.search import Finding, run_check
from parity.tensorcore.verification import Verification, verify_models, with_verified_dot
from parity.vocabulary import COVERAGE, LEVELS, Status


@dataclass
class Session:
    """The implementations under judgement, the device and the profile; runners are opened when first needed."""

    implementations: dict[str, Implementation]
    device: torch.device
    profile: Profile
    clock: Clock | None = None
    arithmetic: Verification = field(default_factory=Verification)
    _runners: dict[str, Runner] = field(default_factory=dict)

    def pairs(self, levels: Sequence[str] = LEVELS) -> list[tuple[Implementation, Check]]:
        """What is to be judged at these levels: every check of each implementation's operation."""
        return [(impl, check) for impl in self.implementations.values() for check in checks_of(impl.operation, levels)]

    def weight(self, pairs: Iterable[tuple[Implementation, Check]]) -> float:
        """What these pairs weigh together in a time budget, without those that cannot run here."""
        return sum(check.weight(impl, self.device) for impl, check in pairs if not impl.absent)

    def runner(self, impl: Implementation) -> Runner:
        """The runner of an implementation, one a session."""
        if impl.name not in self._runners:
            self._runners[impl.name] = runner_for(impl, self.device, self.profile.case_seconds)
        return self._runners[impl.name]

    def judge(self, impl: Implementation, check: Check, total: float = 0.0) -> Row:
        """Run one check and return its row; where time is limited, `total` is what all checks of the session weigh."""
        if impl.absent:
            return row(impl, check, absent(impl, check))
        weight = check.weight(impl, self.device)
        seconds = self.clock.share(weight, total) if self.clock is not None else None
        counted = Coverage(impl.operation.domain().dimensions)

        def count(case: Any, verdict: Verdict) -> None:
            if verdict.status.judged and verdict.cells:
                counted.add(case)

        finding = run_check(check, self.runner(impl), self.profile, seconds=seconds, note=count)
        if self.clock is not None:
            self.clock.end(weight)
        return replace(row(impl, check, finding), coverage=counted.to_json())

    def header(self) -> list[str]:
        """The lines that say what is judged, where and how."""
        found = provenance(self.device)
        kernels = "interpreted" if found["interpreted"] else "compiled"
        lines = [
            f"parity: {found['architecture']} ({found['device']}), torch {found['torch']}, triton {found['triton']} "
            f"({kernels}), profile {self.profile.name}, seed {self.profile.seed}"
        ]
        lines += [f"parity: {line}" for line in self.arithmetic.lines()]
        for impl in self.implementations.values():
            how = "in process" if impl.function is not None else "in a worker process"
            route = f", route {impl.kernel}" if impl.route is not None else ""
            where = f"not here: {impl.absent}" if impl.absent else how
            dot = impl.arithmetic and f"dot {impl.arithmetic}"
            words = [impl.op, impl.layout, dot, f"{where}{route}"]
            lines.append(f"parity: {impl.name}: {', '.join(word for word in words if word)}")
        return lines

    def describe(self) -> dict[str, Any]:
        """Facts for the report's head; JSON types only."""
        return {
            "profile": self.profile.name,
            "seed": self.profile.seed,
            "device": self.device.type,
            "provenance": provenance(self.device),
            "arithmetic": self.arithmetic.as_dict(),
            "implementations": {
                impl.name: {
                    "op": impl.op,
                    "layout": impl.layout or None,
                    "dot": impl.arithmetic,
                    "absent": impl.absent,
                    "restrictions": list(impl.contract.restrictions),
                }
                for impl in self.implementations.values()
            },
        }

    def coverage(self, rows: Sequence[Row]) -> tuple[dict[str, Any], list[Row]]:
        """(what was judged of each implementation's domain, by its name; a row for each promise that was not kept).

        Who failed was not drawn to the end, and whoever asked for other numbers of examples was promised nothing."""
        found, broken = {}, []
        usual = self.clock is None and self.profile.examples == PROFILES[self.profile.name].examples
        for impl in self.implementations.values():
            domain = impl.operation.domain()
            mine = [row for row in rows if row.implementation == impl.name and row.level in LEVELS]
            counted = Coverage(domain.dimensions)
            for row in mine:
                if row.coverage:
                    counted.merge(Coverage.from_json(row.coverage, domain.dimensions))
            if not counted.reached:
                continue
            promised, why = domain.promise(impl, self.profile, self.device)
            why = ", ".join(filter(None, (why, "its contract" if impl.contract.restrictions else "")))
            found[impl.name] = {"op": impl.op, **counted.facts(promised), "why": why}
            missed = counted.missed(promised)
            done = {(row.level, row.check) for row in mine}
            whole = all((check.level, check.name) in done for check in checks_of(impl.operation))
            if missed and usual and whole and not any(row.status.counts_against for row in mine):
                text = "; ".join(f"{name} {', '.join(buckets)}" for name, buckets in missed.items())
                broken.append(
                    Row(
                        impl.name,
                        COVERAGE,
                        "buckets",
                        Status.INCOMPLETE,
                        op=impl.op,
                        layout=impl.layout or None,
                        message=f"promised, but judged in no example: {text}",
                    )
                )
        return found, broken

    def close(self) -> None:
        """Stop worker processes."""
        for runner in self._runners.values():
            runner.close()
        self._runners.clear()


def absent(impl: Implementation, check: Check) -> Finding:
    """The finding on an implementation that cannot run here."""
    return Finding(Verdict(Status.NOT_RUN, check.level, check.name, message=impl.absent or "absent"), 0)


def open_session(
    *,
    impl: str | None,
    layout: str | None,
    op: str | None,
    contract: str | None,
    device: torch.device,
    profile: Profile,
    clock: Clock | None = None,
    arithmetic: str = "auto",
    examined: Verification | None = None,
) -> Session:
    """A session for one named implementation, or for the built-in ones that layout and operation leave.

    clock: shares out the time, where it is limited. arithmetic: "auto" asks a CUDA device once which models its dots
    follow, "bound" does not; examined: what another process of the same session has found out already.

    ValueError (SpecError) with one sentence if an implementation cannot be loaded or nothing is left.
    """
    if impl is not None:
        found = {impl: registry.load(impl, layout, op, contract, device)}
    elif contract is not None:
        raise SpecError("contract: a contract belongs to one implementation, so name it with --impl")
    else:
        found = registry.choose(device, op, layout)
    if examined is None:
        examined = verify_models(device, found.values(), arithmetic)
    here = architecture(device)
    found = {name: with_verified_dot(each, examined, here) for name, each in found.items()}
    return Session(found, device, profile, clock, examined)


def row(impl: Implementation, check: Check, finding: Finding) -> Row:
    """A finding as a row of the report."""
    return Row.of(
        finding.verdict,
        impl.name,
        op=impl.op,
        layout=impl.layout or None,
        dot=impl.arithmetic,
        level=check.level,
        check=check.name,
        examples=finding.examples,
        worst_case=finding.worst_case,
        first_case=finding.first_case,
        seconds=round(finding.seconds, 3),
    )

"""From the files to the page: which sections there are, what they hold, and the HTML that the templates make of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from parity import tables
from parity.report import compare, curves, figures
from parity.report.figures import Picture, Table, number
from parity.report.inputs import Inputs, Measured
from parity.results import Report, Row
from parity.vocabulary import SEVERITY

SHOWN = 400  # rows of one table: a page of some megabytes helps nobody


@dataclass
class Section:
    """One part of the page."""

    name: str
    title: str
    lines: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # preformatted

    @property
    def empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.lines or any(t.rows for t in self.tables) or self.pictures or self.texts)


def render(inputs: Inputs, parts: Sequence[Section], old: Report | None = None) -> str:
    """The page as one HTML text, `parts` after its tables. `old` is an earlier gate report to mark changes against."""
    from importlib.resources import files

    import jinja2
    from markupsafe import Markup

    folder = files("parity.report") / "templates"
    loader = jinja2.DictLoader(
        {item.name: item.read_text(encoding="utf-8") for item in folder.iterdir() if item.is_file()}
    )
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["svg"] = Markup
    gate = inputs.gate
    return environment.get_template("page.html").render(
        title="indexer-parity: " + (gate.sentence if gate else "report"),
        verdict=gate.verdict if gate else None,
        sentence=gate.sentence if gate else opening(inputs),
        facts=facts(gate) if gate else [],
        matrix=matrix(gate, old) if gate else None,
        checks=checks(gate, old) if gate else [],
        statuses=[status for status in SEVERITY if gate and any(row.status is status for row in gate.rows)],
        sections=parts,
        style=Markup(environment.loader.get_source(environment, "style.css")[0]),  # type: ignore[union-attr]
        script=Markup(environment.loader.get_source(environment, "script.js")[0]),  # type: ignore[union-attr]
        sources=inputs.sources,
    )


def opening(inputs: Inputs) -> str:
    """The first sentence of a page without a gate report."""
    for report in inputs.all("explain"):
        return str(report["sentence"])
    return "No gate report was given: measurements without a verdict."


def facts(gate: Report) -> list[tuple[str, str]]:
    """Where the gate ran, in a line."""
    found = gate.head.get("provenance") or {}
    names = ("device", "architecture", "torch", "triton", "commit")
    named = [(name, str(found[name])) for name in names if found.get(name) is not None]
    return [*named, *[(name, str(gate.head[name])) for name in ("profile", "started") if gate.head.get(name)]]


def matrix(gate: Report, old: Report | None) -> dict[str, Any]:
    """Implementation x level: {levels, rows: [(name, [cell or None])]}; a cell {status, examples, ratio, was}."""
    now = tables.cells(gate.rows)
    before = tables.cells(old.rows) if old else {}
    levels = sorted({level for _, level in now}, key=tables.rank)
    names = list(dict.fromkeys(name for name, _ in now))

    def cell(name: str, level: str) -> dict[str, Any] | None:
        found = now.get((name, level))
        if found is None:
            return None
        earlier = before.get((name, level))
        changed = old is not None and (earlier is None or earlier.status != found.status)
        return {
            "status": found.status,
            "examples": f"{found.examples:,}",
            "ratio": number(found.ratio),
            "was": (earlier.status if earlier else "absent") if changed else "",
        }

    return {"levels": levels, "rows": [(name, [cell(name, level) for level in levels]) for name in names]}


def checks(gate: Report, old: Report | None) -> list[dict[str, str]]:
    """Every check with its worst ratio and where it was seen, rejections first, then by ratio."""
    before = {compare.key_of(row): row for row in old.rows} if old else {}
    rows = sorted(
        gate.rows,
        key=lambda row: (
            SEVERITY.index(row.status) if row.status.counts_against else len(SEVERITY),
            -(figures.finite(row.ratio) or 0),
        ),
    )
    found = []
    for row in rows:
        earlier = before.get(compare.key_of(row))
        was = "" if old is None or (earlier and earlier.status is row.status) else "new"
        found.append(
            {
                "implementation": row.implementation,
                "check": f"{row.level}/{row.check}",
                "status": str(row.status),
                "was": str(earlier.status) if was and earlier else was,
                "examples": f"{row.examples:,}",
                "ratio": number(row.ratio),
                "resolution": number(row.resolution),
                "where": where(row),
                "case": row.case or row.worst_case,
                "message": row.text,
                "repro": row.repro,
            }
        )
    return found


def where(row: Row) -> str:
    """Coordinates of the worst cell: request 0, row 3, key 65."""
    return ", ".join(f"{name} {value}" for name, value in row.where.items())


def sections(inputs: Inputs, old: Report | None) -> list[Section]:
    """Everything after the verdict and its tables that is not empty, in the order of the page."""
    gate = inputs.gate
    found = []
    if gate and old:
        found.append(
            Section(
                "changes",
                "What changed",
                lines=[f"Before: {old.sentence}", f"Now: {gate.sentence}"],
                tables=[compare.changes(old, gate), compare.provenance(old, gate)],
            )
        )
    if gate:
        texts = [tables.rejection(row) for row in tables.rejections(gate.rows)]
        found.append(Section("rejections", "Rejections", texts=texts[:SHOWN]))
        ratios = figures.histogram(gate.rows)
        found.append(Section("ratios", "Error over bound", pictures=[ratios] if ratios else []))
    for kind, section in (("explain", explained), ("recall", swept), ("memory", remembered), ("story", narrated)):
        found += [section(report, i) for i, report in enumerate(inputs.all(kind))]
    found += [faults(report, i) for i, report in enumerate(inputs.faults)]
    for kind, section in (("compile", compiled), ("bench", benched), ("store_bench", benched_store)):
        found += [section(report, i) for i, report in enumerate(inputs.all(kind))]
    if gate:
        found.append(Section("reasons", "What was not judged, and why", lines=tables.reasons(gate.rows)))
    found.append(origin(inputs))
    return [section for section in found if not section.empty]


def explained(report: Measured, i: int) -> Section:
    """Shares of the loss, the totals by context, and the map of missed keys."""
    pictures = [curves.shares(report, f"shares{i}"), curves.missed(report, f"missed{i}")]
    table = Table(("tokens", "keys", "recall", "regret"), [])
    for entry in report.get("contexts") or []:
        total = entry["total"]
        recall = f"{1 - total['loss']['mean']:.4f}"
        table.rows.append((f"{entry['tokens']:,}", f"{entry['keys']:,}", recall, number(total["regret"]["mean"])))
    return Section(
        f"explain-{i}",
        f"Which choice costs the recall: {report.get('preset', 'a configuration')}",
        lines=[report["sentence"]],
        pictures=[each for each in pictures if each],
        tables=[table],
    )


def swept(report: Measured, i: int) -> Section:
    """Curves of recall and of needles."""
    lines = [report["caveat"]] if report.get("caveat") else []
    return Section(f"recall-{i}", "Recall by context", lines=lines, pictures=curves.recall(report, f"recall{i}"))


def remembered(report: Measured, i: int) -> Section:
    """Bytes of one call by path and context, and the longest context of each GPU."""
    longest = curves.longest_contexts(report)
    return Section(f"memory-{i}", "Memory", pictures=[curves.memory(report, f"memory{i}")], tables=[longest])


def narrated(report: Measured, i: int) -> Section:
    """The story's steps as the command printed them."""
    texts = [
        "\n".join(
            [
                f"{number}. {step['title']}",
                *step["lines"],
                *([f"not run: {step['not_run']}"] if step["not_run"] else []),
            ]
        )
        for number, step in enumerate(report["steps"], 1)
    ]
    end = "Every step is true." if report["passed"] else f"Not true: {report['untrue']}"
    return Section(f"story-{i}", "The story", lines=[end], texts=texts)


def faults(report: Report, i: int) -> Section:
    """Fault models and what caught each."""
    table = Table(("fault", "step", "outcome", "killed by", "what it changes"), [])
    for row in report.rows[:SHOWN]:
        kills = ", ".join(dict.fromkeys(f"{kill.level}/{kill.check}" for kill in row.kills))
        facts = (cell(row.facts.get(name)) for name in ("step", "outcome"))
        table.rows.append((row.implementation, *facts, kills or "-", cell(row.facts.get("sentence"))))
    return Section(f"faults-{i}", "Fault models", lines=[report.sentence], tables=[table])


def compiled(report: Measured, i: int) -> Section:
    """The compile gate, failures first."""
    names = ("config", "arch", "status", "registers", "spill_stores", "shared", "shared_limit", "reason")
    rows = sorted(report["rows"], key=lambda row: row["status"] == "passed")
    bad = sum(row["status"] != "passed" for row in rows)
    lines = [f"{len(rows)} configurations compiled, {bad} not passed."]
    return Section(f"compile-{i}", "Compile gate", lines=lines, tables=[plain(rows, names)])


def benched(report: Measured, i: int) -> Section:
    """Benchmarks against the GPU's ceilings, and the memory and selection that were measured with them."""
    names = ("name", "layout", "shape", "value", "unit", "milliseconds", "status", "target", "config")
    more = [plain(report.get(name) or []) for name in ("memory", "selection")]
    return Section(f"bench-{i}", "Benchmarks", tables=[plain(report["rows"], names), *more])


def benched_store(report: Measured, i: int) -> Section:
    """Benchmarks of the store as an earlier version wrote them."""
    measured = [plain(report["large"]), plain(report["small"])]
    return Section(f"store-bench-{i}", "Benchmark of the store", tables=measured)


def plain(rows: Sequence[Measured], names: Sequence[str] | None = None) -> Table:
    """Rows of fields as a table; all fields in order of appearance, or those named that any row has."""
    present = list(dict.fromkeys(name for row in rows for name in row))
    chosen = [name for name in (names or present) if name in present]
    return Table(tuple(chosen), [tuple(cell(row.get(name)) for name in chosen) for row in rows[:SHOWN]])


def cell(value: Any) -> str:
    """A field for a table: numbers short, nothing as a dash, the rest as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return number(value, 4)
    return "-" if value in (None, "") else str(value)


def origin(inputs: Inputs) -> Section:
    """Provenance of every file."""
    found: list[tuple[str, Measured]] = [("gate", inputs.gate.head)] if inputs.gate else []
    found += [("faults", report.head) for report in inputs.faults]
    found += [(kind, report) for kind, reports in inputs.measured.items() for report in reports]
    rows: list[tuple[str, ...]] = [
        (kind, fact, cell(value)) for kind, head in found for fact, value in tables.flat(head.get("provenance") or {})
    ]
    return Section("provenance", "Provenance", tables=[Table(("file", "fact", "value"), rows)])

"""What changed between two gate reports: statuses, ratios, checks that came or went, and where each of them ran."""

from __future__ import annotations

from parity.report.figures import Table, finite, number
from parity.results import Report, Row
from parity.tables import flat
from parity.vocabulary import SEVERITY

FACTOR = 2.0  # a worst ratio that moved by less is another draw of the same thing


def key_of(row: Row) -> tuple[str | None, ...]:
    """What makes two rows the same check."""
    return (row.implementation, row.op, row.level, row.check)


def changes(old: Report, new: Report) -> Table:
    """One line per difference, worst first."""
    before, after = ({key_of(row): row for row in report.rows} for report in (old, new))
    found: list[tuple[int, tuple[str, ...]]] = []
    for key in dict.fromkeys((*after, *before)):
        name = (str(key[0]), f"{key[2]}/{key[3]}")
        if key not in before:
            found.append((_rank(after[key]), (*name, "-", after[key].status, "new")))
        elif key not in after:
            found.append((len(SEVERITY), (*name, before[key].status, "-", "gone")))
        elif before[key].status is not after[key].status:
            word = "worse" if _rank(after[key]) < _rank(before[key]) else "better"
            found.append((_rank(after[key]), (*name, before[key].status, after[key].status, word)))
        else:
            a, b = (finite(side[key].ratio) for side in (before, after))
            if a and b and not 1 / FACTOR <= b / a <= FACTOR:
                word = "ratio up" if b > a else "ratio down"
                found.append((len(SEVERITY), (*name, number(a), number(b), word)))
    found.sort(key=lambda entry: entry[0])
    return Table(("implementation", "check", "before", "now", "change"), [line for _, line in found])


def provenance(old: Report, new: Report) -> Table:
    """The facts of provenance in which the two runs differ."""
    before, after = (dict(flat(report.head.get("provenance") or {})) for report in (old, new))
    rows: list[tuple[str, ...]] = [
        (name, str(before.get(name)), str(after.get(name)))
        for name in dict.fromkeys((*before, *after))
        if before.get(name) != after.get(name)
    ]
    return Table(("fact", "before", "now"), rows)


def _rank(row: Row) -> int:
    return SEVERITY.index(row.status)

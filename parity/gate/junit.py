"""A report as JUnit XML, one test case per row, for CI systems that show it."""

from __future__ import annotations

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from parity.results import Report
from parity.vocabulary import Status

KINDS = {
    Status.FAILED: Failure,
    Status.VACUOUS: Failure,
    Status.ERROR: Error,
    Status.NOT_RUN: Skipped,
    Status.UNSUPPORTED: Skipped,
}


def text(report: Report) -> str:
    """The XML; a class is a level and an implementation, a case a check."""
    suite = TestSuite("parity")
    for row in report.rows:
        case = TestCase(row.check, f"{row.level}.{row.implementation}", row.seconds or 0.0)
        if row.status in KINDS:
            found = KINDS[row.status](row.text.partition("\n")[0], str(row.status))
            found.text = "\n".join(filter(None, [row.text, row.repro]))
            case.result = [found]
        suite.add_testcase(case)
    xml = JUnitXml("parity")
    xml.add_testsuite(suite)
    xml.update_statistics()
    found = xml.tostring()
    return found.decode() if isinstance(found, bytes) else found

"""JUnit XML: one suite per method, backend and sweep, one case per subtest."""

from __future__ import annotations

from collections import defaultdict

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from orchestrator import outcomes
from orchestrator.reports.text import attempts_line, reproduce
from orchestrator.verdict import Result, Verdict

KINDS = {
    outcomes.FAILED: Failure,
    outcomes.UNEXPECTED_PASS: Failure,
    outcomes.FLAKY: Failure,
    outcomes.CRASHED: Error,
    outcomes.TIMEOUT: Error,
    outcomes.NOT_RUN: Error,
    outcomes.KNOWN_FAILURE: Skipped,
    outcomes.SKIPPED_KNOWN: Skipped,
    outcomes.UNAVAILABLE: Skipped,
}
MAX_DETAIL = 8000


def render(verdict: Verdict) -> str:
    suites: dict[str, list[Result]] = defaultdict(list)
    for result in verdict.results:
        planned = result.planned
        suites[f"{planned.method}.{planned.backend}.{planned.sweep}"].append(result)
    xml = JUnitXml("attnmatrix")
    for name, results in suites.items():
        suite = TestSuite(name)
        suite.add_property("spec_sha256", verdict.run.spec_sha256)
        suite.add_property("commit", verdict.run.commit)
        if verdict.run.repeat > 1:
            suite.add_property("attempts", attempts_line(results, verdict.run.repeat))
        suite.add_testcases([case_of(verdict, result, name) for result in results])
        xml.append(suite)
    xml.update_statistics()
    return xml.tostring().decode("utf-8")


def case_of(verdict: Verdict, result: Result, suite: str) -> TestCase:
    case = TestCase(result.planned.id.split(".", 3)[3], suite, round(result.seconds, 4))
    kind = KINDS.get(result.outcome)
    if kind is Skipped and not verdict.accepts(result):
        kind = Error
    if kind is None:
        return case
    message = f"{outcomes.PHRASES[result.outcome][0]}: {result.message}".rstrip(": ")
    entry = kind(message[:2000], result.outcome)
    if kind is not Skipped:
        detail = result.shown.detail if result.shown else ""
        entry.text = f"rerun: {reproduce(verdict, result)}\n{detail[-MAX_DETAIL:]}"
    case.result = [entry]
    return case

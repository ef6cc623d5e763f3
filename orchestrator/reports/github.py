"""GitHub annotations: failures where a reviewer sees them. GitHub shows ten of each kind for a step, so more are not
written."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator import outcomes
from orchestrator.reports.text import NOTHING, count_line, reproduce
from orchestrator.verdict import Verdict
from orchestrator.wording import count

LIMIT = 10
MAX_TEXT = 800


def lines(verdict: Verdict) -> Iterator[str]:
    """Workflow commands, one per line."""
    failures = [result for result in verdict.failures if result.outcome != outcomes.NOT_RUN]
    shown = failures if len(failures) <= LIMIT else failures[: LIMIT - 1]
    for result in shown:
        title = f"{outcomes.PHRASES[result.outcome][0]}: {result.planned.id}"
        text = f"{result.message[:MAX_TEXT]}\nrerun: {reproduce(verdict, result)}"
        file = f"{verdict.run.tests}/{result.planned.file}"
        yield f"::error file={field(file)},title={field(title)}::{data(text)}"
    if len(failures) > len(shown):
        yield f"::error title=more failures::{len(failures) - len(shown)} more; the job summary lists them"
    missing = verdict.counts[outcomes.NOT_RUN]
    if missing:
        yield f"::error title=not run::{count(missing, 'planned subtest')} {'was' if missing == 1 else 'were'} not run"
    unavailable = verdict.counts[outcomes.UNAVAILABLE]
    if unavailable:
        yield f"::warning title=unavailable::{count(unavailable, 'subtest')} cannot run on this host"
    if verdict.nothing_tested:
        yield f"::error title=nothing was tested::{data(NOTHING)}"
    yield f"::notice title=attention matrix::{data(count_line(verdict.counts))}"


def data(text: str) -> str:
    """Escape the text of a workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def field(text: str) -> str:
    """Escape a property of a workflow command."""
    return data(text).replace(":", "%3A").replace(",", "%2C")

"""Turns what a subtest did into a pytest report: known failures, unexpected passes, unavailable cells.

Works for a bare ``pytest generated_tests/`` as well as inside a worker of the orchestrator; every item with a
``subtest`` parameter gets one ``("attnmatrix", {...})`` pair in its report's ``user_properties``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest

from kits import record
from kits.errors import Unavailable
from kits.record import Record
from kits.subtest import Subtest
from kits.verdict import Verdict, judge

PROPERTY = "attnmatrix"
CRASH_HINT = "known failure {id} crashes its process; run it with: nox -s gpu_matrix -- {subtest}"


def subtest_of(item: pytest.Item) -> Subtest | None:
    callspec = getattr(item, "callspec", None)
    found = callspec.params.get("subtest") if callspec is not None else None
    return found if isinstance(found, Subtest) else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    subtest = subtest_of(item)
    if subtest is None or subtest.known_failure is None:
        return
    entry = subtest.known_failure
    if entry.action == "skip":
        pytest.skip(f"known failure {entry.id}: {entry.reason}")
    if entry.action == "crash" and not os.environ.get("ATTNMATRIX_RUN_CRASHING"):
        pytest.skip(CRASH_HINT.format(id=entry.id, subtest=subtest.id))


def told(verdict: Verdict, notes: Record) -> str:
    """What a person wants to know of a failure before the traceback: the check, how far it got, and with what."""
    failure = verdict.failure or {}
    lines = [f"check: {failure.get('check')}", *str(failure.get("message") or "").splitlines()[:12]]
    if verdict.reason is not None and verdict.reason not in lines:
        lines.append(verdict.reason)
    if notes.margin is not None:
        lines.append(f"largest error compared: {notes.margin:.3g} of its tolerance")
    lines.append(
        f"ran: {', '.join(sorted(notes.ran)) or 'nothing'}; {notes.captures} captures, {notes.replays} replays"
    )
    return "\n".join(lines)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    subtest = subtest_of(item)
    if subtest is None or (report.when != "call" and report.passed):
        return report
    error = call.excinfo.value if call.excinfo is not None else None
    notes = record.latest(subtest.id)
    verdict = judge(subtest, error, notes)
    if verdict.outcome == "unavailable":
        assert isinstance(error, Unavailable)
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"unavailable ({error.kind}): {error}")
    elif verdict.outcome == "known_failure":
        assert subtest.known_failure is not None
        report.outcome = "skipped"
        report.wasxfail = f"reason: known failure {subtest.known_failure.id}: {subtest.known_failure.reason}"
    elif verdict.outcome in ("failed", "unexpected_pass"):
        if verdict.reason is not None:
            report.longrepr = f"{report.longrepr}\n\n{verdict.reason}" if report.failed else verdict.reason
        report.outcome = "failed"
    details = notes.as_dict() | {"outcome": verdict.outcome, "failure": verdict.failure, "reason": verdict.reason}
    if isinstance(error, Unavailable):
        details["unavailable_kind"] = error.kind
    if subtest.known_failure is not None:
        details["known_failure"] = subtest.known_failure.id
    report.user_properties.append((PROPERTY, details))
    if report.failed:
        report.sections.append((f"attnmatrix {subtest.id}", told(verdict, notes)))
    return report


@pytest.fixture(scope="session", autouse=True)
def _seeded_fault() -> Generator[None]:
    """Plant what ``ATTNMATRIX_FAULT`` names, for the whole process."""
    if not os.environ.get("ATTNMATRIX_FAULT"):
        yield
        return
    from kits.faults import planted_from_environment

    with planted_from_environment():
        yield


@pytest.fixture(scope="module", autouse=True)
def _settled_garbage() -> None:
    """Once per module: garbage that still holds freed tensors would hide a dangling pointer later on.

    What is left is frozen: it is the libraries, and collections within the module need not look through them again.
    """
    gc.collect()
    gc.freeze()

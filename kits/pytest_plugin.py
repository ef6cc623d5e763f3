"""Turns what a subtest did into a pytest report: known failures, unexpected passes, unavailable cells.

Works for a bare ``pytest generated_tests/`` as well as inside a worker of the orchestrator; every item with a
``subtest`` parameter gets one ``("attnmatrix", {...})`` pair in its report's ``user_properties``.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from typing import Any

import pytest

from kits import known, record
from kits.errors import CheckFailed, Unavailable
from kits.subtest import Subtest

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


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    subtest = subtest_of(item)
    if subtest is None or (report.when != "call" and report.passed):
        return report
    error = call.excinfo.value if call.excinfo is not None else None
    details = record.latest(subtest.id).as_dict()
    details["outcome"] = report.outcome
    details["failure"] = None
    if isinstance(error, Unavailable):
        details |= {"outcome": "unavailable", "unavailable_kind": error.kind}
        report.outcome = "skipped"
        report.longrepr = (str(item.path), item.location[1] or 0, f"unavailable ({error.kind}): {error}")
    elif isinstance(error, pytest.skip.Exception):
        details["outcome"] = "skipped_known"
    elif subtest.known_failure is not None and subtest.known_failure.action == "xfail" and known.applies(subtest):
        _judge_known_failure(report, subtest, error, details)
    if report.failed:
        details["failure"] = _describe(error)
    if subtest.known_failure is not None:
        details["known_failure"] = subtest.known_failure.id
    report.user_properties.append((PROPERTY, details))
    return report


def _judge_known_failure(
    report: pytest.TestReport, subtest: Subtest, error: BaseException | None, details: dict[str, Any]
) -> None:
    """A known failure must fail, in its stated way: anything else is a failure of the entry."""
    entry = subtest.known_failure
    assert entry is not None
    if error is None:
        report.outcome = "failed"
        details["outcome"] = "unexpected_pass"
        report.longrepr = (
            f"unexpected pass: {subtest.id} is declared as known failure {entry.id!r} but passes; "
            "delete this entry from suite.toml (or narrow its match)"
        )
        return
    problem = known.differs_from_entry(entry, error)
    if problem is None:
        details["outcome"] = "known_failure"
        details["failure"] = _describe(error)
        report.outcome = "skipped"
        report.wasxfail = f"reason: known failure {entry.id}: {entry.reason}"
        return
    details["outcome"] = "failed"
    report.longrepr = f"{report.longrepr}\n\nnot the known failure {entry.id!r} it is declared as: {problem}"


def _describe(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"check": "unexpected_pass", "message": "passed, but is declared as a known failure"}
    described: dict[str, Any] = {
        "check": error.check if isinstance(error, CheckFailed) else type(error).__name__,
        "message": str(error),
    }
    for name in ("rule", "row", "max_abs", "wrong", "margin"):
        if hasattr(error, name):
            described[name] = getattr(error, name)
    return described


@pytest.fixture(scope="module", autouse=True)
def _settled_garbage() -> None:
    """Once per module: garbage that still holds freed tensors would hide a dangling pointer later on."""
    gc.collect()

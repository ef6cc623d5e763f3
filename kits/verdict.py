"""What the end of a subtest means: one rule for pytest and for the measurement of power."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kits import known
from kits.errors import CheckFailed, Unavailable
from kits.record import Record
from kits.subtest import Subtest

GREEN = frozenset({"passed", "known_failure", "skipped_known"})
"""Outcomes that a healthy backend has. ``unavailable`` is the host's, and neither."""


@dataclass(frozen=True)
class Verdict:
    """``outcome`` is one of those that a worker may claim. ``failure`` describes what went wrong; ``reason`` says why
    that is not what a known failure states, or why a subtest failed although nothing was wrong with it."""

    outcome: str
    failure: dict[str, Any] | None = None
    reason: str | None = None

    @property
    def check(self) -> str | None:
        """Name of the check, or of the exception, that ended the subtest."""
        return None if self.failure is None else self.failure["check"]


def judge(subtest: Subtest, error: BaseException | None, notes: Record) -> Verdict:
    """The verdict on a subtest that ended with ``error``, or without one.

    A skip excuses nothing unless the entry of a known failure asks for it: the code under test may have raised it.
    """
    entry = subtest.known_failure
    if isinstance(error, Unavailable):
        return Verdict("unavailable", reason=str(error))
    if _is_skip(error):
        if entry is not None and entry.action in ("skip", "crash"):
            return Verdict("skipped_known", reason=str(error))
        reason = f"{subtest.id} was skipped, but no known failure says that it may be: {error}"
        return Verdict("failed", {"check": "skip", "message": reason}, reason)
    if error is None and notes.backend_class and notes.backend_class != subtest.adapter.replace(":", "."):
        reason = f"{subtest.id} names the adapter {subtest.adapter}, but {notes.backend_class} ran"
        return Verdict("failed", {"check": "backend_class", "message": reason}, reason)
    if entry is None or entry.action != "xfail" or not known.applies(subtest):
        return Verdict("passed") if error is None else Verdict("failed", describe(error))
    if error is None:
        reason = (
            f"unexpected pass: {subtest.id} is declared as known failure {entry.id!r} but passes; "
            "delete this entry from suite.toml (or narrow its match)"
        )
        return Verdict("unexpected_pass", {"check": "unexpected_pass", "message": reason}, reason)
    problem = known.differs_from_entry(entry, error)
    if problem is None:
        return Verdict("known_failure", describe(error))
    return Verdict("failed", describe(error), f"not the known failure {entry.id!r} it is declared as: {problem}")


def describe(error: BaseException) -> dict[str, Any]:
    """Check, message and figures of what a subtest raised."""
    described: dict[str, Any] = {
        "check": error.check if isinstance(error, CheckFailed) else type(error).__name__,
        "message": str(error),
    }
    for name in ("rule", "row", "max_abs", "wrong", "margin"):
        if hasattr(error, name):
            described[name] = getattr(error, name)
    return described


def _is_skip(error: BaseException | None) -> bool:
    """pytest's skip, or unittest's; known by name, so that pytest need not be there."""
    return error is not None and type(error).__name__ in ("Skipped", "SkipTest")

"""The outcomes a planned subtest can end in, and what they mean for the exit code."""

from __future__ import annotations

from collections.abc import Iterable

PASSED = "passed"
FAILED = "failed"
KNOWN_FAILURE = "known_failure"
UNEXPECTED_PASS = "unexpected_pass"
SKIPPED_KNOWN = "skipped_known"
FLAKY = "flaky"
UNAVAILABLE = "unavailable"
CRASHED = "crashed"
TIMEOUT = "timeout"
NOT_RUN = "not_run"

EXIT_CODES = {FAILED: 1, CRASHED: 3, TIMEOUT: 4, UNEXPECTED_PASS: 5, FLAKY: 6, NOT_RUN: 7, UNAVAILABLE: 8}
"""Exit code of a run by its gravest outcome, gravest first. 2 stays argparse's; 10 and up are the orchestrator's own
errors; 130 an interrupt."""

EXIT_NOTHING = 9
"""Exit code of a run in which nothing went wrong because nothing was tested."""

EXPECTED = frozenset({PASSED, KNOWN_FAILURE, SKIPPED_KNOWN})
ORDER = (FAILED, CRASHED, TIMEOUT, UNEXPECTED_PASS, FLAKY, NOT_RUN, UNAVAILABLE, KNOWN_FAILURE, SKIPPED_KNOWN, PASSED)
"""Gravest first: the order of reports, and of the worst outcome of a cell."""

WORKER_OUTCOMES = frozenset({PASSED, FAILED, KNOWN_FAILURE, UNEXPECTED_PASS, SKIPPED_KNOWN, UNAVAILABLE})
"""What a worker may claim. ``crashed`` and ``timeout`` are the supervisor's to say, ``flaky`` and ``not_run`` the
verdict's."""

BAD = frozenset({FAILED, CRASHED, TIMEOUT, UNEXPECTED_PASS})
"""What ``--confirm`` runs again."""

UNAVAILABLE_KINDS = frozenset({"no_device", "architecture", "package"})

PHRASES = {
    PASSED: ("passed", "passed"),
    FAILED: ("failed", "failed"),
    KNOWN_FAILURE: ("known failure", "known failures"),
    UNEXPECTED_PASS: ("unexpected pass", "unexpected passes"),
    SKIPPED_KNOWN: ("skipped (known)", "skipped (known)"),
    FLAKY: ("flaky", "flaky"),
    UNAVAILABLE: ("unavailable", "unavailable"),
    CRASHED: ("crashed", "crashed"),
    TIMEOUT: ("timed out", "timed out"),
    NOT_RUN: ("not run", "not run"),
}


def say(outcome: str, count: int) -> str:
    """``3 known failures``."""
    return f"{count} {PHRASES[outcome][count != 1]}"


def worst(outcomes: Iterable[str]) -> str:
    """The gravest of some outcomes; ``passed`` if there are none."""
    return min(outcomes, key=ORDER.index, default=PASSED)

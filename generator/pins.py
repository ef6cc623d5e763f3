"""Pinned counts: a matrix that grew or shrank says where before it is accepted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from generator.problems import Problem, quote
from generator.spec import Spec

if TYPE_CHECKING:
    from generator.matrix import Matrix, Project

SHOWN = 3
"""How many ids of a sweep are shown."""


def check_pins(spec: Spec, matrix: Matrix, previous: Mapping[str, Any] | None) -> Iterator[Problem]:
    """A problem for each pinned number that does not hold. ``previous`` is the manifest last generated."""
    profile = spec.profiles[matrix.profile]
    found = {"subtests": matrix.must_pass, "known_failures": matrix.known_failures}
    words = {"subtests": "subtests that must pass", "known_failures": "known failures"}
    told = False
    for key, count in found.items():
        pinned = getattr(profile, key)
        if pinned is not None and pinned != count:
            yield Problem(
                "E-count",
                ("profiles", matrix.profile, key),
                f"profile {quote(matrix.profile)} has {count} {words[key]}, but pins {pinned}",
                f"if that is meant, set {key} = {count} or run `nox -s generate -- --pin`",
                () if told else tuple(changes(matrix, previous)),
            )
            told = True


def changes(matrix: Matrix, previous: Mapping[str, Any] | None) -> list[str]:
    """Per sweep, what is new and what is gone since ``previous``; all sweeps where that is unknown."""
    before = sweeps_before(matrix.profile, previous)
    if before is None:
        return [f"{sweep}: {said(*now)}" for sweep, now in matrix.by_sweep.items()]
    lines = []
    for sweep in dict.fromkeys([*before, *matrix.by_sweep]):
        then, now = before.get(sweep, (0, 0)), matrix.by_sweep.get(sweep, (0, 0))
        details = ids_changed(matrix, previous, sweep)
        if then != now or details:
            lines.append(f"{sweep}: {said(*then)} -> {said(*now)}{details}")
    return lines or ["no sweep changed since the tests were generated: the pin itself did"]


def sweeps_before(profile: str, previous: Mapping[str, Any] | None) -> dict[str, tuple[int, int]] | None:
    """The counts per sweep of the manifest last generated."""
    try:
        rows = (previous or {})["profiles"][profile]
        return {str(sweep): (int(must_pass), int(known)) for sweep, (must_pass, known) in rows.items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def ids_changed(matrix: Matrix, previous: Mapping[str, Any] | None, sweep: str) -> str:
    """The ids of a sweep that are new or gone, the first few of them."""
    if not previous or previous.get("profile") != matrix.profile:
        return ""
    try:
        then = {row["id"] for row in previous["subtests"] if row["sweep"] == sweep}
    except (KeyError, TypeError):
        return ""
    now = {subtest.id for subtest in matrix.subtests if subtest.sweep == sweep}
    ids = [*(f"+{name}" for name in sorted(now - then)), *(f"-{name}" for name in sorted(then - now))]
    if not ids:
        return ""
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f" ({', '.join(ids[:SHOWN])}{more})"


def said(must_pass: int, known: int) -> str:
    """``23`` or ``4 + 2 known``."""
    return f"{must_pass} + {known} known" if known else str(must_pass)


def repin(project: Project) -> list[str]:
    """Write the counts that hold into the file, in place of those that do not. Returns what was changed."""
    document = project.document
    text = document.path.read_bytes().decode()
    lines = text.split("\n")
    report = []
    edits: list[tuple[int, int, str]] = []
    for name, profile in project.spec.profiles.items():
        matrix = project.matrix(name)
        for key, count in (("subtests", matrix.must_pass), ("known_failures", matrix.known_failures)):
            pinned = getattr(profile, key)
            if pinned is not None and pinned != count:
                line, column = document.positions.find(("profiles", name, key))
                edits.append((line - 1, column - 1, str(count)))
                report.append(f"{document.path.name}:{line}: profile {name}: {key} = {pinned} -> {count}")
    for row, start, new in sorted(edits, reverse=True):
        tail = lines[row][start:]
        written = len(tail) - len(tail.lstrip("0123456789_+"))  # a number may be written as 1_000
        lines[row] = lines[row][:start] + new + tail[written:]
    if edits:
        document.path.write_bytes("\n".join(lines).encode())
    return report

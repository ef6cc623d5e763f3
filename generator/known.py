"""Known failures onto the subtests they match."""

from __future__ import annotations

from collections.abc import Iterator

from generator.problems import Problem, one_each, quote
from generator.spec import KnownFailure, Match
from generator.subtests import Subtest


def criteria(match: Match) -> dict[str, frozenset[object]]:
    """The values that each stated key allows."""
    found: dict[str, frozenset[object]] = {}
    for key in sorted(match.model_fields_set):
        value = getattr(match, key)
        found[key] = frozenset(value if isinstance(value, list) else [value])
    return found


def value_of(subtest: Subtest, key: str) -> object:
    """What a key of a match is compared with."""
    if key == "mode":
        return subtest.case.mode
    if key == "case":
        return subtest.shape
    if key == "spec":
        return subtest.speculation
    return getattr(subtest, key)


def attach(entries: list[KnownFailure], subtests: list[Subtest]) -> tuple[list[Subtest], list[int], list[Problem]]:
    """The subtests with their known failures, how many each entry matched, and the subtests matched twice."""
    wanted = [criteria(entry.match) for entry in entries]
    counts = [0] * len(entries)
    problems: list[Problem] = []
    result: list[Subtest] = []
    for subtest in subtests:
        for at, entry in enumerate(entries):
            if not all(value_of(subtest, key) in values for key, values in wanted[at].items()):
                continue
            counts[at] += 1
            if subtest.known_failure is not None:
                message = f"{quote(entry.id)} matches {subtest.id}, which {quote(subtest.known_failure.id)} matches too"
                problems.append(Problem("E-known-twice", ("known_failure", at, "match"), message))
                continue
            subtest = subtest._replace(known_failure=entry)
        result.append(subtest)
    return result, counts, one_each(problems)


def check_counts(entries: list[KnownFailure], default: str, counts: dict[str, list[int]]) -> Iterator[Problem]:
    """Each entry matches as many subtests of its profile as it says. ``counts`` has the matches by profile."""
    for at, entry in enumerate(entries):
        profile = entry.profile or default
        if profile not in counts:
            continue
        found = counts[profile][at]
        if found == 0:
            message = f"{quote(entry.id)} matches no subtest of profile {quote(profile)}"
            yield Problem(
                "E-known-nothing", ("known_failure", at, "match"), message, "delete the entry, or correct its match"
            )
        elif found != entry.count:
            message = f"{quote(entry.id)} matches {found} subtests of profile {quote(profile)}, but says {entry.count}"
            yield Problem("E-known-count", ("known_failure", at, "count"), message)

"""The whole way from a file to the checked subtests of its profiles."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from generator.expand import check_unique, expand
from generator.index import Index
from generator.known import attach, check_counts
from generator.loading import Document, load
from generator.problems import Problem
from generator.references import check_references, check_unused
from generator.spec import Spec
from generator.subtests import Subtest
from generator.support import check_support
from generator.values import check_values


@dataclass(frozen=True)
class Matrix:
    """The subtests of one profile, known failures attached."""

    profile: str
    subtests: list[Subtest]
    matches: list[int]
    """How many subtests each known failure matched."""

    @cached_property
    def must_pass(self) -> int:
        """How many subtests must pass."""
        return sum(subtest.known_failure is None for subtest in self.subtests)

    @cached_property
    def known_failures(self) -> int:
        """How many subtests are known to fail."""
        return len(self.subtests) - self.must_pass

    @cached_property
    def by_sweep(self) -> dict[str, tuple[int, int]]:
        """For each sweep how many must pass and how many are known to fail."""
        total = Counter(subtest.sweep for subtest in self.subtests)
        known = Counter(subtest.sweep for subtest in self.subtests if subtest.known_failure is not None)
        return {sweep: (total[sweep] - known[sweep], known[sweep]) for sweep in total}


@dataclass
class Project:
    """A spec without problems in its tables, and the matrices expanded from it so far."""

    document: Document
    spec: Spec
    index: Index
    matrices: dict[str, Matrix]

    @classmethod
    def open(cls, path: Path, today: datetime.date | None = None) -> Project:
        """Read ``path`` and check every table. Raises ``SpecError`` with all problems."""
        document = load(path)
        if document.spec is None:
            document.fail()
        assert document.spec is not None
        index = Index(document.spec)
        document.add(check_references(document, index))
        document.add(check_values(index, today or datetime.date.today()))
        document.add(check_support(index))
        if not document.problems:  # a table with a mistake may be the one that leads there
            document.add(check_unused(index))
        document.fail()
        return cls(document, document.spec, index, {})

    @property
    def default_profile(self) -> str:
        """The profile that the committed tests are made from."""
        return self.spec.suite.default_profile

    def matrix(self, profile: str) -> Matrix:
        """The subtests of a profile. Raises ``SpecError`` where two of them are the same."""
        if profile not in self.matrices:
            subtests = expand(self.index, profile)
            self.document.add(check_unique(subtests))
            subtests, matches, problems = attach(self.spec.known_failure, subtests)
            self.document.add(problems)
            self.matrices[profile] = Matrix(profile, subtests, matches)
            self.document.fail()
        return self.matrices[profile]

    def check_all(self, previous: dict[str, object] | None) -> None:
        """Check every profile: unique subtests, known failures, pinned counts. ``previous`` is the manifest on disk."""
        from generator.pins import check_pins

        problems: list[Problem] = []
        for profile in self.spec.profiles:
            problems += check_pins(self.spec, self.matrix(profile), previous)
        counts = {name: self.matrix(name).matches for name in self.spec.profiles}
        problems += check_counts(self.spec.known_failure, self.default_profile, counts)
        self.document.add(problems)
        self.document.fail()

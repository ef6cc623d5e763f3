"""manifest.json: the plan in a form that needs neither the spec nor the test modules."""

from __future__ import annotations

import json
from typing import Any

from generator.committed import FORMAT, spec_hash
from generator.matrix import Matrix, Project
from generator.subtests import Subtest


def manifest_text(project: Project, matrix: Matrix, folder: str) -> str:
    """The manifest of a profile, one subtest per line so that a diff can be read."""
    head = {
        "format": FORMAT,
        "profile": matrix.profile,
        "spec_sha256": spec_hash(project.document.data),
        "counts": {"must_pass": matrix.must_pass, "known_failures": matrix.known_failures},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    counts = (f"    {json.dumps(name)}: {json.dumps(profile_counts(project, name))}" for name in project.spec.profiles)
    shared = memberships(project, matrix)
    rows = (f"    {json.dumps(row(subtest, folder, shared.get(subtest.id, [])))}" for subtest in matrix.subtests)
    lines += ['  "profiles": {', ",\n".join(counts), "  },", '  "subtests": [', ",\n".join(rows), "  ]"]
    return "\n".join(["{", *lines, "}"]) + "\n"


def profile_counts(project: Project, profile: str) -> dict[str, list[int]]:
    """For each sweep of a profile how many must pass and how many are known to fail."""
    return {sweep: list(counts) for sweep, counts in project.matrix(profile).by_sweep.items()}


def memberships(project: Project, matrix: Matrix) -> dict[str, list[str]]:
    """For each id the other profiles that have it, of those whose subtests are all in this one.

    Such a profile can be run from the same folder, by leaving the others out.
    """
    mine = {subtest.id for subtest in matrix.subtests}
    found: dict[str, list[str]] = {}
    for name in project.spec.profiles:
        ids = [subtest.id for subtest in project.matrix(name).subtests] if name != matrix.profile else []
        if mine.issuperset(ids):
            for id in ids:
                found.setdefault(id, []).append(name)
    return found


def row(subtest: Subtest, folder: str, profiles: list[str]) -> dict[str, Any]:
    """One subtest; ``profiles`` are the others that have it."""
    entry = subtest.known_failure
    fields: dict[str, Any] = {
        "id": subtest.id,
        "node": node(subtest, folder),
        "method": subtest.method,
        "backend": subtest.backend,
        "sweep": subtest.sweep,
        "runner": subtest.runner,
        "mode": subtest.case.mode,
        "case": subtest.case.name,
        "seq_lens": subtest.seq_lens,
        "layout": subtest.layout,
        "pad_style": subtest.pad_style,
        "multiplier": subtest.multiplier,
        "known_failure": entry.id if entry else None,
        "known_failure_action": entry.action if entry else None,
        "weight": subtest.cost,
        "profiles": profiles,
    }
    if entry and entry.exit:
        fields["known_failure_exit"] = entry.exit
    return fields


def node(subtest: Subtest, folder: str) -> str:
    """The pytest node of a subtest below ``folder``."""
    return f"{folder}/{subtest.file}::test_{subtest.sweep}[{subtest.rest}]"

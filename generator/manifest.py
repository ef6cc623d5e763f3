"""manifest.json: the plan in a form that needs neither the spec nor the test modules."""

from __future__ import annotations

import json
from typing import Any

from generator.committed import FORMAT, spec_hash
from generator.matrix import Matrix, Project
from generator.subtests import Subtest

RUNNER_WEIGHT = {"eager": 1.0, "pcg": 3.0, "bcg": 3.0, "cuda_graph": 5.0, "cuda_graph_multi_step": 6.0}
"""Rough cost of a subtest by its runner, relative to eager; recorded durations replace it."""


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
    rows = (f"    {json.dumps(row(subtest, folder))}" for subtest in matrix.subtests)
    lines += ['  "profiles": {', ",\n".join(counts), "  },", '  "subtests": [', ",\n".join(rows), "  ]"]
    return "\n".join(["{", *lines, "}"]) + "\n"


def profile_counts(project: Project, profile: str) -> dict[str, list[int]]:
    """For each sweep of a profile how many must pass and how many are known to fail."""
    return {sweep: list(counts) for sweep, counts in project.matrix(profile).by_sweep.items()}


def row(subtest: Subtest, folder: str) -> dict[str, Any]:
    """One subtest."""
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
        "weight": round(RUNNER_WEIGHT[subtest.runner] * subtest.weight, 3),
    }
    if entry and entry.exit:
        fields["known_failure_exit"] = entry.exit
    return fields


def node(subtest: Subtest, folder: str) -> str:
    """The pytest node of a subtest below ``folder``."""
    return f"{folder}/{subtest.file}::test_{subtest.sweep}[{subtest.rest}]"

"""Writes a generated folder whose subtests pass, fail, crash or hang as their names say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

MODULE = '''"""Fake subtests of {method}, backend {backend}."""

import pytest

from orchestrator.campaign.acts import act

{prelude}
{tests}
'''

TEST = """
@pytest.mark.parametrize("case", {cases!r})
def test_{sweep}(case, record_property):
    act("{method}.{backend}.{sweep}." + case, case.split(".")[0], record_property)

"""


def write_suite(
    folder: Path, ids: Iterable[str], *, known: Mapping[str, tuple[str, str | None]] | None = None,
    weights: Mapping[str, float] | None = None, prelude: Mapping[str, str] | None = None, spec: str = "fake",
) -> Path:  # fmt: skip
    """Write modules and manifest for these ids. ``known`` gives (action, required exit) of known failures, ``prelude``
    source text for the head of a module."""
    known, weights, prelude = known or {}, weights or {}, prelude or {}
    folder.mkdir(parents=True, exist_ok=True)
    modules: dict[tuple[str, str], dict[str, list[str]]] = {}
    rows = []
    for id in ids:
        method, backend, sweep, rest = id.split(".", 3)
        modules.setdefault((method, backend), {}).setdefault(sweep, []).append(rest)
        action, required = known.get(id, (None, None))
        rows.append(
            {
                "id": id,
                "node": f"generated_tests/test_{method}_{backend}.py::test_{sweep}[{rest}]",
                "method": method,
                "backend": backend,
                "sweep": sweep,
                "known_failure": "fake_bug" if action else None,
                "known_failure_action": action,
                "known_failure_exit": required,
                "weight": weights.get(id, 1.0),
            }
        )
    for (method, backend), sweeps in modules.items():
        tests = "".join(
            TEST.format(method=method, backend=backend, sweep=sweep, cases=cases) for sweep, cases in sweeps.items()
        )
        name = f"test_{method}_{backend}.py"
        text = MODULE.format(method=method, backend=backend, prelude=prelude.get(name, ""), tests=tests)
        (folder / name).write_text(text)
    count = sum(row["known_failure"] is not None for row in rows)
    manifest = {
        "format": 1,
        "profile": "fake",
        "spec_sha256": spec,
        "counts": {"must_pass": len(rows) - count, "known_failures": count},
        "subtests": rows,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def passing(count: int = 4, backends: tuple[str, ...] = ("aa", "bb"), sweep: str = "eager") -> list[str]:
    """Ids of subtests that pass."""
    return [f"dense.{backend}.{sweep}.pass_{number}" for backend in backends for number in range(count)]

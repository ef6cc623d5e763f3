"""The generated subtests, for tests that must go through the real ones."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import kits
from kits import Subtest, record
from kits.verdict import Verdict, judge

GENERATED = Path(__file__).parents[2] / "generated_tests"


@functools.cache
def planned() -> dict[str, Subtest]:
    """Every subtest that a generated module states, by id."""
    found: dict[str, Subtest] = {}
    for path in sorted(GENERATED.glob("test_*.py")):
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for value in vars(module).values():
            if isinstance(value, list):
                found |= {subtest.id: subtest for subtest in value if isinstance(subtest, Subtest)}
    return found


def attempt(subtest: Subtest) -> Verdict:
    """Run a subtest and judge how it ended, as the pytest plugin does."""
    error: Exception | None = None
    try:
        kits.run(subtest)
    except Exception as raised:
        error = raised
    return judge(subtest, error, record.latest(subtest.id))

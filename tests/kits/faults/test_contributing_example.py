"""The fault that CONTRIBUTING shows is a fault: planted as it stands there, and caught."""

from __future__ import annotations

import re
import types
from collections.abc import Iterator

import pytest

from kits.faults import planted, registry
from kits.faults.trial import attempt
from tests.kits.generated import GENERATED, planned

TEXT = (GENERATED.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def example() -> Iterator[str]:
    """Registers the example, and returns its id."""
    section = TEXT.split("## Add a seeded fault", 1)[1].split("\n## ", 1)[0]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    before = dict(registry._registry)
    module = types.ModuleType("kits.faults.example")
    exec(compile(source, "CONTRIBUTING.md", "exec"), vars(module))
    (added,) = set(registry._registry) - set(before)
    assert f"nox -s power -- {added} " in section
    yield added
    registry._registry.clear()
    registry._registry.update(before)


def test_the_example_is_caught(example: str) -> None:
    with planted(example):
        found = attempt(planned()["dense.fa3.eager.decode3"])
        assert (found.outcome, found.check, found.exercised) == ("failed", "compare", True)
        assert attempt(planned()["dense.fa3.eager.cross2"]).outcome == "passed"

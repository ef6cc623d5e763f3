"""No two planned subtests have the same kernel inputs and replay plan."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections import defaultdict
from pathlib import Path

from kits import Subtest
from kits.fingerprint import fingerprint

GENERATED = Path(__file__).parents[2] / "generated_tests"


def planned() -> list[Subtest]:
    """Every subtest that a generated module states."""
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
    return list(found.values())


def test_every_planned_subtest_is_one_of_its_kind() -> None:
    subtests = planned()
    counts = json.loads((GENERATED / "manifest.json").read_text())["counts"]
    assert len(subtests) == counts["must_pass"] + counts["known_failures"]
    ids = defaultdict(list)
    for subtest in subtests:
        ids[fingerprint(subtest)].append(subtest.id)
    assert [twins for twins in ids.values() if len(twins) > 1] == []


def test_a_new_name_makes_no_new_subtest() -> None:
    subtest = planned()[0]
    case = dataclasses.replace(subtest.case, name="another")
    assert fingerprint(dataclasses.replace(subtest, id="a.b.c.d", case=case)) == fingerprint(subtest)
    longer = dataclasses.replace(subtest.case, prefix_lens=tuple(n + 1 for n in subtest.case.prefix_lens))
    assert fingerprint(dataclasses.replace(subtest, case=longer)) != fingerprint(subtest)

"""No two planned subtests have the same kernel inputs and replay plan."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict

from tests.kits.fingerprint import fingerprint
from tests.kits.generated import GENERATED, planned


def test_every_planned_subtest_is_one_of_its_kind() -> None:
    subtests = list(planned().values())
    counts = json.loads((GENERATED / "manifest.json").read_text())["counts"]
    assert len(subtests) == counts["must_pass"] + counts["known_failures"]
    ids = defaultdict(list)
    for subtest in subtests:
        ids[fingerprint(subtest)].append(subtest.id)
    assert [twins for twins in ids.values() if len(twins) > 1] == []


def test_a_new_name_makes_no_new_subtest() -> None:
    subtest = next(iter(planned().values()))
    case = dataclasses.replace(subtest.case, name="another")
    assert fingerprint(dataclasses.replace(subtest, id="a.b.c.d", case=case)) == fingerprint(subtest)
    longer = dataclasses.replace(subtest.case, prefix_lens=tuple(n + 1 for n in subtest.case.prefix_lens))
    assert fingerprint(dataclasses.replace(subtest, case=longer)) != fingerprint(subtest)


def test_every_backend_with_a_window_takes_in_a_draft_with_it() -> None:
    """Metadata of the window are built mode by mode: one that forgets them is only seen by a model that has one."""
    windowed = [subtest for subtest in planned().values() if subtest.model.window is not None]
    graphs = {
        subtest.adapter.rpartition(":")[2]
        for subtest in windowed
        if subtest.case.mode.startswith("DRAFT_EXTEND") and subtest.runner == "cuda_graph"
    }
    assert graphs == {subtest.adapter.rpartition(":")[2] for subtest in windowed}

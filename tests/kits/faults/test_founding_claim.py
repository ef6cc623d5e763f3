"""525 subtests miss the bug that this suite exists for, and 535 catch it: through the generated subtests themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kits.faults import find, planted
from kits.faults.trial import Trial, attempt, load_subtests
from orchestrator.power.planning import read_matrix
from tests.kits.generated import GENERATED

FAULT = "F01"


def against(folder: Path) -> tuple[int, list[Trial]]:
    """The number of subtests that must pass, and the fault against all of the folder that it can touch."""
    matrix, subtests = read_matrix(folder), load_subtests(folder)
    must_pass = sum(subtest.known_failure is None for subtest in subtests.values())
    with planted(FAULT):
        touched = [entry["id"] for entry in matrix.entries if find(FAULT).touches.covers(entry)]
        return must_pass, [attempt(subtests[subtest_id]) for subtest_id in touched]


@pytest.fixture
def ancestor(tmp_path: Path) -> Path:
    command = [sys.executable, "-m", "generator", "generate", "--profile", "ancestor", "--output", str(tmp_path)]
    subprocess.run(command, check=True, cwd=GENERATED.parent, stdout=subprocess.DEVNULL)
    return tmp_path


def test_the_ancestor_stays_green(ancestor: Path) -> None:
    must_pass, trials = against(ancestor)
    assert must_pass == 525
    assert trials
    assert not [trial for trial in trials if trial.killed]


def test_the_matrix_turns_red() -> None:
    must_pass, trials = against(GENERATED)
    assert must_pass == 535
    caught = [trial for trial in trials if trial.killed]
    assert {trial.id.split(".")[2] for trial in caught} == {"draft_extend_v2_cg"}
    assert len(caught) == 6, "two methods at three multipliers, padded as production pads"
    assert {trial.check for trial in caught} == {"metadata_invariants"}
    assert all(".prod_fill." in trial.id and trial.exercised for trial in caught)

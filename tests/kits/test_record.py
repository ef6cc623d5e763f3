"""What a subtest leaves behind about its time."""

import time

import pytest

from kits import record


def test_a_phase_within_a_phase_counts_for_itself() -> None:
    notes = record.begin("a")
    with notes.phase("outer"):
        time.sleep(0.01)
        with record.phase("inner"):
            time.sleep(0.05)
        with pytest.raises(ZeroDivisionError), notes.phase("inner"):
            _ = 1 / 0
    with notes.phase("outer"):
        pass
    assert notes.seconds["inner"] >= 0.05
    assert 0.01 <= notes.seconds["outer"] < 0.05
    assert set(notes.as_dict()["seconds"]) == {"inner", "outer"}


def test_a_phase_of_nobody() -> None:
    record._latest.clear()
    with record.phase("inner"):
        pass
    assert record.latest("a").seconds == {}

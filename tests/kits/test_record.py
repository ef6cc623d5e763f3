"""What a subtest leaves behind about its time."""

import time

import pytest

from kits import record


def fail_later(clock: list[float]) -> None:
    clock[0] += 16.0
    _ = 1 / 0


def test_a_phase_within_a_phase_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    notes = record.begin("a")
    with notes.phase("outer"):
        clock[0] += 1.0
        with record.phase("inner"):
            clock[0] += 8.0
        with pytest.raises(ZeroDivisionError), notes.phase("inner"):
            fail_later(clock)
    with notes.phase("outer"):
        clock[0] += 2.0
    assert notes.as_dict()["seconds"] == {"inner": 24.0, "outer": 3.0}


def test_a_phase_of_nobody() -> None:
    record._latest.clear()
    with record.phase("inner"):
        pass
    assert record.latest("a").seconds == {}

"""What counts as an outcome, whatever stands in the events files."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator import outcomes
from orchestrator.events import EventTail, EventWriter, Garbage, RecordError, read_events
from orchestrator.ledger import Attempt, Ledger
from orchestrator.manifest import Planned
from orchestrator.verdict import conclude, settle

ID = "dense.aa.eager.one"
PLANNED = Planned(ID, "test_dense_aa.py", "test_eager[one]", "dense", "aa", "eager")
START = {"event": "start", "id": ID, "attempt": 0, "t": 1.0}
FINISH = {"event": "finish", "id": ID, "attempt": 0, "seconds": 0.5, "outcome": "passed", "attnmatrix": {"margin": 0.5}}


def ledger() -> Ledger:
    return Ledger({ID: PLANNED})


def feed(*events) -> Ledger:
    book = ledger()
    for event in events:
        book.feed("w1", event)
    return book


def test_a_finish_after_its_start_counts():
    book = feed({"event": "ready", "device": "GPU-1"}, START, FINISH)
    attempt = book.attempts[ID][0]
    assert (attempt.outcome, attempt.device, attempt.margin) == ("passed", "GPU-1", 0.5)
    assert not book.notes


@pytest.mark.parametrize(
    "events",
    [
        [FINISH],
        [START, FINISH | {"attempt": 1}],
        [START, FINISH | {"id": "dense.aa.eager.two"}],
        [START, FINISH | {"outcome": "crashed"}],
        [START, FINISH | {"outcome": "flaky"}],
        [START, FINISH | {"outcome": ["passed"]}],
        [START | {"attempt": True}, FINISH | {"attempt": True}],
        [START | {"attempt": -1}, FINISH | {"attempt": -1}],
        [START | {"attempt": 10**30}, FINISH | {"attempt": 10**30}],
        [START | {"id": {}}, FINISH],
        [{"event": "finnish"}],
        [Garbage("no JSON", "xx")],
    ],
)
def test_anything_else_is_noted_and_counts_for_nothing(events):
    book = feed(*events)
    assert not any(book.attempts.values())
    assert book.noted >= 1


def test_the_first_outcome_stands():
    book = feed(START, FINISH, START, FINISH | {"outcome": "failed"})
    assert book.attempts[ID][0].outcome == "passed"
    assert "second outcome" in book.notes[0]
    book.judge("supervisor", {"event": "judged", "id": ID, "attempt": 0, "outcome": "crashed"})
    assert book.attempts[ID][0].outcome == "passed"
    assert book.noted == 2


def test_a_finish_of_another_worker_does_not_count_for_this_one():
    book = ledger()
    book.feed("w1", START)
    book.feed("w2", FINISH)
    assert not any(book.attempts.values())


def test_the_journal_may_say_crashed_but_not_passed():
    book = ledger()
    book.judge("supervisor", {"event": "judged", "id": ID, "attempt": 0, "outcome": "passed"})
    assert not any(book.attempts.values())
    book.judge("supervisor", {"event": "judged", "id": ID, "attempt": 0, "outcome": "timeout", "message": "\x1b[31mhi"})
    assert book.attempts[ID][0].message == "\N{REPLACEMENT CHARACTER}[31mhi"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(["event", "id", "attempt", "outcome", "seconds", "attnmatrix", "message", "t", "longrepr"])


@given(changes=st.dictionaries(fields, json_values, max_size=4))
@settings(max_examples=200, deadline=None)
def test_no_value_of_a_field_upsets_the_ledger(changes):
    for base in (START, FINISH):
        event = json.loads(json.dumps(base | changes))
        if isinstance(event.get("event"), str):
            book = feed(START, event)
            book.judge("supervisor", event)
            for attempt in book.attempts.get(ID, {}).values():
                json.dumps(vars_of(attempt), allow_nan=False)


def vars_of(attempt: Attempt) -> dict[str, object]:
    return {name: getattr(attempt, name) for name in Attempt.__slots__}


# Files


@given(data=st.binary(max_size=400))
@settings(max_examples=150, deadline=None)
def test_any_bytes_can_be_read(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(data)
    for item in read_events(path):
        assert isinstance(item, Garbage) or isinstance(item["event"], str)


def test_lines_arrive_in_pieces(tmp_path):
    path = tmp_path / "w.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    with open(path, "wb") as file:
        for piece in (b'{"event":"a"}\n{"ev', b'ent":"b"', b"}\n\n", b'{"event":"c"'):
            file.write(piece)
            file.flush()
            seen = [event["event"] for event in tail.read()]
            assert seen in (["a"], [], ["b"])
    assert [garbage.reason for garbage in tail.finish()] == ["half a line"]


def test_half_a_line_does_not_swallow_the_next_event(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'{"event":"finish","id":"')
    writer = EventWriter(path)
    writer.write({"event": "ready"})
    writer.close()
    kinds = [item.reason if isinstance(item, Garbage) else item["event"] for item in read_events(path)]
    assert kinds == ["no JSON", "ready"]


def test_an_endless_line_is_dropped_without_being_held(tmp_path):
    path = tmp_path / "w.jsonl"
    with open(path, "wb") as file:
        for _ in range(12):
            file.write(b"x" * (1 << 20))
        file.write(b'\n{"event":"ready"}\n')
    first, second = read_events(path)
    assert isinstance(first, Garbage)
    assert second == {"event": "ready"}


def test_a_file_that_shrinks_is_read_anew(tmp_path):
    path = tmp_path / "w.jsonl"
    path.write_bytes(b'{"event":"a"}\n{"event":"b"}\n')
    tail = EventTail(path)
    tail.read()
    path.write_bytes(b'{"event":"c"}\n')
    cut, event = tail.read()
    assert isinstance(cut, Garbage)
    assert event == {"event": "c"}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_an_error_at_once(tmp_path):
    writer = EventWriter(tmp_path / "w.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer.fd)
    with pytest.raises(RecordError, match="No space left"):
        writer.write({"event": "ready"})


# Outcomes


def tries(*seen: str) -> list[Attempt]:
    return [Attempt(ID, number, outcome, "w1") for number, outcome in enumerate(seen)]


@pytest.mark.parametrize(
    ("seen", "repeat", "outcome"),
    [
        ([], 1, "not_run"),
        (["passed"], 1, "passed"),
        (["failed", "failed", "failed"], 1, "failed"),
        (["failed", "passed", "failed"], 1, "flaky"),
        (["failed", "crashed"], 1, "failed"),
        (["timeout", "crashed"], 1, "crashed"),
        (["unexpected_pass", "known_failure"], 1, "flaky"),
        (["passed", "passed"], 3, "not_run"),
        (["passed", "failed"], 3, "failed"),
        (["passed", "passed", "failed"], 3, "flaky"),
        (["known_failure"] * 3, 3, "known_failure"),
        (["unavailable", "passed"], 2, "flaky"),
    ],
)
def test_one_outcome_from_several_attempts(seen, repeat, outcome):
    assert conclude(PLANNED, tries(*seen), repeat) == outcome


def test_what_the_plan_does_not_allow_is_a_failure():
    known = tries("known_failure")[0]
    assert settle(PLANNED, known) == "failed"
    assert settle(PLANNED, tries("skipped_known")[0]) == "failed"
    assert settle(PLANNED, tries("unavailable")[0]) == "failed", "without a kind"


@pytest.mark.parametrize("claim", sorted(outcomes.WORKER_OUTCOMES - {"failed"}))
@pytest.mark.parametrize("action", [None, "crash", "xfail"])
def test_whatever_poisons_the_context_has_crashed(claim, action):
    """But for a known failure that was seen to fail as it must."""
    planned = replace(PLANNED, known_failure=action and "bug", action=action)
    attempt = Attempt(ID, 0, claim, "w1", kind="architecture", poisoned=True)
    met = claim == "known_failure" and action is not None
    attempt.outcome = settle(planned, attempt)
    assert attempt.outcome == ("known_failure" if met else "crashed")
    assert settle(planned, attempt) == attempt.outcome, "what is settled stays so"


@pytest.mark.parametrize(
    ("required", "outcome"), [(None, "known_failure"), ("cuda_error", "known_failure"), ("SIGSEGV", "crashed")]
)
def test_a_poisoned_context_is_a_crash_that_an_entry_may_require(required, outcome):
    planned = replace(PLANNED, known_failure="bug", action="crash", required_exit=required)
    assert settle(planned, Attempt(ID, 0, "failed", "w1", poisoned=True)) == outcome


def test_every_outcome_has_a_place_everywhere():
    everything = set(outcomes.ORDER)
    assert everything == set(outcomes.PHRASES)
    assert everything == set(outcomes.EXIT_CODES) | outcomes.EXPECTED
    assert len(set(outcomes.EXIT_CODES.values())) == len(outcomes.EXIT_CODES)
    assert not set(outcomes.EXIT_CODES.values()) & {0, 2}

"""Turns events into attempts: what each subtest was seen to do, by rules that hold whatever a worker wrote.

A ``finish`` counts only if its ``start`` came right before it in the same file and the supervisor had not judged that
attempt. The same code reads a live run, a resumed one and the folders of a merge, so that they cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator import outcomes
from orchestrator.events import Garbage
from orchestrator.manifest import Planned, short

MAX_NOTES = 200
MAX_ATTEMPT = 1_000_000


@dataclass(slots=True)
class Attempt:
    """One try of one subtest."""

    id: str
    attempt: int
    outcome: str
    worker: str
    device: str = "cpu"
    seconds: float = 0.0
    started: float = 0.0
    margin: float | None = None
    max_abs: float | None = None
    ran: tuple[str, ...] = ()
    captures: int = 0
    replays: int = 0
    kind: str | None = None
    """For unavailable: ``no_device``, ``architecture`` or ``package``."""
    known_failure: str | None = None
    check: str | None = None
    row: int | None = None
    message: str = ""
    detail: str = ""
    poisoned: bool = False


@dataclass(slots=True)
class Cost:
    """Where the time of a run went, in seconds: ``busy`` and ``start`` are the busiest lane's."""

    wall: float
    busy: float
    start: float

    @property
    def own(self) -> float:
        """The orchestrator's own share of the wall time."""
        return max(0.0, self.wall - self.busy - self.start) / self.wall if self.wall else 0.0


@dataclass(slots=True)
class Lane:
    """Where one file of events stands."""

    device: str = "cpu"
    inside: tuple[str, int] | None = None
    started: float = 0.0


@dataclass(slots=True)
class Ledger:
    """All attempts of a run. ``known`` are the planned ids; everything else is noted as foreign."""

    known: Mapping[str, Planned]
    attempts: dict[str, dict[int, Attempt]] = field(default_factory=dict)
    lanes: dict[str, Lane] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    noted: int = 0
    interrupted: int = 0
    remarks: list[str] = field(default_factory=list)
    """What the supervisor wrote down for people: devices set aside, restarts given up."""
    cost: Cost | None = None

    def note(self, text: str) -> None:
        self.noted += 1
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def feed(self, source: str, event: dict[str, object] | Garbage) -> Attempt | None:
        """Take one event of a worker's file; returns the attempt that it finished, if it did."""
        if isinstance(event, Garbage):
            self.note(f"{source}: {event.reason}: {event.text}")
            return None
        lane = self.lanes.setdefault(source, Lane())
        kind = event["event"]
        if kind == "ready":
            lane.device = text_of(event.get("device"), 100) or "cpu"
        elif kind == "start":
            key = self.key_of(event)
            if key is None:
                self.note(f"{source}: a start of nothing planned: {short(event.get('id'))}")
            else:
                lane.inside, lane.started = key, number_of(event.get("t")) or 0.0
        elif kind == "finish":
            return self.finish(source, lane, event)
        elif kind not in ("collect", "bye"):
            self.note(f"{source}: an unknown event {short(kind)}")
        return None

    def finish(self, source: str, lane: Lane, event: dict[str, object]) -> Attempt | None:
        key = self.key_of(event)
        if key is None or key != lane.inside:
            self.note(f"{source}: a finish without its start: {short(event.get('id'))}")
            return None
        outcome = event.get("outcome")
        if not isinstance(outcome, str) or outcome not in outcomes.WORKER_OUTCOMES:
            self.note(f"{source}: {key[0]} finished with {short(outcome)}, which is no outcome")
            return None
        attempt = read_finish(key, source, lane, event)
        lane.inside = None
        return attempt if self.add(attempt) else None

    def judge(self, source: str, event: dict[str, object] | Garbage) -> Attempt | None:
        """Take one event of the supervisor's journal."""
        if isinstance(event, Garbage):
            self.note(f"{source}: {event.reason}: {event.text}")
            return None
        kind = event["event"]
        if kind == "interrupted":
            self.interrupted += 1
        elif kind == "remark":
            self.remarks.append(text_of(event.get("message"), 500))
        elif kind == "ended":
            self.cost = Cost(*(number_of(event.get(name)) or 0.0 for name in ("wall", "busy", "start")))
        elif kind == "judged":
            key, outcome = self.key_of(event), event.get("outcome")
            if key is None or outcome not in (outcomes.CRASHED, outcomes.TIMEOUT, outcomes.KNOWN_FAILURE):
                self.note(f"{source}: a judgement of nothing planned: {short(event.get('id'))}")
                return None
            attempt = Attempt(
                *key, str(outcome), text_of(event.get("worker"), 100), text_of(event.get("device"), 100) or "cpu",
                number_of(event.get("seconds")) or 0.0, number_of(event.get("t")) or 0.0,
                message=text_of(event.get("message"), 4000), detail=text_of(event.get("detail"), 40_000),
            )  # fmt: skip
            return attempt if self.add(attempt) else None
        return None

    def add(self, attempt: Attempt) -> bool:
        """The first word on an attempt stands; a second one is noted and dropped."""
        mine = self.attempts.setdefault(attempt.id, {})
        if attempt.attempt in mine:
            self.note(f"{attempt.worker}: a second outcome for {attempt.id} (attempt {attempt.attempt})")
            return False
        mine[attempt.attempt] = attempt
        return True

    def key_of(self, event: Mapping[str, object]) -> tuple[str, int] | None:
        id, attempt = event.get("id"), event.get("attempt", 0)
        if not isinstance(id, str) or id not in self.known:
            return None
        if isinstance(attempt, bool) or not isinstance(attempt, int) or not 0 <= attempt < MAX_ATTEMPT:
            return None
        return id, attempt


def read_finish(key: tuple[str, int], source: str, lane: Lane, event: Mapping[str, object]) -> Attempt:
    """Fields of foreign make, each taken only if it is what it should be."""
    raw = event.get("attnmatrix")
    facts: Mapping[str, object] = raw if isinstance(raw, dict) else {}
    failure = facts.get("failure")
    failure = failure if isinstance(failure, dict) else {}
    ran = facts.get("ran")
    row = failure.get("row")
    return Attempt(
        *key,
        str(event["outcome"]),
        source,
        lane.device,
        seconds=number_of(event.get("seconds")) or 0.0,
        started=lane.started,
        margin=number_of(facts.get("margin")),
        max_abs=number_of(facts.get("max_abs")),
        ran=tuple(sorted({text_of(item, 40) for item in ran})) if isinstance(ran, (list, tuple)) else (),
        captures=int(number_of(facts.get("captures")) or 0),
        replays=int(number_of(facts.get("replays")) or 0),
        kind=text_of(facts.get("unavailable_kind"), 40) or None,
        known_failure=text_of(facts.get("known_failure"), 200) or None,
        check=text_of(failure.get("check"), 100) or None,
        row=row if isinstance(row, int) else None,
        message=text_of(event.get("message"), 4000),
        detail=text_of(event.get("longrepr"), 40_000),
        poisoned=event.get("poisoned") is True,
    )


def number_of(value: object) -> float | None:
    """A finite number that is not negative; infinity and nan, which JSON has no word for, count as missing."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def text_of(value: object, limit: int) -> str:
    """Text of foreign make: cut, and free of control characters that could drive a terminal or break a file."""
    if not value or not isinstance(value, str):
        return ""
    text = value if len(value) <= limit else value[: limit // 3] + "\n...\n" + value[-(limit - limit // 3) :]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)

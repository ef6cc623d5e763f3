"""Pairs of verdicts, and what it means for one to differ from the other.

Verdicts are compared by class: the outcome, and of a failure the check that failed. Figures are not compared: a kernel
and its emulation round differently.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from orchestrator import outcomes
from orchestrator.errors import OrchestratorError
from orchestrator.events import read_events
from orchestrator.files import read_plain
from orchestrator.folder import Folder
from orchestrator.ledger import text_of
from orchestrator.manifest import MAX_BYTES

AGREE, EXPLAINED, DISAGREE = "agree", "stated limit", "disagree"
ELSEWHERE = "not native here"
EMULATION_ONLY = "emulation_only"
OUT_OF_BOUNDS = frozenset({"kernel_fault", "IndexError"})
SILENT = frozenset({outcomes.SKIPPED_KNOWN})
"""Outcomes of subtests that ran no kernel, so that none can be native."""


@dataclass(frozen=True)
class Seen:
    """What one side saw of a subtest."""

    outcome: str
    check: str | None = None
    message: str = ""
    ran: tuple[str, ...] = ()
    kind: str | None = None
    poisoned: bool = False

    @property
    def verdict(self) -> str:
        """The class that is compared. What is an error of bounds on a CPU is a dead context on CUDA."""
        if self.outcome == outcomes.CRASHED or self.poisoned or self.check in OUT_OF_BOUNDS:
            return "illegal access"
        if self.outcome == outcomes.FAILED:
            return f"failed: {self.check}"
        if self.outcome == outcomes.UNAVAILABLE:
            return f"unavailable: {self.kind}" if self.kind else "unavailable"
        return self.outcome


@dataclass(frozen=True)
class Pair:
    """Both verdicts on one subtest, under a seeded fault or none. ``note`` says why they differ, or may."""

    id: str
    recorder: Seen | None
    cuda: Seen | None
    fault: str | None = None
    status: str = AGREE
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.fault} {self.id}" if self.fault else self.id

    def as_dict(self) -> dict[str, Any]:
        sides = {side: seen and {"verdict": seen.verdict, **asdict(seen)} for side, seen in self.sides}
        return {"id": self.id, "fault": self.fault, "status": self.status, "note": self.note, **sides}

    @property
    def sides(self) -> list[tuple[str, Seen | None]]:
        return [("recorder", self.recorder), ("cuda", self.cuda)]


@dataclass(frozen=True)
class Limit:
    """A disagreement that is understood and stays. The patterns are those of file names. ``sometimes``: it comes and
    goes, as a race does, so that it need not be seen."""

    cause: str
    id: str = "*"
    fault: str | None = None
    recorder: str = "*"
    cuda: str = "*"
    sometimes: bool = False

    def holds(self, pair: Pair) -> bool:
        if pair.recorder is None or pair.cuda is None or (self.fault is None) != (pair.fault is None):
            return False
        return (
            fnmatchcase(pair.id, self.id)
            and fnmatchcase(pair.fault or "", self.fault or "")
            and fnmatchcase(pair.recorder.verdict, self.recorder)
            and fnmatchcase(pair.cuda.verdict, self.cuda)
        )


@dataclass
class Table:
    """Everything that was compared. ``device`` names the GPU, ``versions`` what each side said was installed there;
    the hashes are those of the suite that both sides ran."""

    subtests: list[Pair]
    faults: list[Pair] = field(default_factory=list)
    unused: list[Limit] = field(default_factory=list)
    device: str = ""
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    spec_sha256: str = ""
    manifest_sha256: str = ""

    @property
    def compared(self) -> list[Pair]:
        """Pairs of which both sides had to say something."""
        return [p for p in (*self.subtests, *self.faults) if p.status not in (ELSEWHERE, EMULATION_ONLY)]

    @property
    def disagreements(self) -> list[Pair]:
        return [pair for pair in self.compared if pair.status == DISAGREE]

    @property
    def exit_code(self) -> int:
        """Nothing compared is no agreement: a host whose libraries are gone must not look like one that was tested."""
        compared = {pair.fault is not None for pair in self.compared}
        missing = False not in compared or (bool(self.faults) and True not in compared)
        return 1 if self.disagreements or self.unused or missing else 0


def read_results(folder: Path) -> tuple[dict[str, Seen], dict[str, Any]]:
    """Verdicts by id from the ``results.json`` of a run, and what the run says about itself."""
    path = folder / "results.json"
    try:
        raw = json.loads(read_plain(path, MAX_BYTES))
        rows, run = raw["subtests"], raw["run"]
        return {
            row["id"]: Seen(
                row["outcome"],
                row["check"],
                row["message"],
                tuple(row["ran"]),
                row["unavailable_kind"],
                row.get("poisoned", False),
            )
            for row in rows
        }, run
    except FileNotFoundError:
        raise OrchestratorError("O201", f"{folder} holds no results.json", "run it to its end first") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OrchestratorError("O202", f"{path} cannot be read: {error}") from None


def read_versions(folder: Path) -> dict[str, str]:
    """What was installed where a run took place, in the words of its first worker; nothing where none said it.

    Not what is installed here: the folder may have come from another host.
    """
    for path in Folder(folder).event_files():
        for event in read_events(path):
            here = event.get("environment") if isinstance(event, dict) and event["event"] == "ready" else None
            versions = here.get("versions") if isinstance(here, dict) else None
            if isinstance(versions, dict):
                return {text_of(name, 40): text_of(version, 40) for name, version in versions.items()}
    return {}


def compare_subtests(
    ids: Iterable[str], recorder: Mapping[str, Seen], cuda: Mapping[str, Seen], limits: Sequence[Limit]
) -> list[Pair]:
    """One pair for every id of the manifest. What a side has no verdict on is a disagreement."""
    return [judge(Pair(id, recorder.get(id), cuda.get(id)), limits) for id in ids]


def judge(pair: Pair, limits: Sequence[Limit]) -> Pair:
    """Status and note of a pair."""
    here, there = pair.recorder, pair.cuda
    for side, seen in pair.sides:
        if seen is None or seen.outcome == outcomes.NOT_RUN:
            return _with(pair, DISAGREE, f"no verdict of {side}")
    assert here is not None
    assert there is not None
    if there.outcome == outcomes.UNAVAILABLE and there.kind in outcomes.UNAVAILABLE_KINDS:
        return _with(pair, ELSEWHERE, f"{there.kind}: {there.message}")
    difference = ""
    if here.verdict != there.verdict:
        difference = f"{here.verdict} on the recorder, {there.verdict} on CUDA"
    elif pair.fault is None and there.outcome not in SILENT and there.ran != ("native",):
        difference = f"on CUDA ran {' and '.join(there.ran) or 'nothing'}, not the native kernel alone"
    if not difference:
        return pair
    limit = next((limit for limit in limits if limit.holds(pair)), None)
    return _with(pair, DISAGREE, difference) if limit is None else _with(pair, EXPLAINED, limit.cause)


def _with(pair: Pair, status: str, note: str) -> Pair:
    return Pair(pair.id, pair.recorder, pair.cuda, pair.fault, status, note)


def read_limits(path: Path) -> list[Limit]:
    """The stated limits: ``[[limit]]`` tables of patterns, each with a cause."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        limits = [Limit(**entry) for entry in raw.get("limit", [])]
        if not all(isinstance(value, (str, bool, type(None))) for limit in limits for value in asdict(limit).values()):
            raise ValueError("every field of a limit is a string, but for `sometimes`")
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError) as error:
        raise OrchestratorError("O202", f"{path}: {error}") from None
    return limits


def unused(limits: Sequence[Limit], pairs: Sequence[Pair]) -> list[Limit]:
    """Limits that no pair needs any more; they would hide the next disagreement."""
    needed = [limit for limit in limits if any(p.status == EXPLAINED and limit.holds(p) for p in pairs)]
    return [limit for limit in limits if limit not in needed and not limit.sometimes]

"""One run of the matrix with a clock beside it, and what its events say about where the time went."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.devices import allowed
from orchestrator.errors import OrchestratorError
from orchestrator.events import read_events
from orchestrator.folder import Folder

OTHER = "other"
"""Time inside subtests that no phase of theirs claims: pytest, reports, what lies between phases."""


@dataclass(frozen=True)
class Setting:
    """``workers`` on each of ``gpus``; on a CPU in all."""

    device: str
    gpus: int
    workers: int

    @property
    def slug(self) -> str:
        return f"gpu{self.gpus}x{self.workers}" if self.gpus else f"cpu{self.workers}"

    def __str__(self) -> str:
        return f"{self.gpus} GPU x {self.workers} workers" if self.gpus else f"CPU, {self.workers} workers"


@dataclass
class Measured:
    """Seconds of one run. ``wall`` is from the command to its end: ``start`` until the first subtest begins, ``work``
    until the last has ended, ``end`` until the reports are written. ``phases`` are summed over all subtests, whichever
    worker ran them; on a GPU they are the host's time. ``idle``: workers' time within ``work`` outside of subtests."""

    setting: Setting
    number: int
    wall: float
    start: float = 0.0
    work: float = 0.0
    end: float = 0.0
    idle: float = 0.0
    exit_code: int = 0
    kind: str = ""
    subtests: int = 0
    said: str = ""
    phases: dict[str, float] = field(default_factory=dict)


def gpus_here() -> int:
    return len(allowed(os.environ))


def measure(setting: Setting, number: int, tests: Path, folder: Path, durations: Path, keyword: str) -> Measured:
    """Run the matrix in a setting. Plans come from the durations of the runs before it."""
    command = [sys.executable, "-m", "orchestrator", "run", "--plain", "--tests", str(tests), "--output", str(folder)]
    command += ["--durations", str(durations), *(["-k", keyword] if keyword else [])]
    env = {**os.environ, "ATTNMATRIX_DEVICE": setting.device}
    if setting.gpus:
        env["ATTNMATRIX_DEVICES"] = ",".join(device.uuid for device in allowed(os.environ)[: setting.gpus])
        command += ["--workers-per-device", str(setting.workers)]
    else:
        command += ["--workers", str(setting.workers)]
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not durations.exists():
        durations.write_text('{"format": 1, "seconds": {}}\n', encoding="utf-8")
    began, clock = time.time(), time.monotonic()
    with open(f"{folder}.txt", "wb") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    found = Measured(setting, number, time.monotonic() - clock, exit_code=done.returncode)
    if not (folder / "run.json").exists():
        raise OrchestratorError("O503", f"{setting}: the run did not take place", f"see {folder}.txt")
    read(found, Folder(folder), began)
    return found


def read(found: Measured, folder: Folder, began: float) -> None:
    """Fill in what the events tell."""
    run, plan = folder.load()
    outcomes: Counter[str] = Counter()
    first, last, inside, workers = float("inf"), began, 0.0, 0
    for path in folder.event_files():
        workers += 1
        for event in read_events(path):
            if not isinstance(event, dict):
                continue
            t, seconds = event.get("t"), event.get("seconds")
            if event["event"] == "start" and isinstance(t, float):
                first = min(first, t)
            elif event["event"] == "finish" and isinstance(t, float) and isinstance(seconds, float):
                last, inside = max(last, t), inside + seconds
                outcomes[str(event.get("outcome"))] += 1
                facts = event.get("attnmatrix")
                phases = facts.get("seconds") if isinstance(facts, dict) else None
                known = {str(name): float(value) for name, value in phases.items()} if isinstance(phases, dict) else {}
                known[OTHER] = max(0.0, seconds - sum(known.values()))
                for name, value in known.items():
                    found.phases[name] = found.phases.get(name, 0.0) + value
    found.kind, found.subtests = run.device_kind, len(plan.subtests)
    found.said = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
    if outcomes:
        found.start, found.work = first - began, last - first
        found.end = max(0.0, found.wall - found.start - found.work)
        found.idle = max(0.0, workers * found.work - inside)

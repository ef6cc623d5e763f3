"""The ways in which a run of the campaign is attacked. A scenario plants misbehaving subtests, and may send an attacker
against the processes or the files of the run while it goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.processes import children_of


@dataclass
class Attack:
    """What an attacker works with, and what it reports back."""

    process: subprocess.Popen[bytes]
    folder: Path
    random: random.Random
    hits: int = 0
    """Subtests that may have been struck without being at fault."""

    def running(self) -> bool:
        return self.process.poll() is None

    def until(self, ready: Callable[[], bool], seconds: float = 20.0) -> bool:
        end = time.monotonic() + seconds
        while self.running() and time.monotonic() < end:
            if ready():
                return True
            time.sleep(0.01)
        return False

    def workers(self) -> list[int]:
        """Process ids of live workers, read from their own events."""
        out = []
        for path in (self.folder / "events").glob("w*.jsonl"):
            for line in path.read_bytes().splitlines():
                if b'"ready"' in line:
                    pid = json.loads(line)["pid"]
                    if Path(f"/proc/{pid}").exists():
                        out.append(pid)
        return out

    def events(self) -> int:
        """How many lines have been recorded."""
        return sum(path.read_bytes().count(b'"finish"') for path in (self.folder / "events").glob("w*.jsonl"))

    def launcher(self) -> list[int]:
        return children_of(self.process.pid)

    def send(self, pids: list[int], sig: int) -> None:
        if pids:
            try:
                os.kill(self.random.choice(pids), sig)
            except ProcessLookupError:
                return
            self.hits += 1


@dataclass
class Scenario:
    name: str
    acts: tuple[str, ...] = ()
    """Misbehaving subtests, mixed among those that pass."""
    attack: Callable[[Attack], None] | None = None
    after: Callable[[Path, random.Random], None] | None = None
    """Damage to the folder after the run has ended; it must be continued then."""
    options: tuple[str, ...] = ()
    limit_file: int | None = None
    """Bytes that any file of the first run may have: a full disk."""
    prelude: str = ""
    """Source at the head of one module."""
    parts: int = 0
    """Run as so many runners, and merge."""
    passing: str = "pass"
    extra: dict[str, str] = field(default_factory=dict)


def kill_workers(attack: Attack) -> None:
    for _ in range(attack.random.randint(1, 3)):
        attack.until(lambda: bool(attack.workers()))
        time.sleep(attack.random.uniform(0, 0.4))
        attack.send(attack.workers(), signal.SIGKILL)


def stop_worker(attack: Attack) -> None:
    attack.until(lambda: bool(attack.workers()))
    time.sleep(attack.random.uniform(0, 0.4))
    attack.send(attack.workers(), signal.SIGSTOP)


def kill_launcher(attack: Attack) -> None:
    attack.until(lambda: attack.events() >= attack.random.randint(0, 6))
    attack.send(attack.launcher(), signal.SIGKILL)


def interrupt(sig: int) -> Callable[[Attack], None]:
    def run(attack: Attack) -> None:
        want = attack.random.randint(0, 10)
        attack.until(lambda: (attack.folder / "run.json").exists() and attack.events() >= want)
        time.sleep(attack.random.uniform(0, 0.1))
        if attack.running():
            attack.process.send_signal(sig)

    return run


def kill_everybody(attack: Attack) -> None:
    """Supervisor and launcher at once: only the kernel is left to clean up."""
    want = attack.random.randint(1, 8)
    attack.until(lambda: attack.events() >= want)
    for pid in [*attack.launcher(), attack.process.pid]:
        os.kill(pid, signal.SIGKILL)


def cut_live(attack: Attack) -> None:
    """Cut an events file under the feet of its writer."""
    attack.until(lambda: attack.events() >= attack.random.randint(2, 8))
    paths = sorted((attack.folder / "events").glob("w*.jsonl"))
    if paths:
        path = attack.random.choice(paths)
        os.truncate(path, attack.random.randint(0, path.stat().st_size))
        attack.hits += 100


def cut_events(folder: Path, rng: random.Random) -> None:
    paths = sorted((folder / "events").glob("w*.jsonl"))
    path = rng.choice(paths)
    os.truncate(path, rng.randint(0, path.stat().st_size))


def lose_events(folder: Path, rng: random.Random) -> None:
    rng.choice(sorted((folder / "events").glob("*.jsonl"))).unlink()


def soil_events(folder: Path, rng: random.Random) -> None:
    """Overwrite bytes in the middle, then add a copy of an old line and half a line."""
    path = rng.choice(sorted((folder / "events").glob("w*.jsonl")))
    data = bytearray(path.read_bytes())
    lines = [line for line in bytes(data).splitlines() if line]
    at = rng.randrange(len(data))
    data[at : at + 40] = rng.randbytes(40)
    path.write_bytes(bytes(data) + rng.choice(lines) + b'\n{"event":"fin')


SCENARIOS = [
    Scenario("worker killed", attack=kill_workers, passing="slow"),
    Scenario("worker kills itself", acts=("kill", "segv", "abort")),
    Scenario("worker stopped", attack=stop_worker, passing="slow"),
    Scenario("subtest stops its worker", acts=("stop", "once_stop")),
    Scenario("subtest hangs", acts=("hang", "spin")),
    Scenario("worker leaves early", acts=("exit0", "exit3", "quit")),
    Scenario("module leaves while collected", prelude="import os\nos._exit(0)"),
    Scenario("half a line", acts=("half", "once_half", "half")),
    Scenario("garbage", acts=("garbage", "garbage", "noisy")),
    Scenario("launcher killed", attack=kill_launcher, passing="slow"),
    Scenario("subtest kills the launcher", acts=("once_killlauncher",)),
    Scenario("supervisor interrupted", attack=interrupt(signal.SIGINT), passing="slow"),
    Scenario("supervisor terminated", attack=interrupt(signal.SIGTERM), acts=("fail", "segv")),
    Scenario("supervisor killed", attack=interrupt(signal.SIGKILL), passing="slow"),
    Scenario("supervisor and launcher killed", attack=kill_everybody, passing="slow"),
    Scenario("disk full", limit_file=3072, acts=("fail",)),
    Scenario("events cut in a live run", attack=cut_live, passing="slow"),
    Scenario("results cut", after=cut_events, acts=("fail", "segv")),
    Scenario("results lost", after=lose_events, acts=("exit0",)),
    Scenario("results soiled", after=soil_events, acts=("fail",)),
    Scenario("several runners", parts=3, acts=("fail", "segv", "hang")),
    Scenario("processes of their own", acts=("once_segv", "fail"), options=("--fresh-process",)),
    Scenario("memory and device faults", acts=("memory", "untyped", "foreign", "nothing", "skip")),
    Scenario("grandchildren", acts=("orphan", "once_kill", "orphan")),
    Scenario("everything at once", acts=("segv", "garbage", "hang", "half", "exit0"), attack=kill_workers),
]

"""Runs a plan on workers and writes down what no worker can: who crashed, who hung, what was given up.

It keeps no results of its own. Everything that counts is in the events files and in its journal; the verdict is read
from there, so a supervisor may die at any moment and lose nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from orchestrator import outcomes, processes
from orchestrator.caches import cache_env
from orchestrator.crew import START_LIMIT, Crew
from orchestrator.endings import MAX_DUMP, explain, pointer
from orchestrator.errors import OrchestratorError
from orchestrator.events import EventTail, EventWriter, RecordError
from orchestrator.folder import Folder
from orchestrator.handles import Worker
from orchestrator.ledger import Attempt, Ledger
from orchestrator.manifest import Planned
from orchestrator.scheduling import Job, Scheduler
from orchestrator.verdict import settle
from orchestrator.wording import count
from orchestrator.worker import EXIT_UNFIT

TICK = 0.2
MAX_IDLE_DEATHS = 3
"""A lane whose workers die this often in a row before they run anything is given up."""
MAX_COLLECT_DEATHS = 4
"""A module during whose collection this many workers died, and none ever got through it, is condemned. One that hung
there counts twice: it took its time."""
MAX_LOST = 2
"""How often a subtest may be taken from its process, or its result be lost, before it counts as crashed."""
MAX_DETAIL = 8000
"""Characters of a worker's log that are kept with a judgement."""
STRIKES = 3
"""Unrelated subtests that must break on a device before it is set aside."""


@dataclass(kw_only=True)
class Options:
    """How to run, as against what to run."""

    tests: Path
    deadline: float = 120.0
    start_limit: float = START_LIMIT
    confirm: int = 0
    repeat: int = 1
    fresh: bool = False
    interpreters: bool = False
    """Start every worker in a new interpreter instead of forking it."""
    preload: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    max_restarts: int = 100


Watch = Callable[["Supervisor", Attempt | None], None]


class Supervisor:
    """``lanes[i]`` is the device of lane ``i``: a GPU's UUID, or ``cpu``."""

    def __init__(
        self, folder: Folder, scheduler: Scheduler, ledger: Ledger, lanes: list[str], options: Options,
        lock: int, watch: Watch = lambda supervisor, attempt: None,
    ) -> None:  # fmt: skip
        self.folder, self.scheduler, self.ledger, self.options, self.watch = folder, scheduler, ledger, options, watch
        self.lanes: list[str | None] = list(lanes)
        self.workers: dict[int, Worker] = {}
        self.idle_deaths = [0] * len(lanes)
        self.collect_deaths: Counter[str] = Counter()
        self.strikes: dict[str, dict[tuple[str, str], Job]] = {}
        self.restarts = 0
        self.busy = [0.0] * len(lanes)
        self.start = [0.0] * len(lanes)
        """Seconds of each lane inside subtests, and from asking for a worker until it was ready."""
        self.began = time.monotonic()
        self.stopping = ""
        self.error: OrchestratorError | None = None
        self.number = max((int(p.stem[1:]) for p in folder.event_files() if p.stem[1:].isdigit()), default=0)
        self.lock = lock

    def run(self) -> None:
        """Work until every job is done, given up, or somebody interrupts."""
        try:
            self.journal = EventWriter(self.folder.journal)
        except RecordError as error:
            self.error = OrchestratorError("O501", str(error))
            return
        before = {sig: signal.signal(sig, self.interrupt) for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        self.crew = None
        try:
            log = self.folder.logs / "launcher.log"
            preload = () if self.options.interpreters else self.options.preload
            env = {"ATTNMATRIX_DEVICE": "cpu"}
            if self.lanes[0] != "cpu":
                env = {"ATTNMATRIX_DEVICE": "cuda", **cache_env(os.environ)}
            self.crew = Crew(preload, env, log, [self.lock])
            self.loop(self.crew)
        except RecordError as error:
            self.error = OrchestratorError("O501", str(error), "free some space, then continue with --resume")
        except OrchestratorError as error:
            self.error = error
        finally:
            if self.crew is not None:
                self.crew.stop()
                self.last_words(self.crew)
            self.journal.close()
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        self.stopping = self.stopping or signal.Signals(number).name

    def last_words(self, crew: Crew) -> None:
        """Finishes that were written before the end still count; then note why the run ends early."""
        for worker in list(crew.workers.values()):
            self.read(worker, final=True)
            crew.forget(worker)
        try:
            if self.stopping:
                self.journal.write({"event": "interrupted", "signal": self.stopping, "t": time.time()})
            if self.error is not None:
                self.remark(str(self.error.message))
            lane = max(range(len(self.busy)), key=lambda lane: self.busy[lane] + self.start[lane])
            wall = time.monotonic() - self.began
            cost = {"wall": round(wall, 3), "busy": round(self.busy[lane], 3), "start": round(self.start[lane], 3)}
            self.journal.write({"event": "ended", **cost, "t": time.time()})
        except RecordError:
            pass

    def loop(self, crew: Crew) -> None:
        while not self.stopping and self.error is None:
            self.fill(crew)
            if not self.workers and not self.scheduler.waiting:
                return
            if not self.workers:
                left = self.scheduler.waiting
                raise OrchestratorError(
                    "O503", f"no worker is left to run {count(left, 'subtest')}", f"logs: {self.folder.logs}"
                )
            rang, ended, died = crew.wait(TICK)
            for worker in rang or list(self.workers.values()):
                self.read(worker)
            if died:
                self.remark("the launcher died; its workers were replaced")
            for worker in ended:
                self.bury(worker, crew)
            self.check_clocks(crew)
            self.watch(self, None)

    # Handing out

    def fill(self, crew: Crew) -> None:
        """Give every lane something to do."""
        for lane, device in enumerate(self.lanes):
            worker = self.workers.get(lane)
            if worker is not None:
                if worker.ready and not worker.ending and not worker.killed and len(worker.queue) <= 1:
                    block = self.scheduler.take(lane)
                    if block:
                        worker.order(block)
                    elif not worker.queue and worker.inside is None:
                        worker.order([], end=True)
                        worker.since = time.monotonic()
            elif device is not None:
                block = self.scheduler.take(lane)
                job = None if block else self.scheduler.take_alone(device)
                if block:
                    self.start_worker(crew, lane, device, block, alone=False)
                elif job is not None:
                    self.start_worker(crew, lane, device, [job], alone=True)

    def start_worker(self, crew: Crew, lane: int, device: str, jobs: list[Job], alone: bool) -> None:
        self.number += 1
        name = f"w{self.number:04d}"
        ours, theirs = socket.socketpair()
        events, log = self.folder.events / f"{name}.jsonl", self.folder.logs / f"{name}.log"
        worker = Worker(name, lane, device, alone, ours, EventTail(events), log)
        env = {"ATTNMATRIX_DEVICE": "cpu" if device == "cpu" else "cuda"}
        if device != "cpu":
            env["CUDA_VISIBLE_DEVICES"] = device
        if alone:
            env["ATTNMATRIX_RUN_CRASHING"] = "1"
        request: dict[str, object] = {
            "name": name, "device": device, "env": env, "events": str(events), "log": str(log),
            "tests": str(self.options.tests), "plugins": list(self.options.plugins),
            "deadline": self.options.deadline, "fresh": self.options.interpreters,
        }  # fmt: skip
        self.workers[lane] = worker
        worker.order(jobs, end=alone)
        crew.spawn(request, worker, theirs)

    # Listening

    def read(self, worker: Worker, final: bool = False) -> None:
        """Take a worker's new events: the ledger decides what counts, this follows where the worker is."""
        for event in worker.tail.finish() if final else worker.tail.read():
            attempt = self.ledger.feed(worker.name, event)
            job = self.follow(worker, event) if isinstance(event, dict) else None
            if attempt is not None:
                self.busy[worker.lane] += attempt.seconds
                if job is not None:
                    self.after(job, attempt)

    def follow(self, worker: Worker, event: dict[str, object]) -> Job | None:
        """Keep track of what the worker does; returns the job that it finished."""
        kind, now = event["event"], time.monotonic()
        if kind == "ready":
            worker.ready, worker.since = True, now
            self.start[worker.lane] += now - worker.asked
        elif kind == "collect":
            worker.collecting, worker.since = str(event.get("file")), now
        elif kind == "start":
            job = self.handed(worker, event)
            if job is None:
                self.ledger.note(f"{worker.name}: started what it was not handed")
            else:
                self.missed(worker)
                worker.queue.remove(job)
                self.collect_deaths.pop(job.planned.file, None)
                worker.inside, worker.collecting, worker.since = job, None, now
                offset = event.get("log")
                worker.log_offset = offset if isinstance(offset, int) else 0
        elif kind == "finish" and worker.inside is not None:
            job = worker.inside
            if self.ledger.key_of(event) == (job.planned.id, job.attempt):
                worker.inside, worker.since = None, now
                worker.finished += 1
                self.idle_deaths[worker.lane] = 0
                return job
        return None

    def handed(self, worker: Worker, event: dict[str, object]) -> Job | None:
        key = self.ledger.key_of(event)
        return next((job for job in worker.queue if (job.planned.id, job.attempt) == key), None)

    def missed(self, worker: Worker) -> None:
        """A start while inside of another subtest: the finish between them was lost, so that one must run again."""
        job, worker.inside = worker.inside, None
        if job is not None:
            job.lost += 1
            self.ledger.note(f"{worker.name}: the finish of {job.planned.id} cannot be read")
            if job.lost <= MAX_LOST:
                self.scheduler.put_back([job])
            else:
                self.write_judgement(job, outcomes.CRASHED, "its result could not be read, again and again", worker)

    def after(self, job: Job, attempt: Attempt) -> None:
        """A subtest has its outcome: confirm it where asked, and watch the device's health."""
        outcome = settle(job.planned, attempt)
        first = attempt.attempt == 0
        if first and outcome in outcomes.BAD and self.options.confirm and job.planned.action != "crash":
            repeat = self.options.repeat
            self.scheduler.confirm(job.planned, range(repeat, repeat + self.options.confirm))
        if outcome in (outcomes.CRASHED, outcomes.TIMEOUT) or (attempt.poisoned and outcome in outcomes.BAD):
            self.strike(attempt.device, job)
        self.watch(self, attempt)

    def strike(self, device: str, job: Job) -> None:
        """Set a device aside on which three unrelated subtests broke, if there is another, and run the three there."""
        mine = self.strikes.setdefault(device, {})
        mine.setdefault((job.planned.method, job.planned.backend), job)
        others = {lane for lane in self.lanes if lane not in (None, device)}
        if len(mine) < STRIKES or not others or device not in self.lanes:
            return
        self.remark(f"device {device} set aside: {len(mine)} unrelated subtests broke on it; they run again elsewhere")
        for broken in mine.values():
            again = self.options.repeat + self.options.confirm
            self.scheduler.confirm(broken.planned, [again], avoid=device)
        self.set_aside(device)

    def set_aside(self, device: str) -> None:
        self.lanes = [None if lane == device else lane for lane in self.lanes]
        for worker in self.workers.values():
            if worker.device == device and self.crew is not None:
                self.crew.kill(worker, "device")

    # Deaths

    def check_clocks(self, crew: Crew) -> None:
        """Kill what is over its time. The worker's own stack dump came first, at the deadline."""
        for worker in crew.check():
            self.give_up(worker, crew)
        now, limit = time.monotonic(), self.options.deadline
        for worker in self.workers.values():
            if worker.killed or worker.status is not None:
                continue
            if worker.inside is not None:
                if now - worker.since > limit + min(5.0, max(0.5, 0.05 * limit)):
                    crew.kill(worker, "deadline")
            elif not crew.launcher.up or now - worker.since <= self.options.start_limit:
                continue
            elif worker.queue or worker.ending or not worker.ready:
                crew.kill(worker, "silent")

    def give_up(self, worker: Worker, crew: Crew) -> None:
        """Go on without a worker that does not die: on other devices if there are any, else on the other lanes."""
        others = {lane for lane in self.lanes if lane not in (None, worker.device)}
        what = f"device {worker.device}" if others else f"lane {worker.lane + 1}"
        self.remark(f"{what} given up: {worker.name} (process {worker.pid}) was killed and does not die")
        if others:
            self.set_aside(worker.device)
        self.lanes[worker.lane] = None
        worker.status = signal.SIGKILL  # what it will have died of, as a wait status
        self.bury(worker, crew)

    def bury(self, worker: Worker, crew: Crew) -> None:
        """A worker is gone: judge the subtest it was inside of, and put the rest back."""
        self.read(worker, final=True)
        crew.forget(worker)
        if self.workers.get(worker.lane) is worker:
            del self.workers[worker.lane]
            self.scheduler.leave(worker.lane)
        how = processes.say_status(worker.status or 0)
        if worker.fatal:
            raise OrchestratorError("O501", f"{worker.name} cannot record: {worker.fatal}", "free space, then --resume")
        job, worker.inside = worker.inside, None
        if job is not None:
            innocent = worker.killed in ("launcher", "device") and job.lost < MAX_LOST
            if innocent:
                job.lost += 1
                worker.queue.appendleft(job)
            else:
                self.judge(worker, job, how)
        elif worker.killed not in ("launcher", "device") and worker.pid is not None:
            self.blame_start(worker, how)
        self.scheduler.put_back(worker.queue)
        expected = worker.ending and how == "exit:0" and not worker.queue
        if not expected and how != f"exit:{EXIT_UNFIT}" and worker.pid is not None:
            self.restarts += 1
            if self.restarts > self.options.max_restarts:
                raise OrchestratorError(
                    "O504", f"{count(self.restarts, 'worker')} had to be replaced; the rest is not run"
                )

    def judge(self, worker: Worker, job: Job, how: str) -> None:
        """Write down that a subtest ended its worker, and how."""
        spent = round(time.monotonic() - worker.since, 3)
        outcome, message = explain(job.planned, how, self.options.deadline if worker.killed == "deadline" else None)
        log = worker.log_tail(MAX_DUMP)
        if outcome != outcomes.KNOWN_FAILURE:
            message += pointer(worker.log, log)
        detail = log[-MAX_DETAIL:]
        self.write_judgement(job, outcome, message, worker, detail, spent)

    def write_judgement(
        self, job: Job, outcome: str, message: str, worker: Worker, detail: str = "", seconds: float = 0.0
    ) -> None:
        event: dict[str, object] = {
            "event": "judged", "id": job.planned.id, "attempt": job.attempt, "outcome": outcome, "message": message,
            "worker": worker.name, "device": worker.device, "seconds": seconds, "t": time.time(), "detail": detail,
        }  # fmt: skip
        self.journal.write(event)
        attempt = self.ledger.judge("supervisor", event)
        if attempt is not None:
            self.idle_deaths[worker.lane] = 0
            self.busy[worker.lane] += seconds
            self.after(job, attempt)

    def blame_start(self, worker: Worker, how: str) -> None:
        """A worker died outside of any subtest. A module that kills all its workers is condemned as a whole."""
        if worker.collecting is not None:
            file = worker.collecting
            self.collect_deaths[file] += 2 if worker.killed else 1
            if self.collect_deaths[file] >= MAX_COLLECT_DEATHS:
                condemned = [job for job in worker.queue if job.planned.file == file]
                condemned += self.scheduler.drop(lambda job: job.planned.file == file)
                worker.queue = type(worker.queue)(job for job in worker.queue if job.planned.file != file)
                for job in condemned:
                    message = f"workers end while they collect {file}: {how}\nits log: {worker.log}"
                    self.write_judgement(job, outcomes.CRASHED, message, worker, worker.log_tail())
                return
        if not worker.finished and (worker.queue or not worker.ready):
            self.idle_deaths[worker.lane] += 1
            if self.idle_deaths[worker.lane] >= MAX_IDLE_DEATHS:
                self.remark(f"lane {worker.lane + 1} given up: its workers die before they run anything ({how})")
                self.lanes[worker.lane] = None

    def remark(self, message: str) -> None:
        self.journal.write({"event": "remark", "message": message, "t": time.time()})
        self.ledger.remarks.append(message)

    @property
    def left(self) -> int:
        """Attempts that have no outcome yet."""
        handed = sum(len(worker.queue) + (worker.inside is not None) for worker in self.workers.values())
        return self.scheduler.waiting + handed

    def planned(self, id: str) -> Planned | None:
        return self.ledger.known.get(id)

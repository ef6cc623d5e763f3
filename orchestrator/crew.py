"""The supervisor's handle on its processes: the launcher, and the workers that it forks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator import processes
from orchestrator.errors import OrchestratorError
from orchestrator.events import EventTail
from orchestrator.scheduling import Job

START_LIMIT = 120.0
"""Seconds the launcher may take to import torch."""
REPORT_LIMIT = 10.0
"""Seconds from a worker's death by our hand to the launcher's report of it."""
DYING_LIMIT = 60.0
"""Seconds a killed worker may take to die. Inside a kernel of a GPU that hangs, it cannot until the driver lets go."""


@dataclass(eq=False)
class Worker:
    """One worker process as the supervisor knows it."""

    name: str
    lane: int
    device: str
    alone: bool
    channel: socket.socket
    tail: EventTail
    log: Path
    queue: deque[Job] = field(default_factory=deque)
    """Handed out, not started."""
    inside: Job | None = None
    collecting: str | None = None
    since: float = field(default_factory=time.monotonic)
    """When the current state began: spawned, collecting, inside a subtest, or between two."""
    asked: float = field(default_factory=time.monotonic)
    log_offset: int = 0
    pid: int | None = None
    ready: bool = False
    ending: bool = False
    killed: str = ""
    """Why the supervisor killed it."""
    killed_at: float = 0.0
    dead_at: float = 0.0
    """When it was first seen to be dead after that."""
    status: int | None = None
    fatal: str = ""
    finished: int = 0

    def order(self, jobs: Sequence[Job], end: bool = False) -> None:
        """Hand out jobs, and with ``end`` let the worker leave after them."""
        self.queue.extend(jobs)
        self.ending = self.ending or end
        message = {"order": "end" if end else "run", "jobs": [job.order() for job in jobs]}
        with contextlib.suppress(OSError):  # a dead worker is noticed by its exit
            self.channel.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> bool:
        """Read the bell; returns whether the line is still open."""
        try:
            data = self.channel.recv(1 << 14, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if b"!" in data:
            self.fatal = data[data.index(b"!") + 1 :].decode("utf-8", "replace").strip() or "cannot record"
        return bool(data)

    def log_tail(self, limit: int = 8000) -> str:
        """What the log gained since the current subtest began."""
        try:
            with open(self.log, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_offset, end - limit))
                return file.read(limit).decode("utf-8", "replace")
        except OSError:
            return ""


class Crew:
    """Starts the launcher, asks it for workers, and learns from it how they ended."""

    def __init__(self, preload: Iterable[str], env: Mapping[str, str], log: Path, keep: Iterable[int]) -> None:
        self.preload, self.env, self.log, self.keep = list(preload), dict(env), log, list(keep)
        self.selector = selectors.DefaultSelector()
        self.workers: dict[str, Worker] = {}
        self.pending: deque[tuple[dict[str, object], int]] = deque()
        self.asked = False
        self.deaths = 0
        self.rest = b""
        self.start()

    def start(self) -> None:
        ours, theirs = socket.socketpair()
        argv = [sys.executable, "-m", "orchestrator.launcher", str(theirs.fileno()), *self.preload]
        env = {**os.environ, **processes.WORKER_ENV, **self.env}
        root = str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        try:
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                    pass_fds=[theirs.fileno(), *self.keep],
                )  # fmt: skip
        except OSError as error:
            raise OrchestratorError("O502", f"cannot start the launcher: {error.strerror}") from None
        theirs.close()
        self.control, self.rest, self.asked = ours, b"", False
        self.began = time.monotonic()
        self.up = False
        self.selector.register(ours, selectors.EVENT_READ)

    def spawn(self, request: dict[str, object], worker: Worker, channel: socket.socket) -> None:
        """Ask for a worker; ``channel`` is its end of the line."""
        self.workers[worker.name] = worker
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)
        self.pending.append((request, channel.detach()))
        self.ask()

    def ask(self) -> None:
        """One request at a time, so that a descriptor cannot be taken for another request's."""
        if self.up and not self.asked and self.pending:
            request, fd = self.pending.popleft()
            with contextlib.suppress(OSError):  # a dead launcher is noticed by its closed line
                socket.send_fds(self.control, [json.dumps(request).encode()], [fd])
            os.close(fd)
            self.asked = True

    def wait(self, timeout: float) -> tuple[list[Worker], list[Worker], bool]:
        """Wait for news: workers that rang, workers that ended, and whether the launcher died."""
        rang: list[Worker] = []
        ended: list[Worker] = []
        lost = False
        for key, _ in self.selector.select(timeout):
            if key.fileobj is self.control:
                lost = self.hear_launcher(ended)
            else:
                worker: Worker = key.data
                if not worker.heard():
                    self.selector.unregister(worker.channel)
                rang.append(worker)
        return rang, ended, lost or self.process.poll() is not None

    def hear_launcher(self, ended: list[Worker]) -> bool:
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            return True
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "spawned" in message:
                self.asked = False
                worker = self.workers[message["spawned"]]
                worker.pid, worker.since = message["pid"], time.monotonic()
                if worker.killed:
                    self.kill(worker, worker.killed)
            elif "exited" in message:
                gone = self.workers.get(message["exited"])
                if gone is not None:  # otherwise given up before
                    gone.status = message["status"]
                    ended.append(gone)
            else:
                self.up = True
                if message["touched"]:
                    raise OrchestratorError(
                        "O502", f"importing {message['loaded']} touched CUDA, so nothing may be forked"
                    )
        self.ask()
        return False

    def kill(self, worker: Worker, reason: str) -> None:
        if not worker.killed:
            worker.killed, worker.killed_at = reason, time.monotonic()
        if worker.pid is not None and worker.status is None:
            processes.kill_group(worker.pid)

    def check(self) -> list[Worker]:
        """A launcher that does not start, or does not report deaths, is of no use any more. Returns the workers that
        do not die: they are no fault of the launcher's, and a new one could not kill them either."""
        now = time.monotonic()
        if not self.up and now - self.began > START_LIMIT:
            raise OrchestratorError("O502", f"the launcher is not up after {START_LIMIT:g} s", f"its log: {self.log}")
        undying = []
        for worker in self.workers.values():
            if not worker.killed or worker.status is not None:
                continue
            if worker.pid is None or processes.dead(worker.pid):
                worker.dead_at = worker.dead_at or now
                if now - worker.dead_at > REPORT_LIMIT:
                    self.process.kill()
            elif now - worker.killed_at > DYING_LIMIT:
                undying.append(worker)
        return undying

    def forget(self, worker: Worker) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(worker.channel)
        worker.channel.close()
        self.workers.pop(worker.name, None)

    def stop(self) -> None:
        """End everything and wait until it is gone."""
        for worker in self.workers.values():
            if worker.pid is not None and worker.status is None:
                processes.kill_group(worker.pid)
        self.control.close()  # the order to end
        for _, fd in self.pending:
            os.close(fd)
        self.pending.clear()
        try:
            self.process.wait(timeout=8)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def restart(self) -> list[Worker]:
        """After the launcher died: its workers die with it. Returns them, all of them lost."""
        self.deaths += 1
        lost = list(self.workers.values())
        self.selector.unregister(self.control)
        self.stop()
        for worker in lost:
            worker.status = worker.status if worker.status is not None else 9
        if self.deaths > 3:
            raise OrchestratorError("O506", f"the launcher died {self.deaths} times", f"its log: {self.log}")
        self.start()
        return lost

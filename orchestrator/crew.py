"""All processes of a run as the supervisor deals with them: the launcher, and the workers that it forks."""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator import processes
from orchestrator.errors import OrchestratorError
from orchestrator.handles import LauncherHandle, Worker

START_LIMIT = 120.0
"""Seconds the launcher may take to import torch."""
REPORT_LIMIT = 10.0
"""Seconds from a worker's death by our hand to the launcher's report of it."""
DYING_LIMIT = 60.0
"""Seconds a killed worker may take to die. Inside a kernel of a GPU that hangs, it cannot until the driver lets go."""
END_LIMIT = 8.0
"""Seconds the launcher may take to end when it is told to."""
MAX_DEATHS = 3
"""How often the launcher may die."""


class Crew:
    """Starts the launcher, asks it for workers, and learns from it how they ended."""

    def __init__(self, preload: Iterable[str], env: Mapping[str, str], log: Path, keep: Iterable[int]) -> None:
        self.preload, self.env, self.log, self.keep = list(preload), dict(env), log, list(keep)
        self.selector = selectors.DefaultSelector()
        self.workers: dict[str, Worker] = {}
        self.withdrawn: list[Worker] = []
        self.deaths = 0
        self.start()

    def start(self) -> None:
        self.launcher = LauncherHandle(self.preload, self.env, self.log, self.keep)
        self.selector.register(self.launcher.control, selectors.EVENT_READ, self.launcher)

    def spawn(self, request: dict[str, object], worker: Worker, channel: socket.socket) -> None:
        """Ask for a worker; ``channel`` is its end of the line."""
        self.workers[worker.name] = worker
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)
        self.launcher.request(request, channel.detach())

    def wait(self, timeout: float) -> tuple[list[Worker], list[Worker], bool]:
        """Wait for news: workers that rang, workers that ended, also with the launcher, and whether that died."""
        rang: list[Worker] = []
        ended = [worker for worker in self.withdrawn if worker.name in self.workers]
        self.withdrawn = []
        died = False
        for key, _ in self.selector.select(timeout):
            if key.data is self.launcher:
                died = self.hear_launcher(ended)
            else:
                worker: Worker = key.data
                if not worker.heard():
                    self.selector.unregister(worker.channel)
                rang.append(worker)
        died = died or self.launcher.dead()
        if died:
            lost = self.replace()
            ended = [worker for worker in ended if worker not in lost] + lost
        return rang, ended, died

    def hear_launcher(self, ended: list[Worker]) -> bool:
        """Take its news; returns whether it is gone."""
        try:
            messages = self.launcher.hear()
        except EOFError:
            return True
        for message in messages:
            if "spawned" in message:
                self.launcher.asked = False
                worker = self.workers[message["spawned"]]
                worker.pid, worker.since, worker.dead_at = message["pid"], time.monotonic(), 0.0
                if worker.killed:
                    self.kill(worker, worker.killed)
            elif "exited" in message:
                gone = self.workers.get(message["exited"])
                if gone is not None:  # otherwise given up before
                    gone.status = message["status"]
                    ended.append(gone)
            elif message["unfit"]:
                raise OrchestratorError("O502", f"nothing may be forked from the launcher: {message['unfit']}")
            else:
                self.launcher.up = True
                for worker in self.workers.values():  # only from now on can it be expected to fork them
                    worker.since = time.monotonic()
        self.launcher.ask()
        return False

    def kill(self, worker: Worker, reason: str) -> None:
        if not worker.killed:
            worker.killed, worker.killed_at = reason, time.monotonic()
        if worker.pid is not None and worker.status is None:
            processes.kill_group(worker.pid)
        elif self.launcher.withdraw(worker.name):
            worker.status = signal.SIGKILL  # as if it had been there
            self.withdrawn.append(worker)

    def check(self) -> list[Worker]:
        """A launcher that does not start, or does not report deaths, is of no use any more. Returns the workers that
        do not die: they are no fault of the launcher's, and a new one could not kill them either."""
        now = time.monotonic()
        if not self.launcher.up and now - self.launcher.began > START_LIMIT:
            raise OrchestratorError("O502", f"the launcher is not up after {START_LIMIT:g} s", f"its log: {self.log}")
        undying = []
        for worker in self.workers.values():
            if not worker.killed or worker.status is not None:
                continue
            if worker.pid is None or processes.dead(worker.pid):
                worker.dead_at = worker.dead_at or now
                if now - worker.dead_at > REPORT_LIMIT:
                    self.launcher.kill()
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
                worker.status = signal.SIGKILL  # once it is reaped, its id may be another's
        if not self.launcher.up:  # it has no workers yet, and would not listen before it has imported everything
            self.launcher.kill()
        self.launcher.close()
        self.launcher.reap(time.monotonic() + END_LIMIT)

    def replace(self) -> list[Worker]:
        """After the launcher died: its workers die with it, through no fault of their subtests. Returns them, all of
        them lost."""
        lost = list(self.workers.values())
        for worker in lost:
            if worker.pid is not None and worker.status is None:
                processes.kill_group(worker.pid)
            worker.status = worker.status if worker.status is not None else signal.SIGKILL
            worker.killed = worker.killed or "launcher"
        self.selector.unregister(self.launcher.control)
        self.launcher.kill()  # its line may be closed and it alive
        self.launcher.close()
        self.launcher.reap(time.monotonic() + 1.0)
        self.deaths += 1
        if self.deaths > MAX_DEATHS:
            raise OrchestratorError("O506", f"the launcher died {self.deaths} times", f"its log: {self.log}")
        self.start()
        return lost

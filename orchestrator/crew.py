"""All processes of a run as the supervisor deals with them: launchers, and the workers that they fork.

Every run has one launcher, which imports what all workers need. On GPUs there is another one for each slow library,
which imports that as well while the others are at work already, and once for all workers that begin with it. A library
that cannot be had this way is left to the workers, and a run never fails for want of such a launcher.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from orchestrator import processes
from orchestrator.errors import OrchestratorError
from orchestrator.handles import LauncherHandle, Worker

START_LIMIT = 120.0
"""Seconds a launcher may take to import torch, and its library."""
REPORT_LIMIT = 10.0
"""Seconds from a worker's death by our hand to the launcher's report of it."""
DYING_LIMIT = 60.0
"""Seconds a killed worker may take to die. Inside a kernel of a GPU that hangs, it cannot until the driver lets go."""
END_LIMIT = 8.0
"""Seconds that launchers may take to end when they are told to."""
MAX_DEATHS = 3
"""How often the launcher that every run has may die."""


class Crew:
    """Starts launchers, asks them for workers, and learns from them how those ended."""

    def __init__(
        self, preload: Iterable[str], env: Mapping[str, str], logs: Path, keep: Iterable[int],
        libraries: Iterable[str] = (),
    ) -> None:  # fmt: skip
        self.preload, self.env, self.logs, self.keep = list(preload), dict(env), logs, list(keep)
        self.selector = selectors.DefaultSelector()
        self.workers: dict[str, Worker] = {}
        self.launchers: dict[str, LauncherHandle] = {}
        self.dismissed: list[LauncherHandle] = []
        self.withdrawn: list[Worker] = []
        self.deaths = 0
        self.start("")
        for library in libraries:
            try:
                self.start(library)
            except OrchestratorError as error:  # the run does without
                self.note(library, str(error))

    def log_of(self, library: str) -> Path:
        return self.logs / ("-".join(filter(None, ["launcher", library])) + ".log")

    def note(self, library: str, text: str) -> None:
        """Add a line to a launcher's log."""
        with contextlib.suppress(OSError), open(self.log_of(library), "a", encoding="utf-8") as file:
            file.write(text + "\n")

    def start(self, library: str) -> None:
        launcher = LauncherHandle(library, self.preload, self.env, self.log_of(library), self.keep)
        self.launchers[library] = launcher
        self.selector.register(launcher.control, selectors.EVENT_READ, launcher)

    def launcher_of(self, library: str) -> LauncherHandle:
        """Whom to ask for a worker that begins with ``library``."""
        return self.launchers.get(library) or self.launchers[""]

    def spawn(self, request: dict[str, object], worker: Worker, channel: socket.socket) -> None:
        """Ask the worker's launcher for it; ``channel`` is its end of the line."""
        self.workers[worker.name] = worker
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)
        worker.launcher.request(request, channel.detach())

    def wait(self, timeout: float) -> tuple[list[Worker], list[Worker], list[LauncherHandle]]:
        """Wait for news: workers that rang, workers that ended, also with their launchers, and launchers that died."""
        rang: list[Worker] = []
        ended = [worker for worker in self.withdrawn if worker.name in self.workers]
        self.withdrawn = []
        died: list[LauncherHandle] = []
        for key, _ in self.selector.select(timeout):
            if isinstance(key.data, LauncherHandle):
                if self.hear_launcher(key.data, ended):
                    died.append(key.data)
            else:
                worker: Worker = key.data
                if not worker.heard():
                    self.selector.unregister(worker.channel)
                rang.append(worker)
        died += [one for one in self.launchers.values() if one not in died and one.dead()]
        for launcher in died:
            lost = self.replace(launcher)
            ended = [worker for worker in ended if worker not in lost] + lost
        return rang, ended, died

    def hear_launcher(self, launcher: LauncherHandle, ended: list[Worker]) -> bool:
        """Take its news; returns whether it is gone."""
        try:
            messages = launcher.hear()
        except EOFError:
            return True
        for message in messages:
            if "spawned" in message:
                launcher.asked = False
                worker = self.workers[message["spawned"]]
                worker.pid, worker.since, worker.dead_at = message["pid"], time.monotonic(), 0.0
                if worker.killed:
                    self.kill(worker, worker.killed)
            elif "exited" in message:
                gone = self.workers.get(message["exited"])
                if gone is not None:  # otherwise given up before
                    gone.status = message["status"]
                    ended.append(gone)
            else:
                self.greet(launcher, message)
        launcher.ask()
        return False

    def greet(self, launcher: LauncherHandle, message: Mapping[str, Any]) -> None:
        """A launcher is ready, or says why nothing may be forked from it."""
        if message["unfit"] and not launcher.library:
            raise OrchestratorError("O502", f"nothing may be forked from the launcher: {message['unfit']}")
        if message["unfit"]:
            self.dismiss(launcher)
            return
        launcher.up = True
        for worker in self.workers_of(launcher):  # only from now on can it be expected to fork them
            worker.since = time.monotonic()

    def dismiss(self, launcher: LauncherHandle) -> None:
        """Do without a library's launcher: the one that every run has takes over what it was asked for."""
        main = self.launchers[""]
        for worker in self.workers_of(launcher):
            worker.launcher, worker.since = main, time.monotonic()
        while launcher.pending:
            main.request(*launcher.pending.popleft())
        del self.launchers[launcher.library]
        self.selector.unregister(launcher.control)
        launcher.close()
        self.dismissed.append(launcher)

    def workers_of(self, launcher: LauncherHandle) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.launcher is launcher]

    def kill(self, worker: Worker, reason: str) -> None:
        if not worker.killed:
            worker.killed, worker.killed_at = reason, time.monotonic()
        if worker.pid is not None and worker.status is None:
            processes.kill_group(worker.pid)
        elif worker.launcher.withdraw(worker.name):
            worker.status = signal.SIGKILL  # as if it had been there
            self.withdrawn.append(worker)

    def check(self) -> list[Worker]:
        """A launcher that does not start, or does not report deaths, is of no use any more. Returns the workers that
        do not die: they are no fault of the launcher's, and a new one could not kill them either."""
        now = time.monotonic()
        for launcher in list(self.launchers.values()):
            if not launcher.up and now - launcher.began > START_LIMIT:
                late = f"{launcher.name} is not up after {START_LIMIT:g} s"
                if not launcher.library:
                    raise OrchestratorError("O502", late, f"its log: {launcher.log}")
                self.note(launcher.library, f"{late}; declined")
                launcher.kill()
                self.dismiss(launcher)
        undying = []
        for worker in self.workers.values():
            if not worker.killed or worker.status is not None:
                continue
            if worker.pid is None or processes.dead(worker.pid):
                worker.dead_at = worker.dead_at or now
                if now - worker.dead_at > REPORT_LIMIT:
                    worker.launcher.kill()
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
        for launcher in self.launchers.values():
            if not launcher.up:  # it has no workers yet, and would not listen before it has imported everything
                launcher.kill()
            launcher.close()
        until = time.monotonic() + END_LIMIT
        for launcher in [*self.launchers.values(), *self.dismissed]:
            launcher.reap(until)

    def replace(self, launcher: LauncherHandle) -> list[Worker]:
        """After a launcher died: its workers die with it, through no fault of their subtests. Returns them, all of them
        lost. A library's launcher is not started again: whatever killed it would be there again."""
        lost = self.workers_of(launcher)
        for worker in lost:
            if worker.pid is not None and worker.status is None:
                processes.kill_group(worker.pid)
            worker.status = worker.status if worker.status is not None else signal.SIGKILL
            worker.killed = worker.killed or "launcher"
        del self.launchers[launcher.library]
        self.selector.unregister(launcher.control)
        launcher.kill()  # its line may be closed and it alive
        launcher.close()
        launcher.reap(time.monotonic() + 1.0)
        if not launcher.library:
            self.deaths += 1
            if self.deaths > MAX_DEATHS:
                raise OrchestratorError("O506", f"the launcher died {self.deaths} times", f"its log: {launcher.log}")
            self.start("")
        return lost

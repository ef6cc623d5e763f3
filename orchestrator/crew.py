"""All processes of a run as the supervisor deals with them: launchers, and the workers that they fork.

Every run has one launcher, which imports what all workers need. On GPUs there is another one for each slow library,
which imports that as well while the others are at work already, and once for all workers that begin with it. A library
that cannot be had this way is left to the workers; a run never depends on these launchers.
"""

from __future__ import annotations

import contextlib
import selectors
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
        self.deaths = 0
        for library in ("", *libraries):
            self.start(library)

    def start(self, library: str) -> None:
        log = self.logs / ("-".join(filter(None, ["launcher", library])) + ".log")
        launcher = LauncherHandle(library, self.preload, self.env, log, self.keep)
        self.launchers[library] = launcher
        self.selector.register(launcher.control, selectors.EVENT_READ, launcher)

    def spawn(self, request: dict[str, object], worker: Worker, channel: socket.socket, library: str) -> None:
        """Ask for a worker that begins with ``library``; ``channel`` is its end of the line."""
        self.workers[worker.name] = worker
        self.selector.register(worker.channel, selectors.EVENT_READ, worker)
        worker.launcher = self.launchers.get(library) or self.launchers[""]
        worker.launcher.request(request, channel.detach())

    def wait(self, timeout: float) -> tuple[list[Worker], list[Worker], list[LauncherHandle]]:
        """Wait for news: workers that rang, workers that ended, and launchers that died."""
        rang: list[Worker] = []
        ended: list[Worker] = []
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
        died += [one for one in self.launchers.values() if one not in died and one.process.poll() is not None]
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
                worker.pid, worker.since = message["pid"], time.monotonic()
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
        for worker in self.workers_of(launcher):
            worker.since = time.monotonic()

    def dismiss(self, launcher: LauncherHandle) -> None:
        """Do without a library's launcher: the one that every run has takes over what it was asked for."""
        main = self.launchers[""]
        for worker in self.workers_of(launcher):
            worker.launcher = main
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

    def check(self) -> list[Worker]:
        """A launcher that does not start, or does not report deaths, is of no use any more. Returns the workers that
        do not die: they are no fault of the launcher's, and a new one could not kill them either."""
        now = time.monotonic()
        for launcher in self.launchers.values():
            if not launcher.up and now - launcher.began > START_LIMIT:
                launcher.process.kill()
                if not launcher.library:
                    late = f"the launcher is not up after {START_LIMIT:g} s"
                    raise OrchestratorError("O502", late, f"its log: {launcher.log}")
        undying = []
        for worker in self.workers.values():
            if not worker.killed or worker.status is not None:
                continue
            if worker.pid is None or processes.dead(worker.pid):
                worker.dead_at = worker.dead_at or now
                if now - worker.dead_at > REPORT_LIMIT and worker.launcher is not None:
                    worker.launcher.process.kill()
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
        for launcher in self.launchers.values():
            launcher.close()
        for launcher in [*self.launchers.values(), *self.dismissed]:
            launcher.reap()

    def replace(self, launcher: LauncherHandle) -> list[Worker]:
        """After a launcher died: its workers die with it. Returns them, all of them lost. A library's launcher is not
        started again: whatever killed it would be there again."""
        lost = self.workers_of(launcher)
        for worker in lost:
            if worker.pid is not None and worker.status is None:
                processes.kill_group(worker.pid)
            worker.status = worker.status if worker.status is not None else 9
        del self.launchers[launcher.library]
        self.selector.unregister(launcher.control)
        launcher.close()
        launcher.reap()
        if not launcher.library:
            self.deaths += 1
            if self.deaths > MAX_DEATHS:
                raise OrchestratorError("O506", f"the launcher died {self.deaths} times", f"its log: {launcher.log}")
            self.start("")
        return lost

"""The supervisor's handles on single processes: the launcher, and a worker that it forks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator import processes
from orchestrator.errors import OrchestratorError
from orchestrator.events import EventTail
from orchestrator.scheduling import Job


class LauncherHandle:
    """The launcher: requests for workers go out one at a time, news of them comes in."""

    def __init__(self, preload: Iterable[str], env: Mapping[str, str], log: Path, keep: Iterable[int]) -> None:
        self.pending: deque[tuple[dict[str, object], int]] = deque()
        self.asked = self.up = False
        self.rest = b""
        self.began = time.monotonic()
        env = {**os.environ, **processes.WORKER_ENV, **env}
        root = str(Path(__file__).parents[1])
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
        try:
            ours, theirs = socket.socketpair()
            argv = [sys.executable, "-m", "orchestrator.launcher", str(theirs.fileno()), *preload]
            with theirs, open(log, "ab") as file:
                self.process = subprocess.Popen(
                    argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True,
                    pass_fds=[theirs.fileno(), *keep],
                )  # fmt: skip
        except OSError as error:
            raise OrchestratorError("O502", f"cannot start the launcher: {error.strerror}") from None
        self.control = ours

    def request(self, request: dict[str, object], fd: int) -> None:
        """Ask for a worker, whose end of its channel is ``fd``."""
        self.pending.append((request, fd))
        self.ask()

    def ask(self) -> None:
        """One request at a time, so that a descriptor cannot be taken for another request's."""
        if self.up and not self.asked and self.pending:
            request, fd = self.pending.popleft()
            with contextlib.suppress(OSError):  # a dead launcher is noticed by its closed line
                socket.send_fds(self.control, [json.dumps(request).encode()], [fd])
            os.close(fd)
            self.asked = True

    def hear(self) -> list[dict[str, Any]]:
        """What the launcher says. EOFError once it is gone."""
        try:
            data = self.control.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            raise EOFError
        *lines, self.rest = (self.rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def withdraw(self, name: str) -> bool:
        """Take back the request for a worker; returns whether it was still waiting here."""
        for place, (request, fd) in enumerate(self.pending):
            if request["name"] == name:
                del self.pending[place]
                os.close(fd)
                return True
        return False

    def dead(self) -> bool:
        """Whether it has ended; it is not reaped by that, so that its id names no other group yet."""
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            return True

    def close(self) -> None:
        """Order it to end, which it hears once it has imported everything."""
        self.control.close()
        for _, fd in self.pending:
            os.close(fd)
        self.pending.clear()

    def kill(self) -> None:
        """End it at once, with what an import has started in it; its workers have groups of their own."""
        if self.process.returncode is None:  # or its id may be another's by now
            processes.kill_group(self.process.pid)

    def reap(self, until: float) -> None:
        """Wait until it is gone, and kill it at that time of ``time.monotonic()``. What not even that ends hangs in the
        kernel, and is left there."""
        try:
            self.process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=1.0)


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

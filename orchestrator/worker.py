"""A worker: one process that runs pytest on the ids it is handed, and writes one event per line.

It holds one pytest session for its whole life. Exit codes: 0 told to end; 70 the process is no longer fit to run
another subtest (poisoned CUDA context, memory exhausted, a mode left active); 74 an event could not be written.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orchestrator.events import EventWriter, RecordError

EXIT_DONE = 0
EXIT_UNFIT = 70
EXIT_RECORD = 74


class Channel:
    """The worker's end of the line to the supervisor: orders come in, single bytes that say *look* go out."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        os.set_inheritable(self.socket.fileno(), False)
        self.rest = b""

    def receive(self, wait: bool) -> list[dict[str, Any]]:
        """Orders that have arrived; with ``wait``, at least one. The line being closed is the order to end."""
        while True:
            *lines, self.rest = self.rest.split(b"\n")
            if lines:
                return [json.loads(line) for line in lines]
            self.socket.setblocking(wait)
            try:
                data = self.socket.recv(1 << 16)
            except BlockingIOError:
                return []
            except OSError:
                data = b""
            if not data:
                return [{"order": "end"}]
            self.rest += data

    def ring(self, text: bytes = b".") -> None:
        try:
            self.socket.setblocking(False)
            self.socket.send(text)
        except OSError:  # the supervisor looks by itself now and then
            pass


def main(spec: Mapping[str, Any], channel_fd: int) -> int:
    """Run one worker. ``spec`` is the supervisor's request. It returns only where pytest ends before its time."""
    channel = Channel(channel_fd)
    log = open_log(Path(str(spec["log"])))
    os.environ.update({str(name): str(value) for name, value in dict(spec["env"]).items()})
    try:
        events = EventWriter(Path(str(spec["events"])))
    except RecordError as error:
        return cannot_record(channel, error)
    faulthandler.enable(log)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    import pytest  # after the fork, and after the device was chosen

    from orchestrator.worker_plugin import WorkerPlugin

    plugin = WorkerPlugin(spec, channel, events, log)
    tests = str(spec["tests"])
    arguments = [
        tests,
        "-q",
        "--no-header",
        "--no-summary",
        "--tb=short",
        "-o",
        "addopts=",
        "-o",
        "cache_dir=/dev/null",
    ]
    for name in ("no:cacheprovider", "no:faulthandler", *spec["plugins"]):
        arguments += ["-p", name]
    status = pytest.main(arguments, plugins=[plugin])
    print(f"pytest ended by itself with status {status!r}", file=sys.stderr)
    return EXIT_UNFIT


def cannot_record(channel: Channel, error: RecordError) -> int:
    """Nothing may count that is not written down, so end at once and say why."""
    channel.ring(f"!{error}\n".encode())
    return EXIT_RECORD


def open_log(path: Path) -> int:
    """Send stdout and stderr to the worker's log; returns a descriptor of it that pytest's capture does not touch."""
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    for standard in (1, 2):
        os.dup2(fd, standard)
    return fd


if __name__ == "__main__":
    raise SystemExit(main(json.loads(sys.argv[2]), int(sys.argv[1])))

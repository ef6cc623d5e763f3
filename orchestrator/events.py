"""The record of a run: append-only files of one JSON object per line, written by one process each.

A process may die in the middle of a line, and a subtest may write into any file it finds. So the reader believes
nothing: what is no event is counted and shown, never taken for an outcome.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import OrchestratorError
from orchestrator.files import NOFOLLOW, open_plain

MAX_LINE = 4 << 20
CHUNK = 1 << 20
DECODER = json.JSONDecoder()


class RecordError(Exception):
    """An event could not be written in full (disk full, file too large)."""


class EventWriter:
    """Appends events to one file. A line is handed to the kernel before ``write`` returns, so it outlives the process.

    Each line starts on a new one even where something else left half a line behind; readers skip empty lines.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | NOFOLLOW
        try:
            self.fd = os.open(path, flags, 0o644)
        except OSError as error:
            raise RecordError(f"{path}: {error.strerror}") from None
        self.path = path

    def write(self, event: dict[str, object]) -> None:
        data = b"\n" + json.dumps(event, default=str, skipkeys=True, separators=(",", ":")).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self.fd, data) :]
            except OSError as error:
                raise RecordError(f"{self.path}: {error.strerror}") from None

    def close(self) -> None:
        os.close(self.fd)


@dataclass(slots=True)
class Garbage:
    """A line that is no event, with the reason and its beginning."""

    reason: str
    text: str


class EventTail:
    """Reads what was appended to an events file since the last call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0
        self.rest = b""
        self.skipping = False

    def read(self) -> list[dict[str, object] | Garbage]:
        """All lines that are complete by now."""
        out: list[dict[str, object] | Garbage] = []
        try:
            fd = open_plain(self.path)
        except FileNotFoundError:
            return out
        except OSError as error:
            raise OrchestratorError("O211", f"{self.path} is no plain file: {error.strerror}") from None
        with open(fd, "rb") as file:
            try:
                if os.fstat(fd).st_size < self.offset:
                    out.append(Garbage("the file was cut, reading it anew", str(self.path.name)))
                    self.offset, self.rest, self.skipping = 0, b"", False
                file.seek(self.offset)
                while data := file.read(CHUNK):
                    self.offset += len(data)
                    self.feed(data, out)
            except OSError as error:
                raise OrchestratorError("O210", f"{self.path}: {error.strerror}") from None
        return out

    def feed(self, data: bytes, out: list[dict[str, object] | Garbage]) -> None:
        lines = (self.rest + data).split(b"\n")
        self.rest = lines.pop()
        for line in lines:
            if self.skipping:
                self.skipping = False
            elif line:
                out.append(parse_line(line))
        if len(self.rest) > MAX_LINE:
            if not self.skipping:
                out.append(Garbage("a line longer than 4 MiB", printable(self.rest)))
            self.rest, self.skipping = b"", True

    def finish(self) -> list[dict[str, object] | Garbage]:
        """Read to the end of a file whose writer is dead: a last line without its end is half a line."""
        out = self.read()
        if self.rest.strip(b"\0 \t\r"):
            out.append(Garbage("half a line", printable(self.rest)))
        self.rest = b""
        return out


def parse_line(line: bytes) -> dict[str, object] | Garbage:
    try:
        event = DECODER.decode(line.decode())
    except (ValueError, RecursionError):
        return Garbage("no JSON", printable(line))
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return Garbage("no event", printable(line))
    return event


def printable(data: bytes) -> str:
    return ascii(data[:60].decode("utf-8", "replace"))[1:-1]


def read_events(path: Path) -> list[dict[str, object] | Garbage]:
    """A whole events file."""
    return EventTail(path).finish()

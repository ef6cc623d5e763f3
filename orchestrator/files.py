"""Reading and writing files that others may have prepared: a run folder can come from another machine.

Links are not followed and only plain files are read, so that a folder cannot make this program read or write elsewhere,
or wait for ever at a pipe. Files are written whole or not at all.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def open_plain(path: Path, follow: bool = False) -> int:
    """A descriptor for reading a plain file; OSError for anything else."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else NOFOLLOW))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a plain file")
    return fd


def read_plain(path: Path, limit: int, follow: bool = False) -> bytes:
    """All of a plain file of at most ``limit`` bytes."""
    with open(open_plain(path, follow), "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(0, f"larger than {limit >> 20} MiB")
    return data


def write_whole(path: Path, text: str) -> None:
    """Write beside and rename, so that readers see the old file or the new one."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | NOFOLLOW, 0o644)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise

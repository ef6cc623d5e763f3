"""Small things about processes that both sides of the fork need."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
WORKER_ENV = {**dict.fromkeys(THREADS, "1"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""One thread per worker, and no pytest plugins but those that the suite names: others cost seconds a process."""


def prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the launcher alone guards against orphans."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the parent ends, also when it ended before this call."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def kill_group(pid: int, sig: int = signal.SIGKILL) -> None:
    """Signal a whole process group; it may be gone already."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, sig)


def dead(pid: int) -> bool:
    """Whether a process has ended with all its threads, reaped or not. Where the kernel does not tell: yes."""
    states = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread that has gone since
                states.append(thread.joinpath("stat").read_text().rpartition(")")[2].split()[0])
    return all(state in "ZX" for state in states)


def say_status(status: int) -> str:
    """A wait status in words: ``SIGSEGV`` or ``exit:3``, as ``known_failure_exit`` spells it."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit:{code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal:{-code}"


def children_of(pid: int) -> list[int]:
    """Direct children, where the kernel tells."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []

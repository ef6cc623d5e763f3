"""What it means that a worker ended inside a subtest, and where it was at that moment."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

from orchestrator import outcomes
from orchestrator.manifest import Planned

FRAME = re.compile(r'  File "(?P<file>[^"<][^"]*)", line (?P<line>\d+) in (?P<function>.+)')
THREAD = re.compile(r"^(?:Current thread|Thread) 0x.*\(most recent call first\):$", re.MULTILINE)
LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")})
OURS = {str(Path(__file__).with_name(name)) for name in ("launcher.py", "worker.py", "worker_plugin.py")}
MAX_DUMP = 1 << 18
"""How much of a log is looked through: behind the stacks, Python names every extension module."""


def explain(planned: Planned, how: str, late: float | None) -> tuple[str, str]:
    """Outcome and message. ``how`` the worker ended, in words; ``late``: it was killed after so many seconds."""
    if late is not None:
        return outcomes.TIMEOUT, f"no end after {late:g} s; its worker was killed"
    if planned.action == "crash" and how == "exit:0":
        return outcomes.CRASHED, "its process left with exit:0, which is no crash"
    if planned.action == "crash" and planned.required_exit in (None, how):
        return outcomes.KNOWN_FAILURE, f"crashed as required: {how}"
    if planned.action == "crash":
        return outcomes.CRASHED, f"crashed with {how}; the known failure requires {planned.required_exit}"
    message = f"its worker ended inside it: {how}"
    if how == "SIGKILL":
        message += " (the kernel's out-of-memory killer, unless somebody killed it by hand)"
    return outcomes.CRASHED, message


def pointer(log: Path, text: str) -> str:
    """Where to look: the innermost frame of the tested code, where a stack was dumped, and the log."""
    frame = innermost(text)
    return f"\nit was in {frame}\nits log: {log}" if frame else f"\nits log: {log}"


def innermost(text: str) -> str:
    """The first frame outside of Python, of installed packages and of the worker itself, in the stack that the fault
    handler dumped: of the thread at fault, or of the main thread, which it dumps last."""
    heads = list(THREAD.finditer(text))
    head = next((head for head in reversed(heads) if head[0].startswith("Current")), heads[-1] if heads else None)
    if head is None:
        return ""
    for line in text[head.end() :].lstrip("\n").splitlines():
        frame = FRAME.fullmatch(line)
        if frame is None:
            if line.startswith("  File"):  # of code that stands in no file
                continue
            break
        if not foreign(frame["file"]):
            return f"{shown(frame['file'])}:{frame['line']} ({frame['function']})"
    return ""


def foreign(file: str) -> bool:
    path = Path(file)
    if file in OURS or not {"site-packages", "dist-packages"}.isdisjoint(path.parts):
        return True
    return os.path.realpath(file).startswith(tuple(f"{folder}{os.sep}" for folder in LIBRARIES))


def shown(file: str) -> str:
    """As short as it can be typed from here."""
    here = f"{Path.cwd()}{os.sep}"
    return file.removeprefix(here)

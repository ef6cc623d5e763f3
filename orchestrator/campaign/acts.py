"""What a subtest of the fake suite does. The first word of its case name says which; ``once`` before it means that
only the first process to get there does it, and later ones pass."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def facts(id: str, outcome: str, **more: object) -> dict[str, object]:
    """The property that a real subtest reports."""
    base: dict[str, object] = {
        "id": id, "outcome": outcome, "ran": ["emulated"], "margin": None, "max_abs": None, "captures": 0, "replays": 0,
        "seconds": {}, "failure": None, "backend_class": "fake",
    }  # fmt: skip
    return base | more


def act(id: str, case: str, record: Callable[[str, object], None]) -> None:
    """Behave as the case name says."""
    with open(marks() / f"{id}.ran", "ab") as file:  # the audit believes this, not the orchestrator
        file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}\n".encode())
    words = case.split("_")
    if words[0] == "once":
        words = words[1:]
        if not first_time(id):
            words = ["pass"]
    if words[0] == "sometimes":
        words = ["pass"] if visits(id) % 2 else ["fail"]
    handler = ACTS[words[0]]
    handler(id, record)


def marks() -> Path:
    """Where processes leave notes for later ones."""
    folder = Path(os.environ.get("ATTNMATRIX_FAKE_MARKS") or Path(tempfile.gettempdir()) / "attnmatrix-fake-marks")
    folder.mkdir(exist_ok=True)
    return folder


def first_time(id: str) -> bool:
    return create(marks() / id)


def create(path: Path) -> bool:
    """Whether this process is the one that made the file."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def visits(id: str) -> int:
    """How often this was called before, over all processes, of which two may call at the same moment."""
    return next(number for number in itertools.count() if create(marks() / f"{id}.{number}"))


def events_file() -> Path:
    """The events file of the worker around this subtest: found the way a stray write would find it."""
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        if target.endswith(".jsonl"):
            return Path(target)
    raise RuntimeError("no events file is open")


def scribble(data: bytes) -> None:
    with open(events_file(), "ab") as file:
        file.write(data)


def passing(id: str, record: Callable[[str, object], None]) -> None:
    margin = (sum(id.encode()) % 97) / 100
    record("attnmatrix", facts(id, "passed", margin=margin, max_abs=margin / 50))


def failing(id: str, record: Callable[[str, object], None]) -> None:
    failure = {"check": "compare", "row": 1, "message": "row 1 differs by 0.31 (15.5 x its tolerance)"}
    record("attnmatrix", facts(id, "failed", margin=15.5, max_abs=0.31, failure=failure))
    raise AssertionError(failure["message"])


def unexpected(id: str, record: Callable[[str, object], None]) -> None:
    failure = {"check": "unexpected_pass", "message": "unexpected pass: delete the entry fake_bug"}
    record("attnmatrix", facts(id, "unexpected_pass", known_failure="fake_bug", failure=failure))
    pytest.fail(failure["message"], pytrace=False)


def known(id: str, record: Callable[[str, object], None]) -> None:
    record("attnmatrix", facts(id, "known_failure", known_failure="fake_bug", margin=20.0))
    pytest.xfail("known failure fake_bug")


def unavailable(kind: str) -> Callable[[str, Callable[[str, object], None]], None]:
    def handler(id: str, record: Callable[[str, object], None]) -> None:
        record("attnmatrix", facts(id, "unavailable", unavailable_kind=kind))
        pytest.skip(f"unavailable ({kind})")

    return handler


def segfault(*_: Any) -> None:
    ctypes.string_at(0)


def die(sig: int) -> Callable[..., None]:
    return lambda *_: os.kill(os.getpid(), sig)


def leave(code: int) -> Callable[..., None]:
    return lambda *_: os._exit(code)


def hang(*_: Any) -> None:
    while True:
        time.sleep(60)


def spin(*_: Any) -> None:
    """Hang in C with the interpreter lock held."""
    ctypes.PyDLL(None).sleep(3600)


def half(*_: Any) -> None:
    scribble(b'\n{"event":"finish","id":"dense.')
    os.kill(os.getpid(), signal.SIGKILL)


def garbage(id: str, record: Callable[[str, object], None]) -> None:
    forged = '{"event":"finish","id":"%s","outcome":"passed"}'
    for data in (
        b"\0\0\0\xff\xfe", b"[" * 50_000, b'{"event":"start","id":"no.such.sub.test"}', b'{"event":7}', b"null",
        (forged % "no.such.sub.test").encode(), b'{"event":"finish","attempt":1e400}', b"x" * 100_000,
        b'{"event":"start","id":["dense"],"attempt":{}}', "\N{SNOWMAN}\u2028".encode(),
    ):  # fmt: skip
        scribble(data + b"\n")
    scribble(b'{"event":"fini')
    passing(id, record)


def kill_launcher(id: str, record: Callable[[str, object], None]) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(5)


def foreign(id: str, record: Callable[[str, object], None]) -> None:
    record("attnmatrix", facts("dense.other.eager.result", "passed"))


def memory(*_: Any) -> None:
    raise MemoryError("CUDA out of memory (pretended)")


class BrokenDevice:
    """Stands in for torch after an illegal memory access."""

    class cuda:
        @staticmethod
        def is_initialized() -> bool:
            return True

        @staticmethod
        def synchronize() -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered (pretended)")


class LeakedMode:
    """Stands in for torch with a dispatch mode left on its stack."""

    class cuda:
        @staticmethod
        def is_initialized() -> bool:
            return False

    class _C:
        @staticmethod
        def _len_torch_dispatch_stack() -> int:
            return 1

        @staticmethod
        def _len_torch_function_stack() -> int:
            return 0


def leak(id: str, record: Callable[[str, object], None]) -> None:
    """Pass, and leave a mode active that would change every later subtest."""
    sys.modules["torch"] = LeakedMode  # type: ignore[assignment]
    passing(id, record)


def poison(id: str, record: Callable[[str, object], None]) -> None:
    """Pass, and leave a device behind that can only fail."""
    sys.modules["torch"] = BrokenDevice  # type: ignore[assignment]
    passing(id, record)


def until(ready: Callable[[], object], seconds: float = 30.0) -> None:
    """Wait for what another process does. What decides a test is waited for, never raced against."""
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            raise TimeoutError(f"waited {seconds:g} s in vain")
        time.sleep(0.01)


def arrive(place: str) -> None:
    (marks() / f"{place}.{os.getpid()}").touch()


def until_there(place: str, processes: int) -> None:
    """Wait until so many have arrived."""
    until(lambda: len(list(marks().glob(f"{place}.*"))) >= processes)


def bad_gpu(id: str, record: Callable[[str, object], None]) -> None:
    """Abort on one device, three times before anything passes on another."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("GPU-bad"):
        arrive("broke")
        os.abort()
    until_there("broke", 3)
    passing(id, record)


def gate(id: str, record: Callable[[str, object], None]) -> None:
    """Pass at the first three visits of all, and at the others once somebody has made the file ``gate``."""
    if visits("gate") >= 3:
        until((marks() / "gate").exists)
    passing(id, record)


def meet(id: str, record: Callable[[str, object], None]) -> None:
    """Pass once another process has come here, too."""
    arrive("met")
    until_there("met", 2)
    passing(id, record)


def orphan(id: str, record: Callable[[str, object], None]) -> None:
    """Leave a grandchild behind, in this group and in one of its own."""
    for own in (False, True):
        if os.fork() == 0:
            if own:
                os.setsid()
            arrive("orphan")
            time.sleep(300)
            os._exit(0)
    until_there("orphan", 2)
    passing(id, record)


def slow(id: str, record: Callable[[str, object], None]) -> None:
    time.sleep(0.3)
    passing(id, record)


def noisy(id: str, record: Callable[[str, object], None]) -> None:
    print("to stdout \x1b[31mred\x1b[0m \0")
    print("to stderr", file=sys.stderr)
    raise ValueError("<script>alert(1)</script> \x1b[31m ]]> & %0A::error::")


def leave_session(*_: Any) -> None:
    pytest.exit("a subtest ended the session", returncode=0)


ACTS: dict[str, Callable[..., None]] = {
    "pass": passing, "fail": failing, "xfail": known, "xpass": unexpected, "segv": segfault,
    "kill": die(signal.SIGKILL),
    "abort": die(signal.SIGABRT), "stop": die(signal.SIGSTOP), "exit0": leave(0), "exit3": leave(3), "hang": hang,
    "spin": spin, "half": half, "garbage": garbage, "killlauncher": kill_launcher, "foreign": foreign, "memory": memory,
    "orphan": orphan, "slow": slow, "noisy": noisy, "quit": leave_session, "nodevice": unavailable("no_device"),
    "nopackage": unavailable("package"), "oldcard": unavailable("architecture"), "untyped": unavailable("mood"),
    "poison": poison, "leak": leak, "badgpu": bad_gpu, "gate": gate, "meet": meet,
    "skip": lambda *_: pytest.skip("no reason at all"), "nothing": lambda *_: None,
}  # fmt: skip

RESULTS = {
    "pass": "passed", "slow": "passed", "garbage": "passed", "orphan": "passed", "fail": "failed", "noisy": "failed",
    "foreign": "failed", "memory": "failed", "untyped": "failed", "skip": "failed", "nothing": "failed",
    "xfail": "known_failure", "xpass": "unexpected_pass", "nodevice": "unavailable", "nopackage": "unavailable",
    "oldcard": "unavailable",
    "segv": "crashed", "kill": "crashed", "abort": "crashed", "exit0": "crashed", "exit3": "crashed", "half": "crashed",
    "quit": "failed", "hang": "timeout", "spin": "timeout", "stop": "timeout",
}  # fmt: skip
"""The one outcome that each act must lead to."""

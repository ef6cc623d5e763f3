"""Processes that try subtests against a fault: forked from this one, which has imported everything, one per job.

A fault may do anything to its process: loop, crash, or leave state behind. So no process serves two faults, what it
did is told line by line through a pipe, and whoever takes too long over a subtest is killed.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from orchestrator import processes
from orchestrator.power.results import TrialRecord, record_from


@dataclass(frozen=True)
class Job:
    """Subtests to try in this order; ``stop`` ends the job at the first kill."""

    fault: str | None
    weakening: str | None
    ids: tuple[str, ...]
    stop: bool = True


@dataclass
class Done:
    """What a job came to. ``error``: the fault could not be planted, or the process broke between subtests."""

    job: Job
    trials: list[TrialRecord] = field(default_factory=list)
    error: str | None = None


Attempts = Callable[[Job], Iterator[tuple[str, dict[str, Any]]]]
"""Yields ``("begin", {"id": ...})`` and ``("trial", {...})`` in turn, in the process of the job."""


@dataclass
class _Worker:
    done: Done
    pid: int
    pipe: int
    mark: mmap.mmap
    """One byte, shared with the process and not 0 once the fault changed a value in the subtest that it is inside of:
    this stays known however it ends."""
    rest: bytes = b""
    inside: str | None = None
    since: float = field(default_factory=time.monotonic)
    late: bool = False
    """Whether it was killed for taking too long."""


_mark: mmap.mmap | None = None


def note_change() -> None:
    """In the process of a job: the planted fault changed a value in the current subtest."""
    if _mark is not None:
        _mark[0] = 1


def run_jobs(
    jobs: Iterable[Job], attempts: Attempts, *, workers: int, timeout: float, finished: Callable[[Done], None]
) -> list[Done]:
    """Run all jobs, ``workers`` at a time; ``finished`` is called with each as it ends."""
    waiting = [Done(job) for job in jobs if job.ids]
    everything = list(waiting)
    waiting.reverse()
    selector = selectors.DefaultSelector()
    running: dict[int, _Worker] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                worker = _fork(waiting.pop(), attempts)
                running[worker.pipe] = worker
                selector.register(worker.pipe, selectors.EVENT_READ)
            for key, _ in selector.select(timeout=0.5):
                worker = running[key.fd]
                data = os.read(worker.pipe, 1 << 16)
                if data:
                    _take(worker, data)
                    continue
                selector.unregister(worker.pipe)
                del running[worker.pipe]
                rest = _bury(worker)
                if rest is not None:
                    waiting.append(rest)
                else:
                    finished(worker.done)
            for worker in running.values():
                if worker.inside is not None and time.monotonic() - worker.since > timeout:
                    worker.late = True
                    processes.kill_group(worker.pid)
    finally:
        for worker in running.values():
            processes.kill_group(worker.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.pid, 0)
    return everything


def _fork(done: Done, attempts: Attempts) -> _Worker:
    reader, writer = os.pipe()
    mark = mmap.mmap(-1, 1)
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _work(done, attempts, writer, mark, parent)
    os.close(writer)
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)
    return _Worker(done, pid, reader, mark)


def _work(done: Done, attempts: Attempts, writer: int, mark: mmap.mmap, parent: int) -> NoReturn:
    """In the child: try the subtests that are left, then end without the parent's clean-up."""
    global _mark
    _mark, code = mark, 1
    try:
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        processes.die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(null, standard)
        tried = {trial.id for trial in done.trials}
        job = Job(done.job.fault, done.job.weakening, tuple(i for i in done.job.ids if i not in tried), done.job.stop)
        try:
            for word, told in attempts(job):
                if word == "begin":
                    mark[0] = 0
                _tell(writer, word, told)
        except BaseException as error:
            told = {"text": "".join(traceback.format_exception_only(error)).strip()}
            _tell(writer, "error", told)
        _tell(writer, "end", {})
        code = 0
    finally:
        os._exit(code)


def _tell(writer: int, word: str, told: dict[str, Any]) -> None:
    line = json.dumps({"word": word, **told}).encode() + b"\n"
    while line:
        line = line[os.write(writer, line) :]


def _take(worker: _Worker, data: bytes) -> None:
    *lines, worker.rest = (worker.rest + data).split(b"\n")
    for line in lines:
        told = json.loads(line)
        worker.since = time.monotonic()
        if told["word"] == "begin":
            worker.inside = told["id"]
        elif told["word"] == "trial":
            worker.inside = None
            worker.done.trials.append(record_from(told))
        elif told["word"] == "error":
            worker.inside = None
            worker.done.error = told["text"]
        else:
            worker.inside = ""  # it ended by itself


def _bury(worker: _Worker) -> Done | None:
    """Reap a process; if it died inside a subtest, that is a kill. Returns what is left to do, if anything is."""
    os.close(worker.pipe)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    processes.kill_group(worker.pid)  # before reaping, while the id cannot name another group
    _, status = os.waitpid(worker.pid, 0)
    exercised = worker.mark[0] != 0
    worker.mark.close()
    if worker.inside == "" or worker.done.error is not None:
        return None
    if worker.inside is None:
        worker.done.error = f"the process ended between subtests: {processes.say_status(status)}"
        return None
    seconds = time.monotonic() - worker.since
    late = worker.late and os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    outcome = "timeout" if late else "crashed"
    worker.done.trials.append(
        TrialRecord(
            id=worker.inside,
            outcome=outcome,
            check=outcome,
            message=f"{outcome} after {seconds:.1f} s: {processes.say_status(status)}",
            seconds=seconds,
            exercised=exercised,
            killed=True,
        )
    )
    left = len(worker.done.trials) < len(worker.done.job.ids) and not worker.done.job.stop
    return worker.done if left else None

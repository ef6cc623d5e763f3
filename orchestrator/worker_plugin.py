"""The pytest plugin of a worker: pulls ids from the supervisor, runs them, and records what happened.

Modules are collected when the first of their subtests is due. ``start`` is written before a subtest is set up and
``finish`` after it is torn down, with the device synchronised in between, so that a fault is blamed on the subtest
that caused it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from orchestrator import outcomes
from orchestrator.environment import environment
from orchestrator.events import EventWriter, RecordError
from orchestrator.worker import EXIT_DONE, EXIT_RECORD, EXIT_UNFIT, Channel, cannot_record

MAX_TEXT = 20_000
MEMORY_ERRORS = ("MemoryError", "OutOfMemoryError")


class LeakedMode(AssertionError):
    """A subtest left a torch mode active, which would change every later one."""


class WorkerPlugin:
    def __init__(self, spec: Mapping[str, Any], channel: Channel, events: EventWriter, log: int) -> None:
        self.spec, self.channel, self.events, self.log = spec, channel, events, log
        self.queue: deque[dict[str, Any]] = deque()
        self.items: dict[str, dict[str, pytest.Item]] = {}
        self.broken: dict[str, str] = {}
        self.collect_errors: list[str] = []
        self.reports: list[pytest.TestReport] = []
        self.unfit = ""
        self.poisoned = self.memory = False
        self.ending = False

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Nothing is collected up front."""
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> NoReturn:
        """Serve the supervisor until it says to end, or until this process is unfit.

        The process leaves from here: everything is written, and tearing pytest and torch down takes a second.
        """
        here = environment()
        self.write(event="ready", pid=os.getpid(), device=self.spec["device"], environment=here, t=time.time())
        while self.refill(wait=True):
            self.run(session, self.queue.popleft())
            if self.unfit:
                break
        self.write(event="bye", t=time.time())
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_UNFIT if self.unfit else EXIT_DONE)

    def write(self, **event: object) -> None:
        """Record an event; a worker that cannot record must not go on, not even through pytest's own error handling."""
        try:
            self.events.write(event)
        except RecordError as error:
            cannot_record(self.channel, error)
            os._exit(EXIT_RECORD)
        self.channel.ring()

    def refill(self, wait: bool) -> bool:
        """Take orders; returns whether there is something to run."""
        while not self.ending and (not self.queue or not wait):
            orders: list[dict[str, Any]] = self.channel.receive(wait and not self.queue)
            for order in orders:
                self.ending = self.ending or order["order"] == "end"
                self.queue.extend(order.get("jobs", ()))
            if not wait or not orders:
                break
        return bool(self.queue)

    def find(self, session: pytest.Session, job: Mapping[str, Any]) -> pytest.Item | None:
        """The item of a job, its module collected if it is the first of it."""
        file = job["file"]
        if file not in self.items:
            self.write(event="collect", file=file, t=time.time())
            self.collect_errors = []
            found: Sequence[object] = ()
            try:
                found = session.perform_collect([str(Path(self.spec["tests"]) / file)])
            except pytest.UsageError as error:
                self.collect_errors.append(str(error))
            self.items[file] = {item.name: item for item in found if isinstance(item, pytest.Item)}
            self.broken[file] = "\n".join(self.collect_errors)
        return self.items[file].get(job["test"])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collect_errors.append(str(report.longrepr))

    def run(self, session: pytest.Session, job: Mapping[str, Any]) -> None:
        """One subtest, from ``start`` to ``finish``."""
        item = self.find(session, job)
        if not self.queue:
            self.refill(wait=False)
        following = self.queue[0] if self.queue else None
        nextitem = None
        if following is not None and following["file"] == job["file"]:
            nextitem = self.find(session, following)
            if nextitem is item:  # once more: pytest would not set up again what it did not tear down
                nextitem = None
        self.reports, self.memory = [], False
        key = {"id": job["id"], "attempt": job["attempt"]}
        began = time.monotonic()
        self.write(event="start", **key, t=time.time(), log=os.fstat(self.log).st_size)
        facts: dict[str, Any] | None = None
        if item is None:
            missing = f"{job['test']} is not in {job['file']}: generate the tests anew"
            outcome, text = outcomes.FAILED, self.broken[job["file"]] or missing
            message = f"collection failed: {text.strip().splitlines()[-1]}"
        else:
            faulthandler.dump_traceback_later(self.spec["deadline"], exit=False, file=self.log)
            ended = ""
            try:
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            except (pytest.exit.Exception, KeyboardInterrupt) as error:
                ended = self.unfit = f"the subtest ended the session: {error!r}"
            finally:
                faulthandler.cancel_dump_traceback_later()
            pairs = [pair for report in self.reports for pair in report.user_properties]
            facts = next((value for name, value in pairs if name == "attnmatrix" and isinstance(value, dict)), None)
            outcome, message = (outcomes.FAILED, ended) if ended else conclude(job, self.reports, facts)
            if not recordable(facts):
                outcome, message, facts = outcomes.FAILED, "the subtest reported what cannot be recorded", None
            text = describe(self.reports) if outcome not in outcomes.EXPECTED else ""
        if self.memory:
            self.unfit = self.unfit or "memory was exhausted"
        if self.unfit and self.unfit not in message:
            message = f"{message} [worker replaced: {self.unfit}]"
        self.write(
            event="finish", **key, t=time.time(), seconds=round(time.monotonic() - began, 4), outcome=outcome,
            message=clip(message, 4000), attnmatrix=facts, longrepr=clip(text, MAX_TEXT), poisoned=self.poisoned,
        )  # fmt: skip

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Settle the device while the subtest can still be blamed."""
        try:
            result = yield
        except BaseException as error:
            names = {cls.__name__ for cls in type(error).__mro__}
            self.memory = self.memory or not names.isdisjoint(MEMORY_ERRORS)
            self.settle()
            raise
        problem = self.settle()
        if problem is not None:
            raise problem
        return result

    def settle(self) -> Exception | None:
        """Synchronise the device and look for modes left active; either makes this process unfit."""
        torch = sys.modules.get("torch")
        if torch is None:
            return None
        cuda = getattr(torch, "cuda", None)
        if cuda is not None and cuda.is_initialized():
            try:
                cuda.synchronize()
            except Exception as error:
                self.poisoned = True
                self.unfit = f"poisoned device context: {str(error).splitlines()[0] if str(error) else type(error)}"
                return error
        left = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        if left:
            self.unfit = f"{left} torch mode(s) left active"
            return LeakedMode(f"the subtest left {left} torch dispatch or function mode(s) active")
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)


def conclude(job: Mapping[str, Any], reports: list[pytest.TestReport], facts: object) -> tuple[str, str]:
    """One outcome from the phases of a subtest and from what the kit says about it; doubt means failed."""
    bad = next((report for report in reports if report.failed), None)
    claim = text_of(facts, "outcome")
    if bad is not None:
        if claim == outcomes.UNEXPECTED_PASS and bad.when == "call":
            return outcomes.UNEXPECTED_PASS, unexpected(one_line(facts, bad))
        told = facts if claim == outcomes.FAILED else None
        # How a declared known failure failed otherwise comes first: what went wrong alone looks like the known failure.
        otherwise = text_of(told, "reason") if job["action"] is not None else None
        return outcomes.FAILED, "\n".join(filter(None, [otherwise, one_line(told, bad)]))
    if not isinstance(facts, dict):
        skipped = next((report for report in reports if report.skipped), None)
        if skipped is not None:
            return outcomes.FAILED, f"skipped without a typed reason: {one_line(None, skipped)}"
        return outcomes.FAILED, "nothing was checked: the subtest reported no result"
    if facts.get("id") != job["id"]:
        return outcomes.FAILED, f"the subtest reported the result of another one: {facts.get('id')!r}"
    if claim not in outcomes.WORKER_OUTCOMES:
        return outcomes.FAILED, f"the subtest reported {facts.get('outcome')!r}, which is no outcome"
    if claim == outcomes.UNAVAILABLE and text_of(facts, "unavailable_kind") not in outcomes.UNAVAILABLE_KINDS:
        return outcomes.FAILED, f"unavailable without a typed reason: {facts.get('unavailable_kind')!r}"
    if claim in (outcomes.KNOWN_FAILURE, outcomes.SKIPPED_KNOWN) and job["action"] is None:
        return outcomes.FAILED, f"reported {claim}, but the plan knows no such entry"
    if claim == outcomes.PASSED:
        return outcomes.PASSED, ""
    told = next((report for report in reports if report.skipped), reports[0] if reports else None)
    return str(claim), one_line(facts, told)


def recordable(facts: object) -> bool:
    try:
        json.dumps(facts, default=str, skipkeys=True)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def text_of(facts: object, name: str) -> str | None:
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, str) else None


def one_line(facts: object, report: pytest.TestReport | None) -> str:
    """What went wrong, in one line if there is one."""
    failure = facts.get("failure") if isinstance(facts, dict) else None
    if isinstance(failure, dict) and failure.get("message"):
        head = failure.get("check") or ""
        text = str(failure["message"])
        return text if not head or text.startswith(str(head)) else f"{head}: {text}"
    if report is None:
        return ""
    prefix = f"in {report.when}: " if report.when != "call" else ""
    if isinstance(report.longrepr, tuple):  # a skip: file, line, reason
        return prefix + str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return prefix + (str(crash.message) if crash is not None else str(report.longrepr or ""))


def unexpected(message: str) -> str:
    """A message without its outcome in front, which every report says itself."""
    for prefix in ("unexpected_pass: ", "unexpected pass: "):
        message = message.removeprefix(prefix)
    return message


def describe(reports: list[pytest.TestReport]) -> str:
    """Tracebacks and captured output of the phases that went wrong."""
    parts = []
    for report in reports:
        if report.failed:
            parts.append(str(report.longrepr))
            parts += [f"--- {name} ---\n{clip(text, 4000)}" for name, text in report.sections if text.strip()]
    return "\n".join(parts)


def clip(text: str, limit: int) -> str:
    """Keep the beginning and, more of it, the end."""
    return text if len(text) <= limit else f"{text[: limit // 3]}\n... (cut) ...\n{text[-(limit - limit // 3) :]}"

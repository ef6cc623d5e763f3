"""What a person sees while a run goes on: a lane per worker in a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, TextIO

from orchestrator import outcomes
from orchestrator.ledger import Attempt
from orchestrator.reports.text import count_line
from orchestrator.verdict import settle

if TYPE_CHECKING:
    from rich.console import RenderableType

    from orchestrator.supervisor import Supervisor

INTERVAL = 10.0
MAX_SHOWN = 40


class Progress:
    """Plain lines: each failure once, and every ten seconds how far the run is."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.counts: Counter[str] = Counter()
        self.total = self.done = self.shown = 0
        self.began = self.last = time.monotonic()

    def start(self, left: int) -> None:
        self.total = left
        self.began = self.last = time.monotonic()

    def __call__(self, supervisor: Supervisor, attempt: Attempt | None) -> None:
        """Called for every finished attempt, and without one now and then."""
        if attempt is not None:
            self.done += 1
            self.count(supervisor, attempt)
        self.draw(supervisor)

    def count(self, supervisor: Supervisor, attempt: Attempt) -> None:
        planned = supervisor.planned(attempt.id)
        outcome = settle(planned, attempt) if planned else attempt.outcome
        self.counts[outcome] += 1
        if outcome not in outcomes.EXPECTED and outcome != outcomes.UNAVAILABLE:
            self.shown += 1
            if self.shown <= MAX_SHOWN:
                self.say(f"{outcomes.PHRASES[outcome][0].upper()} {attempt.id}: {headline(attempt.message)}")
            elif self.shown == MAX_SHOWN + 1:
                self.say("... more failures follow; they are listed at the end")

    def say(self, line: str) -> None:
        with contextlib.suppress(OSError):  # whoever read this may be gone; the run goes on
            print(line, file=self.stream, flush=True)

    def draw(self, supervisor: Supervisor) -> None:
        now = time.monotonic()
        if now - self.last >= INTERVAL:
            self.last = now
            self.say(self.line(supervisor))

    def line(self, supervisor: Supervisor) -> str:
        """``120/552  3.4 a second, about 2:05 left  118 passed, 2 failed``."""
        left = supervisor.left
        total = self.done + left
        rate = self.done / max(time.monotonic() - self.began, 1e-3)
        rest = f", about {clock(left / rate)} left" if self.done >= 5 and left else ""
        return f"{self.done}/{total}  {rate:.1f} a second{rest}  {count_line(self.counts)}"

    def end(self) -> None:
        pass


class LiveProgress(Progress):
    """The same in a terminal: one line per lane, redrawn in place."""

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=self.stream)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)
        self.live.start()

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, style="red" if line[:1].isupper() else None)

    def draw(self, supervisor: Supervisor) -> None:
        now = time.monotonic()
        if now - self.last >= 0.1:
            self.last = now
            self.live.update(self.render(supervisor), refresh=True)

    def render(self, supervisor: Supervisor) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        lanes = Table.grid(padding=(0, 2))
        for lane, device in enumerate(supervisor.lanes):
            words = lane_words(supervisor, lane, device)
            lanes.add_row(*(Text(word, overflow="ellipsis", no_wrap=True) for word in words))
        total = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=max(1, self.done + supervisor.left), completed=self.done, width=24)
        total.add_row(bar, Text(self.line(supervisor)))
        return Group(lanes, total)

    def end(self) -> None:
        self.live.stop()


def headline(message: str) -> str:
    """The first line of a message, and of a list that it announces the first item."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    head = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return head[:200]


def lane_words(supervisor: Supervisor, lane: int, device: str | None) -> tuple[str, str, str]:
    """Device, seconds in the current state, and what that is."""
    name = "set aside" if device is None else device[:12]
    worker = supervisor.workers.get(lane)
    if worker is None:
        return name, "", ""
    spent = f"{time.monotonic() - worker.since:5.1f} s"
    if worker.inside is not None:
        return name, spent, worker.inside.planned.id
    if not worker.ready:
        return name, spent, "starting"
    return name, spent, f"collecting {worker.collecting}" if worker.collecting else "between two subtests"


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def choose_progress(plain: bool) -> Progress:
    """Live where a person watches, plain lines in a log."""
    return Progress() if plain or not sys.stdout.isatty() else LiveProgress()

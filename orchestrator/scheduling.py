"""What is still to do: queues of blocks, and jobs that need a process of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from orchestrator.manifest import Planned
from orchestrator.planning import Block, library_of

PROCESS_COST = 1.5
"""Seconds until a new process can use a GPU, as measured on an H200."""


@dataclass(slots=True, eq=False)
class Job:
    """One attempt to make. ``queue`` is where it goes back to if it was not started."""

    planned: Planned
    queue: int
    attempt: int = 0
    alone: bool = False
    avoid: str | None = None
    """A device on which this attempt would prove nothing."""
    lost: int = 0
    """How often the process it ran in was taken away through no fault of a subtest."""
    seconds: float = 0.0
    """What the plan expects."""

    def order(self) -> dict[str, object]:
        return {
            "id": self.planned.id,
            "file": self.planned.file,
            "test": self.planned.test,
            "attempt": self.attempt,
            "action": self.planned.action,
        }


class Scheduler:
    """Hands out jobs. A lane keeps to its own queue first; when that is empty it helps where nobody is, then where most
    is left, and takes of a module that it has opened already, or from the end, where the owner would arrive last.

    ``opening`` says how many seconds a process needs to begin with a library. Where somebody else is at work, a lane
    does not begin with another one unless twice as much is left there, half of which is done before the lane is ready.
    """

    def __init__(
        self, queues: Sequence[Sequence[Block]], repeat: int, fresh: bool, done: Callable[[str, int], bool],
        opening: Callable[[Planned], float] = lambda planned: 0.0,
    ) -> None:  # fmt: skip
        self.opening = opening
        self.queues: list[deque[list[Job]]] = []
        self.alone: deque[Job] = deque()
        self.at: dict[int, int] = {}
        """Which queue each lane works on, in the order in which they came to it."""
        self.opened: dict[int, set[str]] = {}
        """Modules, and libraries, that each lane has worked on."""
        for number, blocks in enumerate(queues):
            queue: deque[list[Job]] = deque()
            for attempt in range(repeat):
                for block in blocks:
                    each = block.cost / len(block.subtests)
                    jobs = [Job(p, number, attempt, seconds=each) for p in block.subtests if not done(p.id, attempt)]
                    for job in jobs:
                        job.alone = fresh or job.planned.action == "crash"
                    self.alone.extend(job for job in jobs if job.alone)
                    shared = [job for job in jobs if not job.alone]
                    if shared:
                        queue.append(shared)
            self.queues.append(queue)

    def confirm(self, planned: Planned, attempts: Iterable[int], avoid: str | None = None) -> None:
        """Queue more attempts of one subtest, each in its own process."""
        self.alone.extend(Job(planned, 0, attempt, alone=True, avoid=avoid) for attempt in attempts)

    @property
    def waiting(self) -> int:
        return sum(len(block) for queue in self.queues for block in queue) + len(self.alone)

    def take(self, lane: int) -> list[Job]:
        """The next block for a lane, or nothing."""
        home = self.at.get(lane, lane % len(self.queues))
        others = [place for other, place in self.at.items() if other != lane]
        places = [place for place, queue in enumerate(self.queues) if queue]
        places.sort(key=lambda place: (place != home, others.count(place), -len(self.queues[place]), place))
        for place in places:
            first = next((other for other, theirs in self.at.items() if theirs == place), lane)
            position = 0 if first == lane else self.choose(lane, place)
            if position is not None:
                break
        else:
            return []
        if self.at.get(lane) != place:
            self.at.pop(lane, None)
            self.at[lane] = place
        block = self.queues[place][position]
        del self.queues[place][position]
        self.opened.setdefault(lane, set()).update((block[0].planned.file, library_of(block[0].planned)))
        return block

    def choose(self, lane: int, place: int) -> int | None:
        """Which block to take of a queue that another lane came to first: one of a module that is open here, or the
        last; and none that needs a library which is not, unless much is left."""
        queue, opened = self.queues[place], self.opened.get(lane, set())
        left = sum(job.seconds for block in queue for job in block)

        def pays_off(planned: Planned) -> bool:
            cost = self.opening(planned)
            cost += PROCESS_COST if cost and not opened else 0.0
            return library_of(planned) in opened or 2 * cost <= left

        last_first = [number for number in reversed(range(len(queue))) if pays_off(queue[number][0].planned)]
        familiar = (number for number in last_first if queue[number][0].planned.file in opened)
        return next(familiar, last_first[0] if last_first else None)

    def leave(self, lane: int) -> None:
        """The lane's process is gone: it works nowhere and has opened nothing."""
        self.at.pop(lane, None)
        self.opened.pop(lane, None)

    def take_alone(self, device: str) -> Job | None:
        """The next job that needs its own process and may run on this device."""
        for number, job in enumerate(self.alone):
            if job.avoid != device:
                del self.alone[number]
                return job
        return None

    def put_back(self, jobs: Iterable[Job]) -> None:
        """Return jobs that were handed out and never started; they come first again."""
        by_module: dict[tuple[int, str], list[Job]] = {}
        for job in jobs:
            if job.alone:
                self.alone.appendleft(job)
            else:
                by_module.setdefault((job.queue, job.planned.file), []).append(job)
        for (place, _), block in reversed(by_module.items()):
            self.queues[place].appendleft(block)

    def drop(self, wanted: Callable[[Job], bool]) -> list[Job]:
        """Take out all waiting jobs for which ``wanted`` holds."""
        dropped = [job for job in self.alone if wanted(job)]
        self.alone = deque(job for job in self.alone if not wanted(job))
        for place, queue in enumerate(self.queues):
            kept: deque[list[Job]] = deque()
            for block in queue:
                dropped += [job for job in block if wanted(job)]
                if rest := [job for job in block if not wanted(job)]:
                    kept.append(rest)
            self.queues[place] = kept
        return dropped

"""Which devices this run may use. For now the CPU lanes only."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Lanes:
    """``devices[i]`` is the device of lane ``i``; ``kind`` names the hardware in the duration history."""

    devices: list[str]
    kind: str
    sentence: str


def cpu_count() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


@contextmanager
def choose_lanes(workers: int | None, shards: int) -> Generator[Lanes]:
    cores = cpu_count()
    number = workers or min(4, cores)
    noun = "worker runs" if number == 1 else "workers run"
    yield Lanes(
        ["cpu"] * number, "cpu", f"No GPU here: {number} {noun} them on the CPU ({cores} cores), one thread each."
    )

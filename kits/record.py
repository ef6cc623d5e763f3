"""What one subtest did and how close it came: filled while it runs, read by the pytest plugin afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """``margin`` is the largest difference met, as a multiple of its tolerance; ``seconds`` are wall time by phase.

    A phase within a phase counts for itself alone. On a GPU it is the host's time: what was launched runs meanwhile.
    """

    id: str
    backend_class: str = ""
    ran: set[str] = field(default_factory=set)
    margin: float | None = None
    max_abs: float | None = None
    captures: int = 0
    replays: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    _within: float = field(default=0.0, repr=False)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to ``seconds[name]``."""
        start, outer, self._within = time.perf_counter(), self._within, 0.0
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._within
            self._within = outer + spent

    def note_difference(self, margin: float, max_abs: float) -> None:
        self.margin = margin if self.margin is None else max(self.margin, margin)
        self.max_abs = max_abs if self.max_abs is None else max(self.max_abs, max_abs)

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "backend_class": self.backend_class,
            "ran": sorted(self.ran),
            "margin": self.margin,
            "max_abs": self.max_abs,
            "captures": self.captures,
            "replays": self.replays,
            "seconds": {name: round(value, 6) for name, value in self.seconds.items()},
        }


_latest: list[Record] = []


def begin(subtest_id: str) -> Record:
    """The record of a subtest that starts now; replaces the previous one."""
    _latest[:] = [Record(subtest_id)]
    return _latest[0]


def latest(subtest_id: str) -> Record:
    """The record of ``subtest_id`` if it is the latest to have begun, else an empty one."""
    if _latest and _latest[0].id == subtest_id:
        return _latest[0]
    return Record(subtest_id)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A phase of the subtest that runs now, if one does."""
    if not _latest:
        yield
        return
    with _latest[0].phase(name):
        yield

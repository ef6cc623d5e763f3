"""Who computed a result: a library's kernel, Triton's interpreter, or an emulation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

NATIVE = "native"
INTERPRETED = "interpreted"
EMULATED = "emulated"

_trackers: list[set[str]] = []


@contextmanager
def track() -> Iterator[set[str]]:
    """Collect the kinds of all kernels that execute meanwhile: ``native``, ``interpreted``, ``emulated``.

    A captured call executes when the graph is replayed. On CUDA a replay runs no Python, so there the kind is
    noted when the kernel is launched into the capture. Trackers nest.
    """
    ran: set[str] = set()
    _trackers.append(ran)
    try:
        yield ran
    finally:
        # By identity: two trackers with the same content are equal sets.
        for position, tracker in enumerate(_trackers):
            if tracker is ran:
                del _trackers[position]
                break


def note(kind: str) -> None:
    """Called by every kernel implementation when it executes."""
    for ran in _trackers:
        ran.add(kind)

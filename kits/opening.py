"""What a process pays once before it runs a backend on a GPU: the import of its library, and the device's context."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from kits.collecting import no_collection
from kits.record import phase

PATIENCE = 10.0
"""Seconds to wait for one's turn. Whoever takes longer hangs in the driver, and is nobody's example."""

_tried: set[str] = set()
_made: list[bool] = []


def open_gpu(libraries: Iterable[str]) -> None:
    """Import ``libraries`` and make the context of the process's GPU, each of them once a process.

    A library that cannot be imported is left to the kernel that asks for it, which says so with a typed reason. The
    context comes second: meanwhile the processes that have nothing to import make theirs. Nothing else may use CUDA
    before, or that would be out of turn.
    """
    wanted = [name for name in libraries if name not in _tried]
    _tried.update(wanted)
    if wanted:
        # Imports leave next to no garbage, and looking for it takes a fifth of their time.
        with phase("libraries"), no_collection():
            for name in wanted:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
    if not _made:
        _made.append(True)
        with phase("context"):
            make_context()


def make_context() -> None:
    """Make the primary context of the first visible device, which torch's calls will share. Where that fails, torch
    will say why."""
    with contextlib.suppress(OSError, AttributeError), in_turn():
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), 0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


@contextlib.contextmanager
def in_turn() -> Iterator[None]:
    """One process of this user at a time in the block.

    The driver makes the contexts of processes that ask together no faster than one after the other, and all of them are
    there when the last one is. In turn, most are at work by then. Where no lock can be had, nobody waits.
    """
    lock = FileLock(Path(tempfile.gettempdir()) / f"attnmatrix-context-{os.getuid()}.lock")
    with contextlib.suppress(NotImplementedError, OSError, Timeout):
        lock.acquire(timeout=PATIENCE, poll_interval=0.005)
    try:
        yield
    finally:
        lock.release()

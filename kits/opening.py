"""What a process pays once before it runs a backend on a GPU: the import of its library, and the device's context."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading

import torch

from kits.backends.base import Backend
from kits.collecting import no_collection
from kits.record import phase

_tried: set[str] = set()


def open_libraries(backend: Backend, device: torch.device) -> None:
    """Import ``backend.libraries`` where ``device`` is a GPU, once a process, and make its context meanwhile.

    One takes seconds and the other one, and neither needs the other. A library that cannot be imported is left to the
    kernel that asks for it, which says so with a typed reason.
    """
    wanted = [name for name in backend.libraries if name not in _tried]
    if device.type != "cuda" or not wanted:
        return
    _tried.update(wanted)
    # Imports leave next to no garbage, and looking for it takes a fifth of their time.
    with phase("libraries"), no_collection():
        context = threading.Thread(target=make_context, args=(device.index or 0,))
        context.start()
        for name in wanted:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        context.join()


def make_context(ordinal: int) -> None:
    """Make the primary context of the ``ordinal``-th visible device, which torch's calls will share. Where that fails,
    torch will say why. Unlike torch's own first call this leaves the interpreter to others while the driver works."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

"""Imports what every worker needs, in the process that they are forked from. Touches no device.

Libraries with kernels of their own are left to the workers that need them, or to a process like this one for each slow
library.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import threading

from kits.architecture import name_architecture


def begin_beside() -> list[threading.Thread]:
    """Begin what takes time and needs no torch, to cost nothing while torch is imported beside it: to name the
    architecture, and to hash Triton, which names what it compiles by a hash of its own half a gigabyte, for seconds in
    each worker."""
    work = [name_architecture]
    with contextlib.suppress(ImportError):  # no Triton, or one that does this elsewhere
        work.append(importlib.import_module("triton.runtime.cache").triton_key)
    threads = [threading.Thread(target=each) for each in work]
    for thread in threads:
        thread.start()
    return threads


beside = begin_beside() if os.environ.get("ATTNMATRIX_DEVICE") == "cuda" else []

from kits import backends, known, runners, verdict  # noqa: E402
from kits.errors import Unavailable  # noqa: E402

__all__ = ["backends", "known", "runners", "verdict"]

if os.environ.get("ATTNMATRIX_DEVICE") == "cpu":  # what fake kernels need, which only the recorder asks
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
for _module in pkgutil.iter_modules(backends.__path__):
    with contextlib.suppress(Unavailable):  # the subtests that need it will say so
        importlib.import_module(f"kits.backends.{_module.name}")
for _thread in beside:
    _thread.join()  # a fork takes no thread along

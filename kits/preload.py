"""Imports what every worker needs, in the process that they are forked from. Touches no device.

Libraries with kernels of their own are left to the workers that need them: some look at the device when imported, and
some take seconds, which workers spend side by side.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil
import threading


def hash_triton() -> threading.Thread | None:
    """Begin to hash Triton, which names what it compiles by a hash of its own half a gigabyte: seconds in each worker,
    and nothing while torch is imported beside it."""
    try:
        from triton.runtime.cache import triton_key
    except ImportError:  # no Triton, or one that does this elsewhere
        return None
    thread = threading.Thread(target=triton_key)
    thread.start()
    return thread


hashing = hash_triton() if os.environ.get("ATTNMATRIX_DEVICE") == "cuda" else None

from kits import backends, known, runners, verdict  # noqa: E402
from kits.errors import Unavailable  # noqa: E402

__all__ = ["backends", "known", "runners", "verdict"]

if os.environ.get("ATTNMATRIX_DEVICE") == "cpu":  # what fake kernels need, which only the recorder asks
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
for _module in pkgutil.iter_modules(backends.__path__):
    with contextlib.suppress(Unavailable):  # the subtests that need it will say so
        importlib.import_module(f"kits.backends.{_module.name}")
if hashing is not None:
    hashing.join()  # a fork takes no thread along

"""Imports what every worker needs, in the process that they are forked from. Touches no device.

Libraries with kernels of their own are left to the workers that need them: some look at the device when imported, and
some take seconds, which workers spend side by side.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pkgutil

from kits import backends, runners
from kits.errors import Unavailable

__all__ = ["backends", "runners"]

if os.environ.get("ATTNMATRIX_DEVICE") == "cpu":  # what fake kernels need, which only the recorder asks
    importlib.import_module("torch.fx.experimental.symbolic_shapes")
for _module in pkgutil.iter_modules(backends.__path__):
    with contextlib.suppress(Unavailable):  # the subtests that need it will say so
        importlib.import_module(f"kits.backends.{_module.name}")

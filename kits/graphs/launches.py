"""Raw Triton launches during a capture.

A launch reaches no dispatcher: a recorder would miss it, and a CUDA graph would hold pointers that no check knows. So
Triton runs through custom ops only, and any other launch during a capture is refused. The launch methods of Triton's
kernels (compiled and interpreted) are wrapped once, when Triton is first seen; Triton is never imported for this.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from kits.graphs.refusals import refuse

_KERNELS = {"triton.runtime.jit": "JITFunction", "triton.runtime.interpreter": "InterpretedFunction"}
_refusing: set[object] = set()
_inside_op = 0


@contextmanager
def refused() -> Iterator[None]:
    """Refuse raw launches in the ``with`` block."""
    for name in _KERNELS:
        if name in sys.modules:
            _wrap(sys.modules[name])
    finder = _Finder()
    if any(name not in sys.modules for name in _KERNELS):
        sys.meta_path.insert(0, finder)
    _refusing.add(finder)
    try:
        yield
    finally:
        _refusing.discard(finder)
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)


def allow() -> None:
    """Allow launches again, whatever ``with`` block is still open."""
    _refusing.clear()


@contextmanager
def inside_op() -> Iterator[None]:
    """Allow launches in the ``with`` block: a custom op is running."""
    global _inside_op
    _inside_op += 1
    try:
        yield
    finally:
        _inside_op -= 1


def _wrap(module: ModuleType) -> None:
    kernel = getattr(module, _KERNELS[module.__name__], None)
    if kernel is None or getattr(kernel.run, "_refuses_raw_launches", False):
        return
    run = kernel.run

    @functools.wraps(run)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _refusing and not _inside_op and not kwargs.get("warmup"):
            raise refuse("raw_triton_launch", getattr(self, "__name__", "kernel"))
        return run(self, *args, **kwargs)

    guarded._refuses_raw_launches = True  # type: ignore[attr-defined]
    kernel.run = guarded


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps Triton's kernels as they are imported, should that happen during a capture."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _KERNELS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _wrap(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

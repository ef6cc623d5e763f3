"""Copies of a function with one passage of its source changed: for faults in the middle of a kernel.

A replacement by a wrapper or a subclass is better wherever one is possible.
"""

from __future__ import annotations
import __future__

import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable
from typing import Any

from kits.errors import KitError

_numbers = itertools.count(1)


def edited(function: Callable[..., Any], *edits: tuple[str, str], **names: Any) -> Callable[..., Any]:
    """A copy of ``function`` in whose source each ``(old, new)`` was applied; ``names`` are added to its globals.

    ``old`` must occur exactly once, or the kit has changed under the fault. Closures, and so ``super()``, are lost.
    """
    return _compile(function, inspect.getsource(function), edits, names)


def edited_kernel(kernel: Any, *edits: tuple[str, str], **names: Any) -> Any:
    """The same for a Triton kernel, compiled or interpreted as the original is."""
    from kits.kernels._triton import triton

    return triton.jit(_compile(kernel.fn, inspect.getsource(kernel.fn), edits, names))


def _compile(
    function: Callable[..., Any], source: str, edits: tuple[tuple[str, str], ...], names: dict[str, Any]
) -> Callable[..., Any]:
    source = textwrap.dedent(source)
    source = source[source.index("def ") :]  # without decorators
    for old, new in edits:
        if source.count(old) != 1:
            raise KitError(
                f"{function.__qualname__} holds {old!r} {source.count(old)} times, not once: the kit changed"
            )
        source = source.replace(old, new)
    # Triton reads the source of a kernel again, and finds it by file name and line.
    filename = f"<{function.__qualname__} edited {next(_numbers)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace = {**function.__globals__, **names}
    exec(compile(source, filename, "exec", __future__.annotations.compiler_flag), namespace)
    made: Callable[..., Any] = namespace[function.__name__]
    made.__module__ = function.__module__
    return made

"""Side streams: work that is done when somebody waits for it, and otherwise too late.

    side = stream()
    with side.work():
        buffer.copy_(new)      # on CUDA: after what the current stream was given so far
    side.wait()                # the current stream's further work comes after it

On a CPU the work is taken in without running. Waiting runs it; without a wait it runs after the next replay, which has
then read the old values. That is one of the orders CUDA may choose, and the one that shows the missing wait. During a
capture the work becomes a branch of the graph, which has to be joined before the capture ends.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils import _python_dispatch

from kits.graphs import host
from kits.graphs.base import current_capture
from kits.graphs.deferring import Arguments, DeferringMode, store
from kits.graphs.memory import poison_
from kits.graphs.refusals import function_refusal
from kits.graphs.schemas import Layout, OpInfo


class Stream(Protocol):
    """A queue of device work beside the current one."""

    def work(self) -> Any:
        """Context manager: what runs in the ``with`` block goes to this stream."""

    def wait(self, other: Stream | None = None) -> None:
        """Without ``other``: the current stream waits for this one. With it: this stream waits for ``other``."""


class CpuStream:
    """A side stream on a CPU."""

    def __init__(self) -> None:
        self._pending: list[tuple[Any, tuple, dict[str, Any], Any]] = []

    @contextmanager
    def work(self) -> Iterator[None]:
        graph: Any = current_capture()
        if graph is not None:
            with graph.branch(self):
                yield
            return
        _with_work.add(self)
        with host.watched(self._look), _Deferred(self):
            yield

    def wait(self, other: Stream | None = None) -> None:
        if other is not None:
            other.wait()
            return
        graph: Any = current_capture()
        if graph is not None:
            graph.join(self)
        else:
            self.run()

    def run(self) -> None:
        """Do the pending work."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes():
            for op, args, kwargs, where in pending:
                store(where, op(*args, **kwargs))

    def defer(self, op: Any, args: tuple, kwargs: dict[str, Any], where: Any) -> None:
        self._pending.append((op, args, kwargs, where))

    def forget(self) -> None:
        self._pending.clear()

    def _look(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """A host read on a stream waits for that stream."""
        refusal = function_refusal(func, args, kwargs)
        if refusal is not None and refusal.rule == "host_read":
            self.run()


class CurrentStream:
    """The stream that work goes to by itself; ``current.wait(side)`` is ``side.wait()``."""

    @contextmanager
    def work(self) -> Iterator[None]:
        yield

    def wait(self, other: Stream | None = None) -> None:
        if other is not None:
            other.wait()


_with_work: weakref.WeakSet[CpuStream] = weakref.WeakSet()


def flush() -> None:
    """Do all pending work of all side streams."""
    for stream in list(_with_work):
        stream.run()
    _with_work.clear()


def forget() -> None:
    """Drop all pending work."""
    for stream in list(_with_work):
        stream.forget()
    _with_work.clear()


class _Deferred(DeferringMode):
    """The dispatch mode of a side stream's work outside of a capture."""

    def __init__(self, stream: CpuStream) -> None:
        super().__init__()
        self._stream = stream

    def _constant(self, info: OpInfo, value: torch.Tensor) -> torch.Tensor:
        return value if not host.making_host_tensor() else host.mark_host(value)

    def _new(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        tensor = poison_(torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype))
        return tensor, tensor

    def _defer(self, info: OpInfo, args: tuple, kwargs: dict[str, Any], tensors: Arguments, hosts: Arguments) -> Any:
        if info.host_result or info.data_dependent or info.random or info.kind == "resize":
            self._stream.run()  # these wait for the stream on CUDA too, or are not worth deferring
            return info.op(*args, **kwargs)
        values, where = self._results(info, args, kwargs)
        if info.kind != "empty":
            # A copy from pageable memory is staged at once; a pinned source is read when its turn comes.
            staged = {id(t): t.clone() for _, t in hosts if not host.is_pinned(t)}
            if staged:
                args = tuple(_staged(staged, value) for value in args)
                kwargs = {name: _staged(staged, value) for name, value in kwargs.items()}
            self._stream.defer(info.op, args, kwargs, where)
        return values


def _staged(staged: dict[int, torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return staged.get(id(value), value)
    return [_staged(staged, v) for v in value] if type(value) in (list, tuple) else value

"""A CPU recorder with the semantics of a CUDA graph.

Capture records op calls and runs none of them. A replay re-issues the recorded calls on the same memory, with the
scalars of the capture. Running the Python function again would be no replay: it would read host values anew and hide
exactly the bugs that a graph has.

Three kinds of memory meet in a capture:

* *private*: returned by a captured op. It belongs to the graph, is full of poison until an op of the replay writes
  it, and is poisoned again where the capture dropped its last tensor (``kits.graphs.memory``).
* *external*: everything else of the device. It is held weakly (``kits.graphs.storages``), and a replay that would
  touch it after it was freed raises ``ReplayError``.
* *host*: refused, but for a zero-dimensional value that a pointwise kernel takes as an argument (captured as it is
  now, like any scalar) and for a non-blocking copy from or to pinned memory. Ops on host tensors alone run at once
  and are not recorded: the CPU of a CUDA machine would run them.

Not reproduced: autotuning, host callbacks, pools shared between graphs, random number offsets (refused as ``random``).
Higher-order ops (``torch.cond``, uncompiled ``flex_attention``) have to be wrapped into a custom op.
"""

from __future__ import annotations

import ctypes
from collections.abc import Container, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils import _python_dispatch

from kits.graphs import host, launches, streams
from kits.graphs.base import Graph, capturing
from kits.graphs.deferring import Arguments, DeferringMode
from kits.graphs.memory import Arena, Block, Lane
from kits.graphs.refusals import function_refusal, op_refusal, refuse
from kits.graphs.replay import Step, Tape
from kits.graphs.schemas import Layout, OpInfo
from kits.graphs.storages import StorageRef

_ATEN = torch.ops.aten


class RecorderGraph(Graph):
    """A graph on the CPU; see the module."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._arena = Arena()
        self._tape: Tape | None = None
        self._recording: Recording | None = None

    @contextmanager
    def capture(self) -> Iterator[RecorderGraph]:
        self._forget()
        self._arena, self._tape = Arena(), None
        recording = Recording(self, self._arena)
        with ExitStack() as stack:
            stack.enter_context(capturing(self))
            stack.enter_context(launches.refused())
            stack.enter_context(host.watched(_refuse_function))
            self._recording = stack.enter_context(recording)
            stack.callback(setattr, self, "_recording", None)
            yield self
        self._tape = recording.finish()
        self.captures += 1

    def replay(self) -> None:
        if self._tape is None:
            raise RuntimeError("this graph holds no capture to replay")
        held = self._lock()
        with torch.no_grad(), torch._C.DisableTorchFunction(), ExitStack() as stack:
            if _python_dispatch._get_current_dispatch_mode_stack():
                # Modes of the caller would see one launch on CUDA, not the kernels in it.
                stack.enter_context(_python_dispatch._disable_current_modes())
            self._arena.poison()
            self._tape.run()
        del held
        self.replays += 1
        streams.flush()

    @contextmanager
    def branch(self, stream: object) -> Iterator[None]:
        """Record what runs in the ``with`` block on a side stream's branch of the capture."""
        assert self._recording is not None
        with self._recording.branch(stream):
            yield

    def join(self, stream: object) -> None:
        """Let what is captured from now on come after a side stream's branch."""
        assert self._recording is not None
        self._recording.join(stream)


def _refuse_function(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    refusal = function_refusal(func, args, kwargs)
    if refusal is not None:
        raise refusal


class Recording(DeferringMode):
    """The dispatch mode of a capture: turns ops into steps."""

    def __init__(self, graph: RecorderGraph, arena: Arena) -> None:
        super().__init__()
        self._graph = graph
        self._arena = arena
        self._lane = Lane()
        self._branches: dict[object, Lane] = {}
        self._infos: list[OpInfo] = []
        self._externals: dict[int, StorageRef] = {}

    def finish(self) -> Tape:
        self._arena.closed = True
        if any(lane.steps for lane in self._branches.values()):
            raise refuse("unjoined_stream", "the capture ended")
        steps: list[Step] = []
        for step in self._lane.steps:
            if isinstance(step, Block):  # dropped here
                steps.append((ctypes.memset, (step.address, step.byte, step.nbytes), {}, None, -1))
            else:
                steps.append(step)
        return Tape(steps, self._infos)

    @contextmanager
    def branch(self, stream: object) -> Iterator[None]:
        outer, self._lane = self._lane, self._branches.setdefault(stream, Lane())
        try:
            yield
        finally:
            self._lane = outer

    def join(self, stream: object) -> None:
        branch = self._branches.get(stream)
        if branch is not None and branch is not self._lane:
            del self._branches[stream]
            self._lane.join(branch)

    def _constant(self, info: OpInfo, value: torch.Tensor) -> torch.Tensor:
        if value.dim() and not host.making_host_tensor():
            raise refuse("host_list", "a tensor built from a list")
        return host.mark_host(value)

    def _new(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        return self._arena.new(layout.dtype, layout.shape, layout.stride, self._lane)

    def _defer(self, info: OpInfo, args: tuple, kwargs: dict[str, Any], tensors: Arguments, hosts: Arguments) -> Any:
        refusal = op_refusal(info, args, kwargs, hosts)
        if refusal is not None:
            raise refusal
        if info.host_result:
            return info.op(*args, **kwargs)
        values, where = self._results(info, args, kwargs)
        if info.kind != "empty":
            index = len(self._infos)
            mine = self._pack(info, args, kwargs, hosts)
            self._lane.steps.append(_direct(info, *mine, where, index) or (info.op, *mine, where, index))
        self._infos.append(info)
        self._graph.ops.append(info.name)
        return values

    def _pack(
        self, info: OpInfo, args: tuple, kwargs: dict[str, Any], hosts: Arguments
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments with each tensor replaced by the graph's own view of its memory."""
        values = {id(t) for _, t in hosts} if hosts and info.base != "copy_" else ()
        packed = [self._own(info, name, value, values) for name, value in zip(info.parameters, args, strict=False)]
        return tuple(packed), {name: self._own(info, name, value, values) for name, value in kwargs.items()}

    def _own(self, info: OpInfo, name: str, value: Any, scalars: Container[int]) -> Any:
        if isinstance(value, torch.Tensor):
            # A host tensor in the place of a scalar is captured by value.
            return value.clone() if id(value) in scalars else self._view(info, name, value)
        return [self._own(info, name, v, scalars) for v in value] if type(value) in (list, tuple) else value

    def _view(self, info: OpInfo, name: str, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        cdata = storage._cdata
        block = self._arena.find(cdata)
        if block is not None:
            return block.view(tensor)
        external = self._externals.get(cdata)
        if external is None:
            external = self._externals[cdata] = StorageRef(storage)
        self._graph._touch(info, name, tensor, external)
        return external.view(tensor)


_FILLS = {"zeros": 0, "zeros_like": 0, "new_zeros": 0, "ones": 1, "ones_like": 1, "new_ones": 1}


def _direct(info: OpInfo, args: tuple, kwargs: dict[str, Any], where: Any, index: int) -> Step | None:
    """The same result written straight to its place, for copies and constants."""
    if not info.aten or type(where) is not torch.Tensor:
        return None
    if info.base in ("clone", "_to_copy"):
        return _ATEN.copy_.default, (where, args[0]), {}, None, index
    if info.base in _FILLS:
        return _ATEN.fill_.Scalar, (where, _FILLS[info.base]), {}, None, index
    return None

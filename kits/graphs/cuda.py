"""The real CUDA graph behind the recorder's interface.

CUDA captures and replays. Beside it an observing mode sees the ops of the capture, so that ``ops``, ``reads`` and
``writes`` mean what they mean on the recorder, and refuses by the recorder's rules what CUDA is about to refuse. What
goes on inside a kernel's op is CUDA's own to judge.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kits.collecting import no_collection
from kits.errors import CaptureError
from kits.graphs import host, launches
from kits.graphs.base import FunctionWatch, Graph, capturing, tensor_arguments
from kits.graphs.refusals import OWN_RULES, RECORDER_RULES, explain_cuda_error, function_refusal, op_refusal
from kits.graphs.schemas import op_info
from kits.graphs.storages import StorageRef

_capture_streams: dict[int, torch.cuda.Stream] = {}
_failed: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed. The allocator may go on asking them about streams, so they must not be freed."""


_asking = False


@contextmanager
def asking_cuda() -> Iterator[None]:
    """Leave it to CUDA itself to refuse, in the ``with`` block: it shows whether our rules are its own."""
    global _asking
    outer, _asking = _asking, True
    try:
        yield
    finally:
        _asking = outer


class CudaGraph(Graph):
    """A ``torch.cuda.CUDAGraph`` that counts, observes and names its errors."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def capture(self) -> Iterator[CudaGraph]:
        self._forget()
        self._graph = None
        observer = _Observer(self)
        with ExitStack() as stack:
            stack.enter_context(capturing(self))
            was = host.split_by_device(True)
            stack.callback(host.split_by_device, was)
            stack.enter_context(torch.cuda.device(self.device))
            stack.enter_context(no_collection())
            graph = stack.enter_context(_captured(observer))
            stack.enter_context(launches.refused())
            stack.enter_context(FunctionWatch(observer.look))
            stack.enter_context(observer)
            yield self
        self._graph = graph
        self.captures += 1

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("this graph holds no capture to replay")
        held = self._lock()
        with torch.cuda.device(self.device):
            self._graph.replay()
        del held
        self.replays += 1


@contextmanager
def _captured(observer: _Observer) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture the ``with`` block on a side stream. Unlike ``torch.cuda.graph`` it collects no garbage, which costs
    75 ms, and empties no cache. Nothing is collected inside the block either: an old graph that dies there frees its
    memory, which invalidates the capture."""
    torch.cuda.synchronize()
    device = torch.cuda.current_device()
    stream = _capture_streams.get(device)
    if stream is None:
        stream = _capture_streams[device] = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    pool = torch.cuda.graph_pool_handle()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool)
        try:
            yield graph
        except BaseException as error:
            try:
                graph.capture_end()
            except RuntimeError:
                _abandon(graph, pool, device)
            _reraise(error, observer)
        try:
            graph.capture_end()
        except RuntimeError as error:
            _abandon(graph, pool, device)
            _reraise(error, observer)
    torch.cuda.current_stream().wait_stream(stream)


def _reraise(error: BaseException, observer: _Observer) -> NoReturn:
    explained = explain_cuda_error(error, observer.noted) if isinstance(error, Exception) else None
    if explained is None or explained is error:
        raise error
    raise explained from error


def _abandon(graph: torch.cuda.CUDAGraph, pool: Any, device: int) -> None:
    """Clean up after a capture that CUDA would not end.

    ``capture_end`` then raises before it has told the allocator, which would go on routing memory to a dead pool, and
    the random generator, which would refuse its next eager number. Another capture, of nothing much, resets that.
    """
    _failed.append(graph)
    with suppress(RuntimeError):  # it was told, in some versions
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)
    with suppress(RuntimeError):
        something = torch.zeros(1, device=torch.device("cuda", device))
        torch.cuda.synchronize()
        healed = torch.cuda.CUDAGraph()
        healed.capture_begin()
        something.zero_()
        healed.capture_end()


class _Observer(TorchDispatchMode):
    """Sees the ops of a capture and lets them run."""

    def __init__(self, graph: CudaGraph) -> None:
        super().__init__()
        self._graph = graph
        self._private: dict[int, StorageWeakRef] = {}
        self._externals: dict[int, StorageRef] = {}
        self.noted: CaptureError | None = None
        """While CUDA is asked: the rule that the last torch function broke, by itself or by an op in it."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or the first op of a process's first capture imports torch._dynamo: 3 to 4 seconds

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # or compiled code would run uncompiled under this mode

    def look(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.noted = None
        refusal = function_refusal(func, args, kwargs)
        if refusal is not None:
            self.refuse(refusal)

    def refuse(self, refusal: CaptureError) -> None:
        if refusal.rule in RECORDER_RULES:
            return
        if not _asking or refusal.rule in OWN_RULES:
            raise refusal
        self.noted = refusal

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        info = op_info(func)
        if info.composite:  # in inference mode nothing decomposes them before us
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        with torch._C.DisableTorchFunction():
            tensors = tensor_arguments(info, args, kwargs)
            hosts = [pair for pair in tensors if host.is_host(pair[1])]
            if len(hosts) < len(tensors) or (not tensors and "cuda" in str(kwargs.get("device"))):
                refusal = op_refusal(info, args, kwargs, hosts)
                if refusal is not None:
                    self.refuse(refusal)
                if info.kind != "view":
                    self._look(info, tensors)
            with launches.inside_op():
                out = func(*args, **kwargs)
            self._own(out, tensors)
        return out

    def _look(self, info: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in tensors if info.kind != "empty" else ():
            if host.is_host(tensor) and not (info.base == "copy_" and host.is_pinned(tensor)):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._private:
                continue
            external = self._externals.get(storage._cdata)
            if external is None:
                external = self._externals[storage._cdata] = StorageRef(storage)
            self._graph._touch(info, name, tensor, external)
        self._graph.ops.append(info.name)

    def _own(self, out: Any, tensors: list[tuple[str, torch.Tensor]]) -> None:
        """What an op returns in a storage that it was not given was allocated by the capture."""
        given = None
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self._private or storage._cdata in self._externals:
                continue
            if given is None:
                given = {t.untyped_storage()._cdata for _, t in tensors}
            if storage._cdata not in given:
                self._private[storage._cdata] = StorageWeakRef(storage)


class CudaStream:
    """A side stream; see ``kits.graphs.streams``."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def work(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def wait(self, other: Any = None) -> None:
        if other is not None:
            self._stream.wait_stream(other._stream)
        else:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

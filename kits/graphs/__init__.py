"""Graph capture and replay with one contract on CPU and CUDA.

    with device_session(device):
        run_twice_to_warm_up()
        graph = new_graph(device)
        with graph.capture():
            out = forward(static_inputs)
        guard = PointerGuard(graph, {"backend": backend, "batch": batch})
        prepare_replay(batch)      # in place, outside the graph
        guard.check()
        graph.replay()             # fills ``out``

On ``cuda`` this is ``torch.cuda.CUDAGraph``; on ``cpu`` the recorder (``kits.graphs.recorder``), which refuses what
CUDA refuses under the names of ``RULES`` and re-issues the recorded calls on the same memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from kits.graphs.base import Graph, is_capturing
from kits.graphs.guard import PointerGuard
from kits.graphs.host import host_tensor, is_host, is_pinned, to_host
from kits.graphs.recorder import RecorderGraph
from kits.graphs.refusals import RULES, refuse
from kits.graphs.session import current_device, device_session
from kits.graphs.storages import StorageRef, Use
from kits.graphs.streams import CpuStream, CurrentStream, Stream, flush

__all__ = [
    "RULES",
    "Graph",
    "PointerGuard",
    "RecorderGraph",
    "StorageRef",
    "Stream",
    "Use",
    "current_stream",
    "device_session",
    "host_tensor",
    "is_capturing",
    "is_host",
    "is_pinned",
    "new_graph",
    "stream",
    "synchronize",
    "to_host",
    "unobserved",
]


def new_graph(device: torch.device) -> Graph:
    """A graph that holds no capture yet."""
    if device.type == "cuda":
        from kits.graphs.cuda import CudaGraph

        return CudaGraph(device)
    return RecorderGraph(device)


def stream(device: torch.device | None = None) -> Stream:
    """A side stream of ``device`` (by default that of the session); see ``kits.graphs.streams``."""
    device = device or current_device()
    if device.type == "cuda":
        from kits.graphs.cuda import CudaStream

        return CudaStream(device)
    return CpuStream()


def current_stream() -> Stream:
    """The stream that work goes to by itself: ``current_stream().wait(side)`` is ``side.wait()``."""
    return CurrentStream()


def synchronize(device: torch.device | None = None) -> None:
    """Wait for all work of ``device``, that of side streams too."""
    if is_capturing():
        raise refuse("host_read", "synchronize()")
    device = device or current_device()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    else:
        flush()


def unobserved() -> AbstractContextManager[None]:
    """For the suite's own work on results: torch calls in the block go past the host/device split, at full speed."""
    return torch._C.DisableTorchFunction()

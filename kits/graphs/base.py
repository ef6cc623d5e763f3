"""What the recorder and the CUDA graph have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kits.errors import ReplayError
from kits.graphs import host, launches
from kits.graphs.refusals import refuse
from kits.graphs.schemas import OpInfo
from kits.graphs.storages import StorageRef, Use, Uses


class Graph(ABC):
    """Kernels captured once and replayed on the same memory.

    ``captures`` and ``replays`` count what really happened, so that a silent eager run shows. ``ops`` names the
    captured ops in order. ``reads`` and ``writes`` map each external storage that the graph touches, held weakly, to
    the first op that does; memory that the graph allocated itself is in neither.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures = 0
        self.replays = 0
        self.ops: list[str] = []
        self.reads: Uses = {}
        self.writes: Uses = {}

    @abstractmethod
    def capture(self) -> AbstractContextManager[Graph]:
        """Capture what runs in the ``with`` block; ``CaptureError`` where that cannot be replayed.

        A graph can be captured again, which forgets what it held.
        """

    @abstractmethod
    def replay(self) -> None:
        """Run the captured kernels again; ``ReplayError`` where they would touch memory that is gone."""

    def _forget(self) -> None:
        self.ops, self.reads, self.writes = [], {}, {}

    def _touch(self, info: OpInfo, parameter: str, tensor: torch.Tensor, storage: StorageRef) -> None:
        """Note that the op at the end of ``ops`` uses an external storage."""
        if parameter not in info.overwrites and storage not in self.reads:
            self.reads[storage] = Use(len(self.ops), info.name, parameter, tensor.dtype, tuple(tensor.shape))
        if parameter in info.writes and storage not in self.writes:
            self.writes[storage] = Use(len(self.ops), info.name, parameter, tensor.dtype, tuple(tensor.shape))

    def _lock(self) -> list[torch.UntypedStorage]:
        """All external storages, held for the length of a replay; ``ReplayError`` if one is gone."""
        held = []
        for uses, verb in ((self.reads, "reads"), (self.writes, "writes")):
            for storage, use in uses.items():
                living = storage.lock()
                if living is None:
                    what = "resized" if storage.state() == "moved" else "freed"
                    raise ReplayError(f"{use} {verb} memory that was {what} after the capture; keep its tensor alive")
                held.append(living)
        return held


class FunctionWatch(TorchFunctionMode):
    """Shows each torch function to ``watch`` before it runs, as ``host.watched`` does on a CPU."""

    def __init__(self, watch: Callable[[Any, tuple, dict[str, Any]], None]) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        self._watch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


_active: list[Graph] = []


def is_capturing() -> bool:
    """Whether a capture is under way."""
    return bool(_active)


def current_capture() -> Graph | None:
    return _active[-1] if _active else None


@contextmanager
def capturing(graph: Graph) -> Iterator[None]:
    if _active:
        raise refuse("nested_capture", "capture()")
    _active.append(graph)
    try:
        yield
    finally:
        if graph in _active:
            _active.remove(graph)


def abandon_captures() -> None:
    """Forget captures whose ``with`` block was never left."""
    _active.clear()
    launches.allow()
    host.unwatch()


def tensor_arguments(info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """The tensors among an op's arguments, with the names of their parameters."""
    found = []
    for name, value in zip(info.parameters, args, strict=False):
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif type(value) in (list, tuple):
            found += [(name, v) for v in value if isinstance(v, torch.Tensor)]
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor):
            found.append((name, value))
        elif type(value) in (list, tuple):
            found += [(name, v) for v in value if isinstance(v, torch.Tensor)]
    return found

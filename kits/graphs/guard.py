"""The pointer guard: what the host prepares must be what the graph reads.

A graph reads the addresses of its capture. A backend that rebinds ``metadata.kv_indptr`` to a fresh tensor, instead of
copying into the captured one, prepares values that no replay will see, and nothing fails. The guard needs no list of
fields: the graph knows every storage that it reads, and a walk over the objects that took part in the capture finds
every path that named one of them.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kits.errors import PointerError
from kits.graphs.base import Graph
from kits.graphs.storages import StorageRef

_MAX_OBJECTS = 50_000
_MAX_DEPTH = 16
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, slice, type),
    *(types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.GeneratorType),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, torch.UntypedStorage, weakref.ref, Graph),
)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step of a path: an attribute or a key."""

    name: Any
    attribute: bool

    def take(self, holder: Any) -> Any:
        if not self.attribute:
            return holder[self.name]
        values = getattr(holder, "__dict__", None)  # past properties, which may compute something else
        if values is not None and self.name in values:
            return values[self.name]
        return object.__getattribute__(holder, self.name)

    def __str__(self) -> str:
        return f".{self.name}" if self.attribute else f"[{self.name!r}]"


_Path = tuple[_Step, ...]


class PointerGuard:
    """Holds what ``roots`` named when ``graph`` was captured; make it right after the capture.

    ``roots`` maps a name for messages to an object: the backend, the runner, the batch. Dictionaries, lists, tuples,
    dataclasses, ``__dict__`` and ``__slots__`` are walked. Objects are held weakly where Python allows it (a plain
    dict or list it does not: pass the object that has it), so that the guard keeps no tensor alive.
    """

    def __init__(self, graph: Graph, roots: Mapping[str, object]) -> None:
        self._graph = graph
        self._roots: dict[str, Callable[[], Any]] = {name: _hold(root) for name, root in roots.items()}
        by_cdata: dict[int | None, StorageRef] = {storage.cdata: storage for storage in graph.reads}
        self._paths: list[tuple[str, _Path, StorageRef]] = []
        for name, root in roots.items():
            for path, tensor in _walk(root):
                storage = by_cdata.get(_cdata(tensor))
                if storage is not None:
                    self._paths.append((name, path, storage))

    @property
    def paths(self) -> dict[str, StorageRef]:
        """The watched paths, as text, with the storage that each named at the capture."""
        return {name + "".join(map(str, path)): storage for name, path, storage in self._paths}

    def check(self) -> None:
        """Call before a replay, after the host's preparation. All violations come in one ``PointerError``."""
        problems = []
        for storage, use in self._graph.reads.items():
            state = storage.state()
            if state != "alive":
                named = [p for p, s in self.paths.items() if s == storage]
                where = f"{', '.join(named)}: " if named else ""
                problems.append(f"pointer_{state}: {where}{use} reads a storage that was {state} after the capture")
        for name, path, storage in self._paths:
            tensor = self._resolve(name, path)
            if tensor is None or storage.holds(tensor):
                continue
            use = self._graph.reads[storage]
            problems.append(
                f"pointer_rebound: {name}{''.join(map(str, path))} (field {path[-1].name if path else name}): {use} "
                "reads the storage it named at the capture, but it names another now: copy into it, do not rebind it"
            )
        if problems:
            raise PointerError("\n".join(problems))

    def _resolve(self, name: str, path: _Path) -> torch.Tensor | None:
        """The tensor at a path, or None: a path that is gone names nothing else, so it is no violation."""
        value = self._roots[name]()
        try:
            for step in path:
                value = step.take(value)
        except (AttributeError, KeyError, IndexError, TypeError):
            return None
        return value if isinstance(value, torch.Tensor) else None


def _hold(root: object) -> Callable[[], Any]:
    try:
        return weakref.ref(root)
    except TypeError:
        return lambda: root


def _cdata(tensor: torch.Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


def _walk(root: object) -> Iterator[tuple[_Path, torch.Tensor]]:
    """Every tensor that can be reached from ``root``, breadth first, each object once, each tensor by every path."""
    seen: dict[int, object] = {}
    queue: deque[tuple[_Path, object]] = deque([((), root)])
    while queue and len(seen) < _MAX_OBJECTS:
        path, value = queue.popleft()
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        if isinstance(value, _LEAVES) or id(value) in seen or len(path) > _MAX_DEPTH:
            continue
        seen[id(value)] = value
        for step, part in _parts(value):
            queue.append(((*path, step), part))


def _parts(value: Any) -> Iterator[tuple[_Step, Any]]:
    if isinstance(value, Mapping):
        for key in list(value):
            if isinstance(key, (str, int, float, bool, tuple, type(None))):
                yield _Step(key, False), value[key]
        if type(value) is dict:
            return
    elif isinstance(value, (list, tuple, deque)):
        for index, part in enumerate(value):
            if not isinstance(part, (int, float, str)):
                yield _Step(index, False), part
    values = getattr(value, "__dict__", None)
    if isinstance(values, dict):
        for name, part in list(values.items()):
            yield _Step(name, True), part
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                name = f"_{owner.__name__.lstrip('_')}{name}"
            try:
                yield _Step(name, True), object.__getattribute__(value, name)
            except AttributeError:
                continue

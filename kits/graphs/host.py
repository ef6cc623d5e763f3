"""The line between host and device, drawn where torch sees none: on a CPU.

On CUDA a tensor of the host says so by its device. On the CPU every tensor does, so host tensors are registered
(weakly), and a function mode keeps the register as CUDA would:

* Made without a device, or with the literal ``"cpu"``: of the host. With a ``torch.device`` object: of the device.
  Code that means the host writes ``"cpu"``, code that means the device passes its device on, on both machines.
* ``.cpu()`` and ``.to("cpu")`` of a device tensor *copy*, so that a stale host mirror stays stale.
  ``.to(device)`` of a host tensor uploads a copy.
* What is computed from host tensors alone is of the host; what is computed from both is of the device.
* ``pin_memory()`` and ``pin_memory=True`` mark a host tensor as pinned.

Tensors made outside of a session, or by means that no mode sees (legacy constructors), count as of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack


class _Register:
    """Storages of the host, by ``_cdata``. A weak reference keeps its ``_cdata`` from being given to another storage,
    so a dead entry can never answer for a living storage."""

    def __init__(self) -> None:
        self.entries: dict[int, tuple[StorageWeakRef, bool]] = {}
        self._limit = 256

    def add(self, tensor: torch.Tensor, pinned: bool) -> None:
        storage = tensor.untyped_storage()
        if len(self.entries) >= self._limit:
            self.entries = {c: e for c, e in self.entries.items() if not e[0].expired()}
            self._limit = max(256, 2 * len(self.entries))
        self.entries[storage._cdata] = StorageWeakRef(storage), pinned

    def remove(self, tensor: torch.Tensor) -> None:
        self.entries.pop(tensor.untyped_storage()._cdata, None)

    def find(self, tensor: torch.Tensor) -> tuple[StorageWeakRef, bool] | None:
        return self.entries.get(tensor.untyped_storage()._cdata)


_register = _Register()
_real_device = False  # a CUDA session: a CPU tensor is of the host
_watch: Callable[[Any, tuple, dict[str, Any]], None] | None = None  # of a capture: sees each torch function first
_making: list[bool] = []  # True while a host tensor is being made, for dispatch modes, which see a device either way


def split_by_device(real: bool) -> bool:
    """Let the tensors' own device tell host from device (a CUDA session), or the register. Returns what it was."""
    global _real_device
    was, _real_device = _real_device, real
    return was


@contextmanager
def watched(watch: Callable[[Any, tuple, dict[str, Any]], None]) -> Iterator[None]:
    """Show each torch function to ``watch`` before it runs.

    Meanwhile a dispatch mode keeps the register of what ops return. A ``HostSplit`` does both, since a function mode
    more would cost microseconds at every call.
    """
    global _watch
    outer, _watch = _watch, watch
    try:
        if split_active():
            yield
        else:
            with HostSplit():
                yield
    finally:
        _watch = outer


def unwatch() -> None:
    """Forget a watch whose ``with`` block was never left."""
    global _watch
    _watch = None


def is_host(tensor: torch.Tensor) -> bool:
    """Whether the host owns ``tensor``."""
    if tensor.device.type != "cpu":
        return False
    return _real_device or _register.find(tensor) is not None


def hosts_among(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Those of some named tensors that the host owns."""
    if _real_device:
        return [pair for pair in tensors if pair[1].device.type == "cpu"]
    return [pair for pair in tensors if pair[1].untyped_storage()._cdata in _register.entries]


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a pinned tensor of the host."""
    if _real_device:
        return tensor.is_pinned()
    entry = _register.find(tensor)
    return entry is not None and entry[1]


def making_host_tensor() -> bool:
    return bool(_making)


@contextmanager
def host_made() -> Iterator[None]:
    _making.append(True)
    try:
        yield
    finally:
        _making.pop()


def mark_host(tensor: torch.Tensor, pinned: bool = False) -> torch.Tensor:
    """Register a CPU tensor as one of the host."""
    _register.add(tensor, pinned)
    return tensor


def mark_all_host(value: Any) -> Any:
    for tensor in _tensors(value):
        if tensor.device.type == "cpu" and _register.find(tensor) is None:
            _register.add(tensor, False)
    return value


def host_tensor(data: Any, dtype: torch.dtype | None = None, pinned: bool = False) -> torch.Tensor:
    """A tensor of the host made from Python values."""
    with torch._C.DisableTorchFunction(), host_made():
        if _real_device:
            return torch.tensor(data, dtype=dtype, device="cpu", pin_memory=pinned)
        return mark_host(torch.tensor(data, dtype=dtype, device="cpu"), pinned)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A host copy of ``tensor``: a read by the host, which waits for the device and which a capture refuses."""
    out = tensor.detach().cpu()
    if out.untyped_storage()._cdata == tensor.untyped_storage()._cdata:
        out = out.clone()
    return out if _real_device else mark_host(out)


def split_active() -> bool:
    """Whether a ``HostSplit`` keeps the register now."""
    return any(isinstance(mode, HostSplit) for mode in _get_current_function_mode_stack())


def targets_host(args: Iterable[Any], kwargs: dict[str, Any]) -> bool | None:
    """Where the arguments of a call point: True to the host, False to the device, None if they name no place."""
    for value in (*args, kwargs.get("device"), kwargs.get("other")):
        if isinstance(value, (str, torch.device)):
            named = torch.device(value).type == "cpu"
            if _real_device:
                return named
            return isinstance(value, str) if named else None
        if isinstance(value, torch.Tensor):
            return is_host(value)
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            if isinstance(part, torch.Tensor):
                yield part


def _all_host(values: Iterable[Any]) -> bool:
    """Whether there are tensors among ``values``, and all of them are of the host."""
    entries, found = _register.entries, False
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.untyped_storage()._cdata not in entries:
                return False
            found = True
        elif type(value) in (list, tuple) and any(isinstance(part, torch.Tensor) for part in value):
            if not _all_host(part for part in value if isinstance(part, torch.Tensor)):
                return False
            found = True
    return found


class HostSplit(TorchFunctionMode):
    """Keeps the register of host tensors; see the module. It adds 1-3 us to a torch call and sees no op."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if _watch is not None:
            _watch(func, args, kwargs or {})
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        out = func(*args, **kwargs) if kwargs else func(*args)
        if (
            _watch is None
            and isinstance(out, (torch.Tensor, tuple, list))
            and _all_host((*args, *kwargs.values()) if kwargs else args)
        ):
            mark_all_host(out)
        return out


def _make(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Factories: of the host unless they name a device; those that start from a tensor follow it."""
    pinned = bool(kwargs.get("pin_memory"))
    if pinned:
        kwargs = {**kwargs, "pin_memory": False}
    if kwargs.get("device") is not None:
        host = targets_host((), kwargs)
    elif func in _FOLLOWING and args and isinstance(args[0], torch.Tensor):
        host = _register.find(args[0]) is not None
    else:
        host = True
    if not host:
        return func(*args, **kwargs)
    with host_made():
        out = func(*args, **kwargs)
    return mark_host(out, pinned) if out.device.type == "cpu" else out


def _wrap(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Factories that may return the memory they are given; on the device it is a copy."""
    if args and isinstance(args[0], torch.Tensor):
        return _to(torch.Tensor.to, args[:1], kwargs) if kwargs else args[0]
    if kwargs.get("device") is not None and not targets_host((), kwargs):
        return func(*args, **kwargs).clone()
    with host_made():
        return mark_host(func(*args, **kwargs))


def _cpu(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.device.type != "cpu" or _register.find(tensor) is not None:
        return func(*args, **kwargs)
    with host_made():
        return mark_host(tensor.clone())


def _to(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    host = targets_host(args[1:], kwargs)
    from_host = _register.find(tensor) is not None
    if tensor.device.type != "cpu" or host is None or host == from_host:
        out = func(*args, **kwargs)
        return mark_all_host(out) if from_host else out
    if host:
        with host_made():
            out = func(*args, **kwargs)
            return mark_host(out.clone() if out.untyped_storage()._cdata == tensor.untyped_storage()._cdata else out)
    # An upload: memory of the device, then a copy into it, which a capture judges by itself.
    like = torch.empty_like(tensor)
    dtype = next((a for a in (*args[1:], kwargs.get("dtype")) if isinstance(a, torch.dtype)), tensor.dtype)
    other = next((a for a in (*args[1:], kwargs.get("other")) if isinstance(a, torch.Tensor)), None)
    out = torch.empty_strided(
        like.shape, like.stride(), dtype=dtype if other is None else other.dtype, device=tensor.device
    )
    non_blocking = kwargs.get("non_blocking", any(a is True for a in args[1:]))
    return out.copy_(tensor, non_blocking=non_blocking)


def _pin(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return args[0] if is_pinned(args[0]) else mark_host(args[0].clone(), pinned=True)


def _is_pinned(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    return is_pinned(args[0])


_FACTORIES = (
    *(torch.empty, torch.empty_strided, torch.empty_permuted, torch.zeros, torch.ones, torch.full, torch.scalar_tensor),
    *(torch.arange, torch.linspace, torch.logspace, torch.eye, torch.tril_indices, torch.triu_indices),
    *(torch.rand, torch.randn, torch.randint, torch.randperm),
)
_FOLLOWING = {
    torch.tensor,
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.rand_like, torch.randn_like, torch.randint_like),
    *(torch.Tensor.new_empty, torch.Tensor.new_empty_strided, torch.Tensor.new_tensor),
    *(torch.Tensor.new_full, torch.Tensor.new_ones, torch.Tensor.new_zeros),
}

_HANDLERS: dict[Any, Callable[[Any, tuple, dict[str, Any]], Any]] = {
    **dict.fromkeys((*_FACTORIES, *_FOLLOWING), _make),
    **dict.fromkeys((torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer), _wrap),
    torch.Tensor.cpu: _cpu,
    torch.Tensor.to: _to,
    torch.Tensor.pin_memory: _pin,
    torch.Tensor.is_pinned: _is_pinned,
}

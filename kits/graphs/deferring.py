"""The dispatch mode that takes ops in without running them: what a capture and a side stream's work share."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from kits.graphs import host
from kits.graphs.base import tensor_arguments
from kits.graphs.refusals import refuse
from kits.graphs.schemas import Layout, OpInfo, op_info, result_layouts

Arguments = list[tuple[str, torch.Tensor]]


class DeferringMode(TorchDispatchMode):
    """Ops on metadata run at once, and so do ops on host tensors alone. All others go to ``_defer``."""

    supports_higher_order_operators = True  # to refuse them by name

    def __exit__(self, *error: Any) -> None:
        if any(mode is self for mode in _get_current_dispatch_mode_stack()):  # a session may have removed it
            super().__exit__(*error)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # or torch wraps __torch_dispatch__ once more, which costs microseconds an op

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if not isinstance(func, OpOverload):
            raise refuse("unsupported_op", f"higher-order op {func}, which needs a custom op around it")
        with torch._C.DisableTorchFunction():
            return self._dispatch(op_info(func), args, kwargs or {})

    def _dispatch(self, info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> Any:
        if info.composite:  # seen in inference mode only, where nothing decomposes them before us
            with self:
                out = info.op.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if info.kind == "view":
            return info.op(*args, **kwargs)
        tensors = tensor_arguments(info, args, kwargs)
        if info.kind == "constant":
            return self._constant(info, info.op(*args, **kwargs))
        hosts = host.hosts_among(tensors)
        all_host = len(hosts) == len(tensors)
        if host.making_host_tensor():
            at_once = all_host or not info.host_result
        else:
            at_once = all_host and bool(hosts) and info.aten
        if at_once:
            return host.mark_all_host(info.op(*args, **kwargs))
        return self._defer(info, args, kwargs, tensors, hosts)

    @abstractmethod
    def _constant(self, info: OpInfo, value: torch.Tensor) -> torch.Tensor:
        """``value`` was just made from Python values by torch itself: by ``torch.tensor``, or for ``x[i] = 1.0``."""

    @abstractmethod
    def _defer(self, info: OpInfo, args: tuple, kwargs: dict[str, Any], tensors: Arguments, hosts: Arguments) -> Any:
        """Take the op in, and return what it would return. ``hosts`` are those of ``tensors`` that the host owns."""

    @abstractmethod
    def _new(self, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Poisoned memory for a new result: the tensor for the caller, and the one to store the result in."""

    def _results(self, info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """What the caller gets, and where the new tensors among it are stored, in the same shape (None: nowhere)."""
        layouts = result_layouts(info, args, kwargs)
        values: list[Any] = []
        stores: list[Any] = []
        for position, source in enumerate(info.returns):
            value: Any = None
            store: Any = None
            if source is not None:  # an argument itself
                value = kwargs[source] if source in kwargs else args[info.parameters.index(source)]
            elif type(layout := layouts[position]) is Layout:
                value, store = self._new(layout)
            elif type(layout) is list:
                pairs = [self._new(part) for part in layout]
                value, store = [v for v, _ in pairs], [s for _, s in pairs]
            else:
                value = layout
            values.append(value)
            stores.append(store)
        if info.single:
            return values[0], stores[0]
        return (tuple(values) or None), (stores if any(s is not None for s in stores) else None)


def store(where: Any, result: Any) -> None:
    """Copy new results to where ``_results`` said."""
    if isinstance(where, torch.Tensor):
        where.copy_(result)
    elif where is not None:
        for one, value in zip(where, result, strict=True):
            store(one, value)


def flat(where: Any, result: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The same pairs as ``store`` copies, as a list."""
    if isinstance(where, torch.Tensor):
        return [(where, result)]
    if where is None:
        return []
    return [pair for one, value in zip(where, result, strict=True) for pair in flat(one, value)]

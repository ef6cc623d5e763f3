"""What a CUDA graph capture refuses, as one rulebook for the recorder and for the real graph.

The rules are raised at the call that breaks them, on both machines, before the call: a capture that CUDA has refused
cannot be told from one that something else spoiled. That CUDA refuses the same is tested by asking it
(``kits.graphs.cuda.asking_cuda``); its own errors are put into these words by ``explain_cuda_error``.

Rules see a call at two levels, since neither shows everything: the Python function (``tolist`` and ``numpy`` reach no
dispatcher, a list index arrives there as a tensor) and the op (what a composite function does inside).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kits.errors import CaptureError
from kits.graphs.host import is_host, is_pinned, targets_host
from kits.graphs.schemas import OpInfo, data_dependent

RULES = {
    "host_read": "the host reads a value of the device: it has none while kernels are recorded, and would never "
    "read it again in a replay",
    "host_list": "a tensor built from host values is copied from pageable memory",
    "boolean_mask": "a boolean index has as many results as the mask has True, which only the data know",
    "data_dependent_shape": "the shape of a result depends on data",
    "pageable_copy": "a copy between the device and host memory that is not pinned",
    "blocking_copy": "a copy from or to pinned memory that waits for its end; pass non_blocking=True",
    "host_tensor_read": "a kernel reads a tensor of the host",
    "raw_triton_launch": "a Triton kernel is launched outside of a custom op, where no dispatcher sees what it reads",
    "random": "a random number: the offsets of the generator are not reproduced, so no two runs compare",
    "unjoined_stream": "work of a side stream that the captured stream never waits for",
    "nested_capture": "a capture within a capture",
    "resize": "a tensor is resized, so that its memory moves",
    "not_permitted": "CUDA refused, and no call outside of its kernels breaks a rule: a kernel's library waited for "
    "the device, or memory was given back",
    "no_fake_kernel": "an op without a fake kernel, so that its result is not known before it runs",
    "unsupported_op": "an op that the recorder cannot replay",
}
"""Stable names, used as ``CaptureError.rule``. They are CUDA's, but for those of the next two sets."""

OWN_RULES = frozenset({"raw_triton_launch", "random", "resize"})
"""CUDA itself would take these: it launches anything, its generators are graph-safe, and a graph keeps the address that
a resized tensor had."""

RECORDER_RULES = frozenset({"no_fake_kernel", "unsupported_op"})
"""What the recorder cannot do; not raised on CUDA."""


def refuse(rule: str, what: str) -> CaptureError:
    return CaptureError(rule, f"{what}: {RULES[rule]}")


# Python functions


def _on_device(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not is_host(value)


def _host_read(func: Any, args: tuple, kwargs: dict[str, Any]) -> CaptureError | None:
    if args and _on_device(args[0]):
        return refuse("host_read", f"Tensor.{func.__name__}()")
    return None


def _to(func: Any, args: tuple, kwargs: dict[str, Any]) -> CaptureError | None:
    target = targets_host(args[1:], kwargs)
    if target is None or not args:
        return None
    if target and _on_device(args[0]):
        return refuse("host_read", "Tensor.to() to the host")
    if not target and not _on_device(args[0]):
        return _copy(args[0], kwargs.get("non_blocking", False), "Tensor.to() from the host")
    return None


def _copy(host: torch.Tensor, non_blocking: bool, what: str) -> CaptureError | None:
    if not is_pinned(host):
        return refuse("pageable_copy", what)
    return None if non_blocking else refuse("blocking_copy", what)


def _from_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> CaptureError | None:
    """``torch.tensor`` and its like. A scalar that stays on the host is allowed, as on CUDA: it is a host value."""
    values = args[-1] if args else kwargs.get("data")
    if isinstance(values, torch.Tensor):
        read = _on_device(values) and func is not torch.Tensor.new_tensor and targets_host(args[1:], kwargs)
        return refuse("host_read", f"{func.__name__}() of a device tensor") if read else None
    scalar = isinstance(values, (bool, int, float, complex))
    stays = targets_host(args[1:], kwargs) is not False and func is not torch.Tensor.new_tensor
    return None if scalar and stays else refuse("host_list", f"{func.__name__}()")


def _index(func: Any, args: tuple, kwargs: dict[str, Any]) -> CaptureError | None:
    if not _on_device(args[0]):
        return None
    for index in args[1] if isinstance(args[1], tuple) else (args[1],):
        if isinstance(index, torch.Tensor):
            if is_host(index):
                if index.dim():
                    return refuse("host_tensor_read", "indexing with a tensor of the host")
            elif index.dtype in (torch.bool, torch.uint8):
                if func is not torch.Tensor.__setitem__ or _on_device(args[2]):
                    return refuse("boolean_mask", f"{func.__name__} with a boolean mask")
            elif not index.dim():
                return refuse("host_read", "indexing with a single value of the device, which the host reads first")
        elif not (index is None or isinstance(index, (int, slice, type(...))) or _is_number(index)):
            return refuse("host_list", f"indexing with a {type(index).__name__}")
    return None


def _is_number(value: Any) -> bool:
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)  # an array of numpy has it too


_T = torch.Tensor
_FUNCTIONS: dict[Any, Callable[[Any, tuple, dict[str, Any]], CaptureError | None]] = {
    **dict.fromkeys(
        (
            _T.item,
            _T.tolist,
            _T.numpy,
            _T.cpu,
            _T.__bool__,
            _T.__int__,
            _T.__float__,
            _T.__complex__,
            _T.__index__,
            _T.__array__,
            _T.__repr__,
            _T.__format__,
            _T.__contains__,
        ),
        _host_read,
    ),
    **dict.fromkeys((torch.tensor, torch.as_tensor, torch.asarray, _T.new_tensor), _from_values),
    **dict.fromkeys((_T.__getitem__, _T.__setitem__), _index),
    _T.to: _to,
}


def function_refusal(func: Any, args: tuple, kwargs: dict[str, Any]) -> CaptureError | None:
    """The rule that a call of a torch function breaks during a capture, if any."""
    check = _FUNCTIONS.get(func)
    return check(func, args, kwargs) if check is not None else None


# Ops

_METADATA_QUERIES = {"is_same_size", "is_set_to", "is_pinned", "_has_compatible_shallow_copy_type", "_fused_sdp_choice"}


def op_refusal(
    info: OpInfo, args: tuple, kwargs: dict[str, Any], hosts: list[tuple[str, torch.Tensor]]
) -> CaptureError | None:
    """The rule that an op breaks during a capture, if any; ``hosts`` are those of its arguments that the host owns."""
    if info.host_result:
        return None if info.base in _METADATA_QUERIES else refuse("host_read", info.name)
    if info.random and _argument(info, args, kwargs, "dropout_p", 1.0) != 0.0:
        return refuse("random", info.name)
    if info.kind in ("resize", "unsupported_op"):
        return refuse(info.kind, info.name)
    if info.aten and info.base in ("index", "index_put", "index_put_", "_index_put_impl_"):
        return _indexing_op(info, args, kwargs, hosts)
    if info.data_dependent and _argument(info, args, kwargs, "output_size", None) is None:
        return data_dependent(info)
    if hosts:
        return _host_operands(info, args, kwargs, hosts)
    return None


def _argument(info: OpInfo, args: tuple, kwargs: dict[str, Any], name: str, missing: Any) -> Any:
    """The value of a parameter: given, else the schema's default, else ``missing`` where there is no such parameter."""
    if name in kwargs:
        return kwargs[name]
    if name not in info.parameters:
        return missing
    position = info.parameters.index(name)
    return args[position] if position < len(args) else info.op._schema.arguments[position].default_value


def _indexing_op(
    info: OpInfo, args: tuple, kwargs: dict[str, Any], hosts: list[tuple[str, torch.Tensor]]
) -> CaptureError | None:
    masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if any(name != "values" for name, _ in hosts):
        return refuse("host_tensor_read", f"{info.name} with an index of the host")
    if masks:
        # A mask with one host value is a masked_fill; anything else first finds where the mask is True.
        alone = len(masks) == sum(i is not None for i in args[1]) == 1
        fills = info.base != "index" and bool(hosts) and hosts[0][1].numel() == 1
        accumulates = _argument(info, args, kwargs, "accumulate", False)
        return None if alone and fills and not accumulates else refuse("boolean_mask", info.name)
    return refuse("pageable_copy", f"{info.name} of a host value at an index tensor") if hosts else None


def _host_operands(
    info: OpInfo, args: tuple, kwargs: dict[str, Any], hosts: list[tuple[str, torch.Tensor]]
) -> CaptureError | None:
    name, tensor = hosts[0]
    if info.aten and info.base == "copy_":
        if name == "self" and not is_pinned(tensor):
            return refuse("host_read", f"{info.name} into a tensor of the host")
        return _copy(tensor, _argument(info, args, kwargs, "non_blocking", False), info.name)
    for name, tensor in hosts:
        takes_scalar = info.pointwise or info.base in ("fill_", "fill", "masked_fill", "masked_fill_")
        if tensor.dim() or not (info.aten and takes_scalar) or name in info.writes:
            return refuse("host_tensor_read", f"{info.name} argument {name}")
    return None


# CUDA's own words

_CUDA_TEXTS = (
    (
        "unless the cpu tensor is pinned",
        ("host_list", "host_read", "host_tensor_read", "pageable_copy", "data_dependent_shape"),
        "pageable_copy",
    ),
    ("on the same device", ("host_tensor_read",), "host_tensor_read"),
    ("unjoined", ("unjoined_stream",), "unjoined_stream"),
    ("philox", ("random",), "random"),
    ("offset increment outside graph capture", ("random",), "random"),
    ("when stream is capturing", (), "not_permitted"),
    ("streamcapture", (), "not_permitted"),
    ("error during capture", (), "not_permitted"),
    ("during capture", (), "not_permitted"),
    ("capturing", (), "not_permitted"),
)


def explain_cuda_error(error: BaseException, noted: CaptureError | None) -> CaptureError | None:
    """The ``CaptureError`` for an error that CUDA raised in a capture, or None if it has nothing to do with capture.

    ``noted`` is the rule that the last call broke, where CUDA was asked; it is believed where it fits CUDA's words.
    """
    if isinstance(error, CaptureError):
        return error
    text = str(error).lower()
    for words, fitting, default in _CUDA_TEXTS:
        if words in text:
            if noted is not None and (not fitting or noted.rule in fitting):
                return CaptureError(noted.rule, f"{str(noted).split(': ', 1)[1]} (CUDA: {_first_line(error)})")
            return refuse(default, f"CUDA: {_first_line(error)}")
    return None


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]

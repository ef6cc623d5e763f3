"""What an op does, read from its schema, and what it returns, computed without running it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch._ops import OpOverload

from kits.errors import CaptureError

Kind = Literal["compute", "empty", "view", "constant", "resize", "unsupported_op"]
"""``view``: touches metadata only. ``constant``: wraps a value that came from the host. ``empty``: allocates only.
``unsupported_op``: writes to one argument and returns a view of another."""

# Ops whose result lies in their argument, although the schema does not say so.
_VIEWS = {"_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "lift", "set_"}
_RESIZES = {"resize_", "resize_as_", "resize", "_resize_output_", "resize_as_sparse_"}
_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"}
_OVERWRITES = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}


@dataclass(frozen=True, slots=True)
class OpInfo:
    """An op as the recorder sees it."""

    op: OpOverload
    name: str
    base: str
    aten: bool
    kind: Kind
    parameters: tuple[str, ...]
    writes: frozenset[str]
    overwrites: frozenset[str]
    """The subset of ``writes`` that is not read first."""
    outs: tuple[str, ...]
    """Arguments in the place of a result, as in ``torch.add(a, b, out=c)``."""
    returns: tuple[str | None, ...]
    """For each return value the argument that it is, or None for a new one."""
    single: bool
    makes: bool
    """Returns something that is no argument."""
    pointwise: bool
    random: bool
    data_dependent: bool
    composite: bool
    host_result: bool
    """Returns no tensor but a number or a truth value, which needs the data on the host."""


@functools.cache
def op_info(op: OpOverload) -> OpInfo:
    schema = op._schema
    namespace, base = schema.name.split("::")
    aten = namespace in ("aten", "prims")
    written = {a.name: a.alias_info for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    returns: list[str | None] = []
    aliases = False
    for value in schema.returns:
        source = None
        if value.alias_info is not None:
            if value.alias_info.is_write:
                marks = value.alias_info.before_set
                source = next(name for name, alias in written.items() if alias.before_set == marks)
            else:
                aliases = True
        returns.append(source)
    kind: Kind = "compute"
    if aten and base in _RESIZES:
        kind = "resize"
    elif aten and base == "lift_fresh":
        kind = "constant"
    elif (aten and base in _VIEWS) or (aliases and not written) or torch.Tag.inplace_view in op.tags:
        kind = "view"
    elif aten and base in _EMPTY and not written:
        kind = "empty"
    elif aliases:
        kind = "unsupported_op"
    tensors = {"Tensor", "Optional[Tensor]", "List[Tensor]"}
    overload = f".{op._overloadname}" if op._overloadname != "default" else ""
    return OpInfo(
        op=op,
        name=f"{namespace}::{base}{overload}",
        base=base,
        aten=aten,
        kind=kind,
        parameters=tuple(a.name for a in schema.arguments),
        writes=frozenset(written),
        overwrites=frozenset(
            a.name for a in schema.arguments if a.name in written and (a.is_out or (aten and base in _OVERWRITES))
        ),
        outs=tuple(a.name for a in schema.arguments if a.is_out),
        returns=tuple(returns),
        makes=any(source is None for source in returns),
        single=len(returns) == 1,
        pointwise=torch.Tag.pointwise in op.tags,
        random=torch.Tag.nondeterministic_seeded in op.tags,
        data_dependent=torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags,
        composite=op._can_decompose(),
        host_result=bool(returns) and not any(str(r.type) in tensors for r in schema.returns),
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """Dtype, shape and strides of a tensor that an op would return."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


_cache: dict[tuple, tuple] = {}
_CACHE_LIMIT = 20_000
_fake_mode: Any = None


def result_layouts(info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> tuple:
    """What ``info.op`` returns, one entry per return value: a ``Layout``, a list of them, or a plain value.

    A custom op is asked through its fake kernel. Torch's own ops run on zeros of the arguments' layouts: exact, and
    some hundred times faster than their fake kernels, which are Python and pull in seconds of imports. Both once per
    layouts and other arguments.
    """
    if not info.makes and not info.outs:
        return ()
    try:
        key = (info.op, *map(_signature, args), *((k, _signature(v)) for k, v in kwargs.items()))
        known = _cache.get(key)
    except TypeError:  # an argument that cannot be hashed
        return _ask(info, args, kwargs)
    if known is None:
        if len(_cache) >= _CACHE_LIMIT:
            _cache.clear()
        known = _cache[key] = _ask(info, args, kwargs)
    return known


def _signature(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if type(value) in (list, tuple):
        return tuple(map(_signature, value))
    return type(value), value  # 1, 1.0 and True are equal but not the same argument


def _ask(info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> tuple:
    out: Any = None
    if info.aten:
        try:
            out = _run_on_zeros(info, args, kwargs)
        except CaptureError:
            raise
        except Exception:  # zeros are no values for this op, or the call is wrong: the fake kernel says which
            out = None
    if out is None:
        out = _run_on_meta(info, args, kwargs)
    return tuple(map(_layout, out)) if isinstance(out, tuple) else (_layout(out),)


def _layout(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Layout(value.dtype, tuple(value.shape), value.stride())
    return [_layout(v) for v in value] if isinstance(value, list) else value


def _run_on_zeros(info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> Any:
    zeros = [_convert(_zeros, a) for a in args], {k: _convert(_zeros, v) for k, v in kwargs.items()}
    out = info.op(*zeros[0], **zeros[1])
    for name in info.outs:
        if isinstance(kwargs[name], torch.Tensor) and zeros[1][name].shape != kwargs[name].shape:
            raise CaptureError(
                "resize", f"{info.name} resizes out={tuple(kwargs[name].shape)}: give it its final shape"
            )
    return out


def _run_on_meta(info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> Any:
    if "device" in info.parameters:
        kwargs = {**kwargs, "device": torch.device("meta")}
    try:
        return info.op(*(_convert(_meta, a) for a in args), **{k: _convert(_meta, v) for k, v in kwargs.items()})
    except NotImplementedError:
        return _run_fake(info, args, kwargs)
    except RuntimeError as error:
        if "get_ctx()" in str(error):  # the fake kernel asked for a size that only data can tell
            raise data_dependent(info) from error
        raise


def _convert(convert: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return convert(value)
    return [_convert(convert, v) for v in value] if type(value) in (list, tuple) else value


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    shape, stride = tensor.shape, tensor.stride()
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if tensor.numel() else 0
    return torch.zeros(extent, dtype=tensor.dtype).as_strided(shape, stride)


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def data_dependent(info: OpInfo) -> CaptureError:
    return CaptureError("data_dependent_shape", f"{info.name} returns a tensor whose shape depends on data")


def _run_fake(info: OpInfo, args: tuple, kwargs: dict[str, Any]) -> Any:
    """For ops that have a fake kernel but no meta kernel."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    global _fake_mode
    if _fake_mode is None:
        _fake_mode = FakeTensorMode()

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return _fake_mode.from_tensor(tensor.detach())

    fake_args, fake_kwargs = [_convert(fake, a) for a in args], {k: _convert(fake, v) for k, v in kwargs.items()}
    if "device" in info.parameters:
        fake_kwargs["device"] = torch.device("cpu")
    try:
        with _fake_mode:
            return info.op(*fake_args, **fake_kwargs)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise data_dependent(info) from error
    except (NotImplementedError, UnsupportedFakeTensorException, UnsupportedOperatorException) as error:
        raise CaptureError(
            "no_fake_kernel",
            f"{info.name} has no fake kernel, so its result is not known before it runs: "
            "register one with torch.library.register_fake",
        ) from error

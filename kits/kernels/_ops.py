"""Registration of the custom operators ``attnmatrix::*``, and the checks that emulations share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kits.errors import KernelFault

# The registrations live as long as this object.
_LIBRARY = torch.library.Library("attnmatrix", "FRAGMENT")


def define(schema: str, *, cpu: Callable[..., Any], cuda: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register ``attnmatrix::name`` and return its overload.

    The plain library interface is used: ``torch.library.custom_op`` costs several times as much per call, and the
    emulations are small. ``schema`` marks every argument that is written with ``(a!)``; returned tensors are fresh.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, cpu, "CPU")
    _LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"attnmatrix::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.attnmatrix, name).default


def fake_none(*_args: Any, **_kwargs: Any) -> None:
    """Shape function of an operator that only writes into its arguments."""


def require_indices(kernel: str, *, packed: bool = False, **tensors: torch.Tensor) -> None:
    """Index arrays must be int32 and lie without gaps where the kernel steps by one; no value is read.

    That is the last dimension; ``packed``: all of them, where a kernel takes a row's stride from the number of columns.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.int32:
            raise TypeError(f"{kernel}: {name} must be int32, not {tensor.dtype}")
        gaps = not tensor.is_contiguous() if packed else tensor.stride(-1) != 1 and tensor.shape[-1] > 1
        if gaps:
            raise ValueError(f"{kernel}: {name} must be contiguous, its strides are {tensor.stride()}")


def offsets(kernel: str, argument: str, tensor: torch.Tensor, rows: int) -> list[int]:
    """The first ``rows + 1`` entries of an offset array, which must start at 0 and never decrease."""
    if tensor.numel() < rows + 1:
        raise KernelFault(kernel, argument, f"has {tensor.numel()} entries; {rows} rows need {rows + 1}")
    values: list[int] = tensor[: rows + 1].tolist()
    if values[0] != 0:
        raise KernelFault(kernel, argument, f"starts at {values[0]}, not at 0")
    for row in range(rows):
        if values[row + 1] < values[row]:
            raise KernelFault(kernel, argument, f"decreases at row {row}: {values[row]} -> {values[row + 1]}")
    return values


def entries(kernel: str, argument: str, tensor: torch.Tensor, rows: int) -> list[int]:
    """The first ``rows`` entries of a per-request array."""
    if tensor.numel() < rows:
        raise KernelFault(kernel, argument, f"has {tensor.numel()} entries; {rows} rows need as many")
    values: list[int] = tensor[:rows].tolist()
    return values


def check_ids(
    kernel: str, argument: str, row: int, ids: Sequence[int], limit: int, what: str = "page", base: int = 0
) -> None:
    """Every id must lie in ``0 .. limit - 1``; the first one that does not is named, entries counted from ``base``."""
    if ids and (min(ids) < 0 or max(ids) >= limit):
        position = next(i for i, value in enumerate(ids) if not 0 <= value < limit)
        raise KernelFault(
            kernel, argument, f"row {row}, entry {base + position}: {what} {ids[position]} is outside 0..{limit - 1}"
        )


def page_slice(
    kernel: str, argument: str, row: int, table: torch.Tensor, page_size: int, pages: int, first: int, stop: int
) -> tuple[torch.Tensor, slice]:
    """The pages with keys ``first .. stop - 1`` of a request, and where in them, laid end to end, those keys lie.

    ``table`` is the request's row of a page table, ``pages`` the number of pages of the cache. Only the entries of
    pages that hold one of these keys are read; a table too narrow for them, or an id outside the cache, is a fault.
    """
    first_page, last_page = first // page_size, (stop - 1) // page_size
    if last_page >= table.shape[0]:
        raise KernelFault(
            kernel,
            argument,
            f"row {row}: {stop} keys need {last_page + 1} pages of {page_size}; it has {table.shape[0]}",
        )
    ids = table[first_page : last_page + 1]
    check_ids(kernel, argument, row, ids.tolist(), pages, base=first_page)
    return ids, slice(first - first_page * page_size, stop - first_page * page_size)

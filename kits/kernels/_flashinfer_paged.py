"""The operator behind FlashInfer's paged decode and prefill wrappers, and its emulation."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakValueDictionary

import torch

from kits.errors import KernelFault
from kits.kernels import _flashinfer_schedule as schedule
from kits.kernels import _ops, provenance
from kits.kernels._attend import attend, causal_window, merge_parts

LOG2_E = math.log2(math.e)
EMPTY_LSE = -5e4
"""The kernels' stand-in for minus infinity: the LSE of a query without a key (measured: about -49998)."""

native_wrappers: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The library's own wrapper objects by handle: an operator takes tensors and numbers, not objects."""


def kv_length(kernel: str, row: int, pages: int, last_page_len: int, page_size: int) -> int:
    """Keys of a request, as the library computes them from its page count and the fill of its last page."""
    if pages == 0:
        return 0
    if not 1 <= last_page_len <= page_size:
        raise KernelFault(kernel, "paged_kv_last_page_len", f"row {row}: {last_page_len} of a page of {page_size}")
    return (pages - 1) * page_size + last_page_len


def segment_packbits(mask: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack segments of ``sizes`` booleans, each from a byte of its own, least significant bit first.

    Returns the packed bytes (uint8) and the first byte of each segment and the end (int32, segments + 1), on the
    device of ``mask``. The library's function of this name takes offsets instead of sizes.
    """
    if sum(sizes) > mask.numel():
        raise KernelFault("segment_packbits", "custom_mask", f"has {mask.numel()} entries; {sum(sizes)} are needed")
    padded = [-(-size // 8) * 8 for size in sizes]
    bits = torch.zeros(sum(padded), dtype=torch.int32, device=mask.device)
    source = target = 0
    starts = [0]
    flat = mask.flatten()
    for size, room in zip(sizes, padded, strict=True):
        bits[target : target + size] = flat[source : source + size].int()
        source, target = source + size, target + room
        starts.append(target // 8)
    weights = 1 << torch.arange(8, dtype=torch.int32, device=mask.device)
    packed = (bits.view(-1, 8) * weights).sum(dim=1).to(torch.uint8)
    return packed, torch.tensor(starts, dtype=torch.int32, device=mask.device)


def unpack_mask(kernel: str, row: int, packed: torch.Tensor, start: int, queries: int, keys: int) -> torch.Tensor:
    """Bits (queries, keys) of one request: row-major, least significant bit first, from byte ``start`` on."""
    size = -(-queries * keys // 8)
    if start < 0 or start + size > packed.numel():
        raise KernelFault(
            kernel, "custom_mask", f"row {row} reads bytes {start}..{start + size - 1} of {packed.numel()}"
        )
    octets = packed[start : start + size].int().unsqueeze(1)
    bits = (octets >> torch.arange(8, dtype=torch.int32, device=packed.device)) & 1
    return bits.flatten()[: queries * keys].view(queries, keys).bool()


def _emulate(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    v_scale: float,
    causal: bool,
    window_left: int,
    softcap: float,
    handle: int,
    kernel: str,
) -> None:
    """Caches in NHD order here; the wrapper passes an HND cache as a transposed view."""
    provenance.note(provenance.EMULATED)
    pages, page_size = k_cache.shape[:2]
    rows = last_page_len.numel()
    q_starts = _ops.offsets(kernel, "qo_indptr", qo_indptr, rows)
    kv_starts = _ops.offsets(kernel, "paged_kv_indptr", kv_indptr, rows)
    fills = _ops.entries(kernel, "paged_kv_last_page_len", last_page_len, rows)
    mask_starts = [] if mask_indptr is None else _ops.entries(kernel, "mask_indptr", mask_indptr, rows)
    if q_starts[rows] > q.shape[0]:
        raise KernelFault(kernel, "qo_indptr", f"row {rows - 1} ends at {q_starts[rows]}; q has {q.shape[0]} tokens")
    keys_per_tile, tiles = schedule.read(kernel, int_workspace, 3)

    parts: dict[tuple[int, int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for row, query_tile, key_tile in tiles:
        if not 0 <= row < rows:
            raise KernelFault(kernel, "int_workspace", f"a tile belongs to request {row} of {rows}")
        start = q_starts[row] + query_tile * schedule.QUERY_TILE
        stop = min(q_starts[row + 1], start + schedule.QUERY_TILE)
        if stop <= start:
            continue
        kv_start, kv_stop = kv_starts[row], kv_starts[row + 1]
        if kv_stop > kv_indices.numel():
            raise KernelFault(
                kernel, "paged_kv_indices", f"row {row} reads up to entry {kv_stop - 1} of {kv_indices.numel()}"
            )
        length = kv_length(kernel, row, kv_stop - kv_start, fills[row], page_size)
        position = length - (q_starts[row + 1] - start)
        first = key_tile * keys_per_tile
        if key_tile > 0 and first >= length:
            raise KernelFault(
                kernel, "int_workspace", f"a tile of row {row} begins at key {first} of {length}: its size is negative"
            )
        last = min(first + keys_per_tile, length)
        if window_left >= 0:
            first = max(first, position - window_left)
        if causal and custom_mask is None:
            last = min(last, position + stop - start)
        found = parts.setdefault((row, start, stop), [])
        if last <= first:
            continue
        ids, inside = _ops.page_slice(
            kernel, "paged_kv_indices", row, kv_indices[kv_start:kv_stop], page_size, pages, first, last
        )
        right = 0 if causal and custom_mask is None else -1
        visible = causal_window(
            stop - start, position, first, last - first, left=window_left, right=right, device=q.device
        )
        if custom_mask is not None:
            bits = unpack_mask(kernel, row, custom_mask, mask_starts[row], q_starts[row + 1] - q_starts[row], length)
            bits = bits[start - q_starts[row] : stop - q_starts[row], first:last]
            visible = bits if visible is None else bits & visible
        found.append(
            attend(
                q[start:stop],
                k_cache[ids].flatten(0, 1)[inside],
                v_cache[ids].flatten(0, 1)[inside],
                scale=scale,
                visible=visible,
                softcap=softcap,
            )
        )
    for (_, start, stop), found in parts.items():
        if not found:
            out[start:stop] = 0
            if lse is not None:
                lse[start:stop] = EMPTY_LSE
            continue
        result, result_lse = merge_parts(found)
        out[start:stop] = result * v_scale
        if lse is not None:
            lse[start:stop] = (result_lse * LOG2_E).clamp(min=EMPTY_LSE)


def _native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    last_page_len: torch.Tensor,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    scale: float,
    v_scale: float,
    causal: bool,
    window_left: int,
    softcap: float,
    handle: int,
    kernel: str,
) -> None:
    """The buffers among the arguments are those that the library's wrapper holds; naming them lets a guard see them."""
    provenance.note(provenance.NATIVE)
    wrapper = native_wrappers[handle]
    wrapper.launch(q, k_cache, v_cache, out, lse, scale, v_scale)


run_paged = _ops.define(
    "flashinfer_paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor qo_indptr, Tensor kv_indptr, "
    "Tensor kv_indices, Tensor last_page_len, Tensor? custom_mask, Tensor? mask_indptr, Tensor int_workspace, "
    "Tensor(a!) out, Tensor(b!)? lse, float scale, float v_scale, bool causal, int window_left, float softcap, "
    "int handle, str kernel) -> ()",
    cpu=_emulate,
    cuda=_native,
    fake=_ops.fake_none,
)

"""FlashMLA: latent attention over pages of 64 keys, with a schedule made on the device.

Convention source: ``flash_mla.get_mla_metadata`` and ``flash_mla.flash_mla_with_kvcache`` (deepseek-ai/FlashMLA, the
interface with ``tile_scheduler_metadata`` and ``num_splits`` tensors), also shipped as ``sgl_kernel.flash_mla``.
"""

from __future__ import annotations

from typing import Any

import torch

from kits.errors import KernelFault, Unavailable
from kits.kernels import _ops, provenance
from kits.kernels._attend import attend, causal_window, merge_parts

PAGE_SIZE = 64
KERNEL = "flash_mla_with_kvcache"
_PARTS = 2  # the library has one part per group of SMs; two are the fewest that split a request
_PART_WIDTH = 8  # first request, its first key, last request, end key there, index of the first split; the rest unused


def get_mla_metadata(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The schedule for `flash_mla_with_kvcache`, made on the device: it may be captured, or copied into buffers.

    ``cache_seqlens`` (B,) int32; ``num_q_tokens_per_head_k`` = queries per request * Hq / Hkv. Returns
    ``tile_scheduler_metadata`` (parts, 8) int32 and ``num_splits`` (B + 1,) int32: fresh tensors in each call. A
    schedule made for other lengths leaves keys out.
    """
    metadata, splits = _metadata_op(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)
    return metadata, splits


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latent attention of a uniform few queries per request over keys that already lie in the cache.

    ``q`` (B, S, Hq, 576); ``k_cache`` (pages, 64, 1, 576), the value of a key being its first ``head_dim_v`` = 512
    numbers; ``block_table`` (B, columns) int32; ``cache_seqlens`` (B,) int32, all keys of a request, its queries' own
    included. Query ``i`` stands at ``len - S + i``; ``causal`` hides later keys. ``softmax_scale`` defaults to
    ``576 ** -0.5``, which is not what an absorbed model wants.

    Returns ``out`` (B, S, Hq, 512) and ``lse`` (B, Hq, S) float32, natural log; a query without a key gets zeros and
    **+inf**. A request that no part of the schedule covers is left as it is in memory.

    A length of 0 or below is outside the contract: the kernel fetches block ``ceil(len / 64) - 1`` before its loop.
    ``KernelFault`` (emulation) for that, for a table too narrow, for page ids outside the cache, and for a schedule and
    ``num_splits`` that do not belong together.
    """
    if k_cache.shape[1] != PAGE_SIZE or k_cache.shape[2] != 1 or k_cache.shape[3] != q.shape[3]:
        raise ValueError(f"{KERNEL}: k_cache must be (pages, {PAGE_SIZE}, 1, {q.shape[3]}), not {tuple(k_cache.shape)}")
    rows = q.shape[0]
    if block_table.shape[0] != rows or cache_seqlens.shape != (rows,) or num_splits.shape != (rows + 1,):
        raise ValueError(
            f"{KERNEL}: q has {rows} requests, block_table {tuple(block_table.shape)}, "
            f"cache_seqlens {tuple(cache_seqlens.shape)}, num_splits {tuple(num_splits.shape)}"
        )
    _ops.require_indices(KERNEL, block_table=block_table, cache_seqlens=cache_seqlens)
    out, lse = _attention_op(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
    )
    return out, lse


def _emulate_metadata(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Deal the blocks of all requests out to the parts, in order, as evenly as blocks allow."""
    lengths: list[int] = cache_seqlens.tolist()
    blocks = [-(-max(length, 0) // PAGE_SIZE) for length in lengths]
    share = max(-(-sum(blocks) // _PARTS), 1)
    parts, splits = [], [0] * len(lengths)
    row = block = 0
    for _ in range(_PARTS):
        first_row, first_block, left = row, block, share
        last_row, last_key = row - 1, 0
        first_split = splits[row] if row < len(lengths) else 0
        while row < len(lengths) and left > 0:
            take = min(left, blocks[row] - block)
            splits[row] += 1
            left -= take
            last_row = row
            if block + take == blocks[row]:
                last_key = lengths[row]
                row, block = row + 1, 0
            else:
                block += take
                last_key = block * PAGE_SIZE
        parts.append([first_row, first_block * PAGE_SIZE, last_row, last_key, first_split, 0, 0, 0])
    totals = [0]
    for count in splits:
        totals.append(totals[-1] + count)
    device = cache_seqlens.device
    return (
        torch.tensor(parts, dtype=torch.int32, device=device),
        torch.tensor(totals, dtype=torch.int32, device=device),
    )


def _emulate(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    provenance.note(provenance.EMULATED)
    rows, queries, heads, _ = q.shape
    pages = k_cache.shape[0]
    lengths: list[int] = cache_seqlens.tolist()
    for row, length in enumerate(lengths):
        if length <= 0:
            raise KernelFault(
                KERNEL, "cache_seqlens", f"row {row}: length {length}: block {-(-length // PAGE_SIZE) - 1} is fetched"
            )
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for first_row, first_key, last_row, last_key, *_ in tile_scheduler_metadata.tolist():
        if last_row >= rows or (last_row >= first_row and first_row < 0):
            raise KernelFault(
                KERNEL, "tile_scheduler_metadata", f"a part covers requests {first_row}..{last_row} of {rows}"
            )
        for row in range(first_row, last_row + 1):
            first = first_key if row == first_row else 0
            # The end is a whole block of the schedule, cut by the length that the kernel itself reads.
            end = -(-last_key // PAGE_SIZE) * PAGE_SIZE if row == last_row else lengths[row]
            end = min(end, lengths[row])
            part = found.setdefault(row, [])
            if end <= first:
                part.append(
                    (q.new_zeros(queries, heads, head_dim_v).float(), q.new_full((queries, heads), -torch.inf).float())
                )
                continue
            ids, inside = _ops.page_slice(KERNEL, "block_table", row, block_table[row], PAGE_SIZE, pages, first, end)
            keys = k_cache[ids].flatten(0, 1)[inside]
            position = lengths[row] - queries
            right = 0 if causal else -1
            visible = causal_window(queries, position, first, end - first, left=-1, right=right, device=q.device)
            part.append(attend(q[row], keys, keys[..., :head_dim_v], scale=softmax_scale, visible=visible))
    totals: list[int] = num_splits.tolist()
    out, lse = _outputs(q, head_dim_v)
    out.fill_(float("nan"))
    lse.fill_(float("nan"))
    for row, parts in found.items():
        if totals[row + 1] - totals[row] != len(parts):
            raise KernelFault(
                KERNEL,
                "num_splits",
                f"row {row}: {totals[row + 1] - totals[row]} partial results are combined, {len(parts)} were made",
            )
        result, result_lse = merge_parts(parts)
        out[row] = result
        lse[row] = result_lse.masked_fill(result_lse == -torch.inf, torch.inf).transpose(0, 1)
    return out, lse


def _outputs(q: torch.Tensor, head_dim_v: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows, queries, heads, _ = q.shape
    return q.new_empty(rows, queries, heads, head_dim_v), q.new_empty((rows, heads, queries), dtype=torch.float32)


def _library() -> Any:
    try:
        from sgl_kernel import flash_mla
    except ImportError:
        try:
            import flash_mla
        except ImportError as error:
            raise Unavailable("package", "neither sgl_kernel.flash_mla nor flash_mla can be imported") from error
    return flash_mla


def _native_metadata(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    metadata, splits = _library().get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)
    if not isinstance(metadata, torch.Tensor):
        raise Unavailable(
            "package", "this flash_mla keeps its schedule in an object of its own; one before 2026 is needed"
        )
    return metadata, splits


def _native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    library = _library()
    provenance.note(provenance.NATIVE)
    out, lse = library.flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale=softmax_scale,
        causal=causal,
    )
    return out, lse


def _fake_metadata(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    parts = cache_seqlens.new_empty((_PARTS, _PART_WIDTH), dtype=torch.int32)
    return parts, cache_seqlens.new_empty((cache_seqlens.shape[0] + 1,), dtype=torch.int32)


def _fake(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    *_rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, head_dim_v)


_metadata_op = _ops.define(
    "flash_mla_metadata(Tensor cache_seqlens, int num_q_tokens_per_head_k, int num_heads_k) -> (Tensor, Tensor)",
    cpu=_emulate_metadata,
    cuda=_native_metadata,
    fake=_fake_metadata,
)
_attention_op = _ops.define(
    "flash_mla_with_kvcache(Tensor q, Tensor k_cache, Tensor block_table, Tensor cache_seqlens, int head_dim_v, "
    "Tensor tile_scheduler_metadata, Tensor num_splits, float softmax_scale, bool causal) -> (Tensor, Tensor)",
    cpu=_emulate,
    cuda=_native,
    fake=_fake,
)

"""Our own Triton kernels over a flat KV pool: paged decode, and extend with new keys given apart.

Convention source: this file. The shape of the contract is the one that serving engines use for their Triton
backends: a pool of slots, a flat list of slot ids with row offsets, the prefix in the pool and the new keys beside it.
The same source is compiled for a GPU and runs in Triton's interpreter on a CPU (float16 and float32; bfloat16 is wrong
there). On the CPU the wrapper looks for out-of-bounds accesses first, because the interpreter would really do them.
"""

from __future__ import annotations

import warnings

import torch

from kits.errors import KernelFault
from kits.kernels import _ops, provenance
from kits.kernels._triton import INTERPRETED, check_mode, triton
from kits.kernels._triton_attention import attention_kernel

check_mode(attention_kernel)

MOST_QUERIES = 64
"""Query rows of a tile at most: tokens times the heads of a group."""


def decode_attention(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = -1,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """One query per request over slots of the pool; writes all B rows of ``out``.

    Shapes: ``q`` (B, Hq, D); ``k_buffer`` (slots, Hkv, D), ``v_buffer`` (slots, Hkv, Dv), any strides with a
    contiguous last dimension; ``kv_indptr`` (>= B + 1,) int32 or int64; ``kv_indices`` (n,) int32 or int64 slot ids;
    ``out`` (B, Hq, Dv). Row ``b`` attends to slots ``kv_indices[kv_indptr[b] : kv_indptr[b + 1]]``, the query standing
    at the last of them. For latent attention (MLA) ``v_buffer`` is a view of the first Dv values of ``k_buffer``.

    ``window``: number of visible keys *including the query's own*, -1 for all; keys outside are not loaded.
    Scores are ``q . (k * k_scale) * scale``, capped by ``softcap`` (0 for none), then masked; values are
    ``v * v_scale``. ``sinks`` (Hq,) is one extra score per head, neither scaled nor capped.

    A row whose end is not after its start has no keys: the loop is empty and the row becomes zeros. No value of these
    arrays is validated, as in any kernel; on the CPU a ``KernelFault`` names an offset or slot that lies outside.
    Shapes that do not fit are a ValueError on any device.
    """
    _check_shapes("decode_attention", q, k_buffer, v_buffer, out, sinks)
    _decode_op(q, k_buffer, v_buffer, kv_indptr, kv_indices, out, scale, softcap, window, sinks, k_scale, v_scale)


def extend_attention(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    *,
    scale: float,
    max_extend_len: int | None = None,
    causal: bool = True,
    window: int = -1,
    custom_mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Ragged queries over a prefix in the pool and their own new keys, given apart.

    Shapes: ``q`` (T, Hq, D), ``k_new`` (T, Hkv, D), ``v_new`` (T, Hkv, Dv), ``out`` (T, Hq, Dv) share the token
    offsets ``qo_indptr`` (>= B + 1,). ``kv_indptr``, ``kv_indices`` name the slots of the **prefix only**; the rest as
    in `decode_attention`. B is ``qo_indptr.shape[0] - 1``.

    Query ``i`` of a row with ``p`` prefix keys stands at ``p + i``. It sees the prefix, and of the new keys those up to
    its own (``causal``) or all. ``window`` as in `decode_attention`, for prefix and new keys. ``custom_mask`` (bool or
    uint8, one byte per pair of query and key) replaces ``causal``, and the window cuts further: row ``b`` starts at
    ``mask_indptr[b]`` and is (queries, prefix + queries), row-major. ``k_scale`` and ``v_scale`` belong to the pool;
    new keys are not scaled.

    ``max_extend_len``: host integer, the grid covers so many queries a row (default T); further ones are not written.
    Rows of ``out`` from ``qo_indptr[B]`` on are left as they are. A prefix of negative length is an empty loop: the
    row then sees its new keys only, and its queries stand at ``i``. A negative number of queries is no query.
    """
    if (custom_mask is None) != (mask_indptr is None):
        raise ValueError("extend_attention: custom_mask and mask_indptr go together")
    _check_shapes("extend_attention", q, k_buffer, v_buffer, out, sinks)
    _check_shapes("extend_attention", q, k_new, v_new, out, sinks)
    _extend_op(
        q,
        k_new,
        v_new,
        k_buffer,
        v_buffer,
        qo_indptr,
        kv_indptr,
        kv_indices,
        out,
        scale,
        q.shape[0] if max_extend_len is None else max_extend_len,
        causal,
        window,
        custom_mask,
        mask_indptr,
        softcap,
        sinks,
        k_scale,
        v_scale,
    )


def _check_shapes(
    kernel: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """What the launch needs to be true of shapes and strides: no value is read."""
    fits = (
        q.shape[1] % k.shape[1] == 0
        and q.shape[2] == k.shape[2]
        and v.shape[:2] == k.shape[:2]
        and out.shape[0] >= q.shape[0]
        and out.shape[1:] == (q.shape[1], v.shape[2])
        and (sinks is None or sinks.shape == (q.shape[1],))
    )
    if not fits:
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v, out) if x is not None)
        raise ValueError(f"{kernel}: shapes of q, k, v, out do not fit: {shapes}; one sink per query head")
    if any(x.stride(-1) != 1 for x in (q, k, v, out)):
        raise ValueError(f"{kernel}: the last dimension of q, k, v and out must be contiguous")


def _decode(
    q: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    softcap: float,
    window: int,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    rows = q.shape[0]
    if not q.is_cuda:
        _check_prefix("decode_attention", kv_indptr, kv_indices, rows, k_buffer.shape[0], window - 1, window)
    _launch(
        q, None, None, k_buffer, v_buffer, None, kv_indptr, kv_indices, out, rows, 1,
        scale, True, window, None, None, softcap, sinks, k_scale, v_scale,
    )  # fmt: skip


def _extend(
    q: torch.Tensor,
    k_new: torch.Tensor,
    v_new: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    scale: float,
    max_extend_len: int,
    causal: bool,
    window: int,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    rows = qo_indptr.shape[0] - 1
    if not q.is_cuda:
        prefix = _check_prefix("extend_attention", kv_indptr, kv_indices, rows, k_buffer.shape[0], window - 2, window)
        _check_queries(qo_indptr, rows, min(q.shape[0], k_new.shape[0], out.shape[0]), prefix, custom_mask, mask_indptr)
    _launch(
        q, k_new, v_new, k_buffer, v_buffer, qo_indptr, kv_indptr, kv_indices, out, rows, max_extend_len,
        scale, causal, window, custom_mask, mask_indptr, softcap, sinks, k_scale, v_scale,
    )  # fmt: skip


def _launch(
    q: torch.Tensor,
    k_new: torch.Tensor | None,
    v_new: torch.Tensor | None,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    out: torch.Tensor,
    rows: int,
    max_queries: int,
    scale: float,
    causal: bool,
    window: int,
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    k_scale: float,
    v_scale: float,
) -> None:
    if INTERPRETED and torch.bfloat16 in (q.dtype, k_buffer.dtype):
        raise TypeError("Triton's interpreter computes bfloat16 wrongly: use float16 or float32 on a CPU")
    provenance.note(provenance.INTERPRETED if INTERPRETED else provenance.NATIVE)
    dim, v_dim = k_buffer.shape[-1], v_buffer.shape[-1]
    kv_heads = k_buffer.shape[1]
    group = q.shape[1] // kv_heads
    pairs = rows * kv_heads
    if pairs == 0 or max_queries <= 0:
        return
    # Keys wider than values (latent attention) are split, so that both parts fill their power of two.
    body = min(dim, v_dim)
    block_z, block_m, block_n = _tiles(pairs, max_queries * group, dim)
    grid = (triton.cdiv(pairs, block_z), triton.cdiv(max_queries * group, block_m))
    nothing = q
    with warnings.catch_warnings():
        # The interpreter's numpy complains about NaN and inf in rows of garbage.
        warnings.simplefilter("ignore", RuntimeWarning)
        attention_kernel[grid](
            q,
            nothing if k_new is None else k_new,
            nothing if v_new is None else v_new,
            k_buffer,
            v_buffer,
            out,
            nothing if qo_indptr is None else qo_indptr,
            kv_indptr,
            kv_indices,
            nothing if custom_mask is None else custom_mask.view(torch.uint8),
            nothing if mask_indptr is None else mask_indptr,
            nothing if sinks is None else sinks,
            pairs,
            scale,
            k_scale,
            v_scale,
            softcap,
            window,
            *q.stride()[:2],
            *((0, 0) if k_new is None else k_new.stride()[:2]),
            *((0, 0) if v_new is None else v_new.stride()[:2]),
            *k_buffer.stride()[:2],
            *v_buffer.stride()[:2],
            *out.stride()[:2],
            KV_HEADS=kv_heads,
            GROUP=group,
            DIM=body,
            ROPE=dim - body,
            V_DIM=v_dim,
            EXTEND=k_new is not None,
            CAUSAL=k_new is not None and causal and custom_mask is None,
            HAS_MASK=custom_mask is not None,
            HAS_WINDOW=window >= 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None,
            HAS_SCALES=k_scale != 1.0 or v_scale != 1.0,
            V_IN_K=_is_head_of(v_buffer, k_buffer) and (k_new is None or _is_head_of(v_new, k_new)),
            V_LIKE_K=v_buffer.stride() == k_buffer.stride()
            and (k_new is None or v_new is None or v_new.stride() == k_new.stride()),
            OUT_LIKE_Q=out.stride() == q.stride(),
            MANY_Z=grid[0] > 1,
            MANY_M=grid[1] > 1,
            BLOCK_Z=block_z,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_D=_power(body),
            BLOCK_R=_power(dim - body),
            BLOCK_V=_power(v_dim),
        )


def _tiles(pairs: int, queries: int, dim: int) -> tuple[int, int, int]:
    """(pairs, query rows, keys) of a tile; of no length, so that a row does not change with its neighbours."""
    if INTERPRETED:
        return min(_power(pairs), 64), min(_power(queries), MOST_QUERIES), 32
    return 1, min(max(_power(queries), 16), MOST_QUERIES), 32 if dim > 256 else 64


def _power(value: int) -> int:
    """The least power of two that is at least ``value``, at least 1 (on a GPU at least 16, the least tile of a dot)."""
    return max(1 if INTERPRETED else 16, triton.next_power_of_2(max(value, 1)))


def _is_head_of(v: torch.Tensor | None, k: torch.Tensor | None) -> bool:
    """Whether ``v`` is a view of the first values of every vector of ``k``, so that one load serves both."""
    return v is not None and k is not None and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


def _check_prefix(
    kernel: str,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    rows: int,
    slots: int,
    reach: int,
    window: int,
) -> list[int]:
    """Fault where the kernel would read an index or a slot that is not there; returns the prefix lengths.

    ``reach``: how many keys before the end the first query still sees, where there is a window.
    """
    if kv_indptr.numel() < rows + 1:
        raise KernelFault(kernel, "kv_indptr", f"has {kv_indptr.numel()} entries; {rows} rows need {rows + 1}")
    bounds: list[int] = kv_indptr[: rows + 1].tolist()
    size = kv_indices.numel()
    lengths = []
    for row in range(rows):
        start, stop = bounds[row], bounds[row + 1]
        lengths.append(stop - start)
        if window >= 0:
            start = max(start, stop - reach - 1) if reach >= 0 else stop
        if stop <= start:
            continue
        if start < 0 or stop > size:
            raise KernelFault(
                kernel, "kv_indptr", f"row {row} reads entries {start}..{stop - 1} of kv_indices, which has {size}"
            )
        _ops.check_ids(kernel, "kv_indices", row, kv_indices[start:stop].tolist(), slots, "slot")
    return lengths


def _check_queries(
    qo_indptr: torch.Tensor,
    rows: int,
    tokens: int,
    prefix: list[int],
    custom_mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
) -> None:
    """Fault where the kernel would read or write a token, or a byte of the mask, that is not there."""
    kernel = "extend_attention"
    bounds: list[int] = qo_indptr.tolist()
    masks: list[int] = [] if mask_indptr is None else _ops.entries(kernel, "mask_indptr", mask_indptr, rows)
    for row in range(rows):
        start, stop = bounds[row], bounds[row + 1]
        if stop <= start:
            continue
        if start < 0 or stop > tokens:
            raise KernelFault(kernel, "qo_indptr", f"row {row} covers tokens {start}..{stop - 1} of {tokens}")
        if custom_mask is not None:
            count = stop - start
            width = prefix[row] + count
            first = masks[row] + min(prefix[row], 0)
            last = masks[row] + (count - 1) * width + width - 1
            if first < 0 or last >= custom_mask.numel():
                raise KernelFault(
                    kernel, "custom_mask", f"row {row} reads bytes {first}..{last} of {custom_mask.numel()}"
                )


_decode_op = _ops.define(
    "triton_decode_attention(Tensor q, Tensor k_buffer, Tensor v_buffer, Tensor kv_indptr, Tensor kv_indices, "
    "Tensor(a!) out, float scale, float softcap, int window, Tensor? sinks, float k_scale, float v_scale) -> ()",
    cpu=_decode,
    cuda=_decode,
    fake=_ops.fake_none,
)
_extend_op = _ops.define(
    "triton_extend_attention(Tensor q, Tensor k_new, Tensor v_new, Tensor k_buffer, Tensor v_buffer, "
    "Tensor qo_indptr, Tensor kv_indptr, Tensor kv_indices, Tensor(a!) out, float scale, int max_extend_len, "
    "bool causal, int window, Tensor? custom_mask, Tensor? mask_indptr, float softcap, Tensor? sinks, "
    "float k_scale, float v_scale) -> ()",
    cpu=_extend,
    cuda=_extend,
    fake=_ops.fake_none,
)

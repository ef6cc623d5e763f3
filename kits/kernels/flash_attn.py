"""FlashAttention over a paged KV cache: the contract of the fa3 and fa4 backends.

Convention source: ``sgl_kernel.flash_attn.flash_attn_with_kvcache`` (FlashAttention 3 for SM 9.0) and, for version 4,
``flash_attn.cute.flash_attn_varlen_func`` with ``page_table`` and ``seqused_k``. One signature serves both.
On the CPU both versions run one emulation.
"""

from __future__ import annotations

import torch

from kits.errors import KernelFault
from kits.kernels import _ops, provenance
from kits.kernels._attend import NEGATIVE_INFINITY, attend, causal_window

KERNEL = "flash_attn_with_kvcache"
TILE = 128
"""Keys of a tile of version 4 on SM 9.0, for heads of 64."""


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    ver: int = 3,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of ragged queries over paged keys that already lie in the cache. Writes nothing into the cache.

    Shapes (B requests, T query tokens in all):

    * ``q`` (T, Hq, D); ``k_cache`` (pages, page_size, Hkv, D), ``v_cache`` (pages, page_size, Hkv, Dv).
    * ``page_table`` (B, columns) int32: key ``j`` of request ``b`` is at ``page_table[b, j // page_size]``, slot
      ``j % page_size``. Only the ``ceil(len / page_size)`` first entries of a row are read, and of those only pages
      with a key inside the window.
    * ``cache_seqlens`` (B,) int32: the **whole** number of keys of a request, its new tokens included.
    * ``cu_seqlens_q`` (B + 1,) int32: query offsets. B is taken from this array, as the library does: unsliced
      buffers make more rows.
    * ``max_seqlen_q``: host integer; the grid covers so many queries a request. Further ones are not written.
    * ``sinks`` (Hq,): one extra score per head, neither scaled nor capped. ``k_descale``, ``v_descale``
      (B, Hkv) float32: multiply cached values; only with an 8-bit q and cache, as in the library.

    Convention: query ``i`` of a request with ``s`` queries and ``n`` keys stands at ``i + n - s`` (bottom-right).
    ``causal`` hides later keys; ``window_size = (left, right)`` hides those more than ``left`` before or ``right``
    after, -1 for no limit. A window of W keys including the query's own is ``(W - 1, 0)``.

    Returns ``out`` (T, Hq, Dv) in q's dtype (bfloat16 for 8-bit q), and with ``return_softmax_lse`` also ``lse``
    (Hq, T) float32 (natural log, sinks included). Both are fresh memory: rows that no request covers (beyond
    ``cu_seqlens_q[-1]`` or ``max_seqlen_q``) hold garbage, NaN in the emulation. A request of length 0, or of a
    negative length, has no key to loop over: zeros, and -inf. At length 0 and with pages of 128, version 4 loads the
    values of the first listed page all the same, or zeros if its id lies outside the cache, and weighs them with 0:
    what is NaN there is NaN here. (Measured on an H200 with heads of 64; other head dims are taken to do the same.)

    Raises ValueError or TypeError for what the library refuses on the host, ``KernelFault`` (emulation) for offsets
    that decrease or leave q, a table too narrow for a length, and page ids outside the cache.
    """
    _check_arguments(q, k_cache, v_cache, page_table, cache_seqlens, cu_seqlens_q, k_descale, v_descale, ver)
    left, right = window_size
    out, lse = _op(
        q,
        k_cache,
        v_cache,
        page_table,
        cache_seqlens,
        cu_seqlens_q,
        max_seqlen_q,
        q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        causal,
        left,
        right,
        softcap,
        sinks,
        k_descale,
        v_descale,
        ver,
    )
    return (out, lse) if return_softmax_lse else out


def _check_arguments(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    ver: int,
) -> None:
    """What the library's host code refuses. Only shapes and dtypes: no value is read."""
    if ver not in (3, 4):
        raise ValueError(f"{KERNEL}: ver must be 3 or 4, not {ver!r}")
    _ops.require_indices(KERNEL, page_table=page_table, cache_seqlens=cache_seqlens, cu_seqlens_q=cu_seqlens_q)
    if q.dim() != 3 or k_cache.dim() != 4 or v_cache.dim() != 4:
        raise ValueError(
            f"{KERNEL}: q must be (tokens, heads, dim) and the caches (pages, page_size, heads, dim), "
            f"not {tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise TypeError(f"{KERNEL}: q, k_cache, v_cache differ in dtype: {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if k_cache.shape[:3] != v_cache.shape[:3] or k_cache.shape[3] != q.shape[2] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"{KERNEL}: shapes do not fit: q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, "
            f"v_cache {tuple(v_cache.shape)}"
        )
    rows = cu_seqlens_q.shape[0] - 1
    if page_table.dim() != 2 or page_table.shape[0] != rows or cache_seqlens.shape != (rows,):
        raise ValueError(
            f"{KERNEL}: cu_seqlens_q has {rows} rows, page_table {tuple(page_table.shape)}, "
            f"cache_seqlens {tuple(cache_seqlens.shape)}"
        )
    if (k_descale is not None or v_descale is not None) and q.dtype.itemsize != 1:
        raise TypeError(f"{KERNEL}: descale factors are read for 8-bit q and caches only, not for {q.dtype}")


def _emulate(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    ver: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    provenance.note(provenance.EMULATED)
    pages, page_size, kv_heads, _ = k_cache.shape
    rows = cu_seqlens_q.shape[0] - 1
    starts = _ops.offsets(KERNEL, "cu_seqlens_q", cu_seqlens_q, rows)
    if starts[-1] > q.shape[0]:
        raise KernelFault(KERNEL, "cu_seqlens_q", f"row {rows - 1} ends at {starts[-1]}; q has {q.shape[0]} tokens")
    right = 0 if causal else window_right
    out, lse = _outputs(q, v_cache, float("nan"))
    lengths: list[int] = cache_seqlens.tolist()
    for row in range(rows):
        length = lengths[row]
        start, stop = starts[row], starts[row + 1]
        tokens = min(stop - start, max_seqlen_q)
        if tokens <= 0:
            continue
        if length <= 0:
            out[start : start + tokens] = _without_keys(q, v_cache, page_table[row], loads=ver == 4 and length == 0)
            empty = NEGATIVE_INFINITY if sinks is None else sinks.float().unsqueeze(1)
            lse[:, start : start + tokens] = empty
            continue
        position = length - (stop - start)
        first = max(0, position - window_left) if window_left >= 0 else 0
        ids, inside = _ops.page_slice(KERNEL, "page_table", row, page_table[row], page_size, pages, first, length)
        keys = k_cache[ids].flatten(0, 1)[inside]
        values = v_cache[ids].flatten(0, 1)[inside]
        if k_descale is not None:
            keys = keys.float() * k_descale[row].view(1, kv_heads, 1)
        if v_descale is not None:
            values = values.float() * v_descale[row].view(1, kv_heads, 1)
        visible = causal_window(tokens, position, first, length - first, left=window_left, right=right, device=q.device)
        result, result_lse = attend(
            q[start : start + tokens],
            keys,
            values,
            scale=softmax_scale,
            visible=visible,
            softcap=softcap,
            sinks=sinks,
        )
        out[start : start + tokens] = result
        lse[:, start : start + tokens] = result_lse.transpose(0, 1)
    return out, lse


def _without_keys(q: torch.Tensor, v_cache: torch.Tensor, table: torch.Tensor, *, loads: bool) -> torch.Tensor:
    """What a token of a request without keys gets, ``(Hq, Dv)`` float32: zeros, or where the kernel ``loads`` pages as
    large as its tile 0 times the first listed one."""
    pages, page_size, kv_heads, _ = v_cache.shape
    listed = int(table[0]) if table.numel() else -1
    loads = loads and page_size == TILE and 0 <= listed < pages
    weighed = v_cache[listed].float().mul(0.0).sum(dim=0) if loads else v_cache.new_zeros(v_cache.shape[2:]).float()
    return weighed.repeat_interleave(q.shape[1] // kv_heads, dim=0)


def _outputs(q: torch.Tensor, v_cache: torch.Tensor, fill: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[-1]), dtype=dtype)
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    if fill is not None:
        # The library allocates its result and leaves rows that no request covers as they are.
        out.fill_(fill)
        lse.fill_(fill)
    return out, lse


def _native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    sinks: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
    ver: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    from kits.kernels import _flash_attn_native

    provenance.note(provenance.NATIVE)
    call = _flash_attn_native.version_3 if ver == 3 else _flash_attn_native.version_4
    return call(
        q,
        k_cache,
        v_cache,
        page_table=page_table,
        cache_seqlens=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_left, window_right),
        softcap=softcap,
        sinks=sinks,
        k_descale=k_descale,
        v_descale=v_descale,
    )


def _fake(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(q, v_cache, None)


_op = _ops.define(
    "flash_attn_with_kvcache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor cache_seqlens, "
    "Tensor cu_seqlens_q, int max_seqlen_q, float softmax_scale, bool causal, int window_left, int window_right, "
    "float softcap, Tensor? sinks, Tensor? k_descale, Tensor? v_descale, int ver) -> (Tensor, Tensor)",
    cpu=_emulate,
    cuda=_native,
    fake=_fake,
)

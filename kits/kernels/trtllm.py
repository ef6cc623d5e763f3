"""TensorRT-LLM's decode kernels, reached through FlashInfer: the contract of the trtllm_mha backend.

Convention source: ``flashinfer.decode.trtllm_batch_decode_with_kv_cache``, version 0.6.12 (``backend="auto"`` takes
XQA on SM 9.0 and 12.0, trtllm-gen on SM 10.0).
"""

from __future__ import annotations

import torch

from kits.errors import KernelFault, Unavailable
from kits.kernels import _ops, provenance
from kits.kernels._attend import attend, causal_window

KERNEL = "trtllm_batch_decode_with_kv_cache"


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    *,
    bmm1_scale: float = 1.0,
    bmm2_scale: float = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    q_len_per_req: int = 1,
) -> torch.Tensor:
    """Decode, or a uniform few queries per request, over keys that already lie in the cache.

    * ``query`` (B * q_len_per_req, Hq, D); ``kv_cache`` is ``(k, v)``, each (pages, Hkv, page_size, D) for ``HND``, or
      (pages, page_size, Hkv, D) for ``NHD``.
    * ``block_tables`` (>= B, columns) int32, contiguous: the kernel steps from row to row by the number of columns;
      ``seq_lens`` (>= B,) int32: **all** keys of a request, its queries' own included. B comes from ``query``.
    * ``max_seq_len``: host integer by which the kernel divides its work. Keys from there on are not promised to be
      read: XQA reads them (measured on an H200), the emulation does not.
    * Scores are ``q . k * bmm1_scale`` (softmax scale and scale of the keys in one), the result is times
      ``bmm2_scale``. Query ``i`` stands at ``seq_len - q_len_per_req + i``; later keys are hidden, and those more than
      ``window_left`` before (-1 for none). ``sinks`` (Hq,) float32: one extra score per head, not scaled.
    * ``workspace_buffer`` uint8 on the device: zeros before its first use, which every launch leaves so; never shared
      between streams, nor with a kernel that does not clean up (flashinfer-ai/flashinfer#1643).

    Returns ``out`` (like ``query``). A request of length 0 is outside the contract: trtllm-gen is reported to make its
    row NaN (sgl-project/sglang#26521), as the emulation does; XQA makes it zeros (measured). The length is read
    unsigned, so a negative one is a length of billions: ``KernelFault`` in the emulation, as for a table that is too
    narrow, for page ids outside the cache, and for a workspace that does not hold zeros.
    """
    if kv_layout not in ("NHD", "HND"):
        raise ValueError(f"{KERNEL}: kv_layout must be NHD or HND, not {kv_layout!r}")
    if query.shape[0] % q_len_per_req:
        raise ValueError(f"{KERNEL}: {query.shape[0]} query tokens are no multiple of q_len_per_req {q_len_per_req}")
    rows = query.shape[0] // q_len_per_req
    if block_tables.shape[0] < rows or seq_lens.shape[0] < rows:
        raise ValueError(
            f"{KERNEL}: {rows} requests; block_tables {tuple(block_tables.shape)}, seq_lens {tuple(seq_lens.shape)}"
        )
    _ops.require_indices(KERNEL, packed=True, block_tables=block_tables, seq_lens=seq_lens)
    if out is None:
        out = torch.empty_like(query)
    _op(
        query,
        kv_cache[0],
        kv_cache[1],
        workspace_buffer,
        block_tables,
        seq_lens,
        max_seq_len,
        bmm1_scale,
        bmm2_scale,
        window_left,
        out,
        sinks,
        kv_layout,
        q_len_per_req,
    )
    return out


def _emulate(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    kv_layout: str,
    q_len_per_req: int,
) -> None:
    provenance.note(provenance.EMULATED)
    if kv_layout == "HND":
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    pages, page_size = k_cache.shape[:2]
    rows = query.shape[0] // q_len_per_req
    if bool(workspace.any()):
        raise KernelFault(
            KERNEL, "workspace_buffer", "holds counters that are not zero: not cleared, or used otherwise"
        )
    for row, length in enumerate(_ops.entries(KERNEL, "seq_lens", seq_lens, rows)):
        tokens = slice(row * q_len_per_req, (row + 1) * q_len_per_req)
        if length < 0:
            raise KernelFault(KERNEL, "seq_lens", f"row {row}: {length}, read as {length + 2**32} keys")
        position = length - q_len_per_req
        first = max(0, position - window_left) if window_left >= 0 else 0
        stop = min(length, max_seq_len)
        if stop <= first:
            out[tokens] = float("nan")
            continue
        ids, inside = _ops.page_slice(KERNEL, "block_tables", row, block_tables[row], page_size, pages, first, stop)
        result, _ = attend(
            query[tokens],
            k_cache[ids].flatten(0, 1)[inside],
            v_cache[ids].flatten(0, 1)[inside],
            scale=bmm1_scale,
            visible=causal_window(
                q_len_per_req, position, first, stop - first, left=window_left, right=0, device=query.device
            ),
            sinks=sinks,
        )
        out[tokens] = result * bmm2_scale


def _native(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float,
    bmm2_scale: float,
    window_left: int,
    out: torch.Tensor,
    sinks: torch.Tensor | None,
    kv_layout: str,
    q_len_per_req: int,
) -> None:
    try:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache as library
    except ImportError as error:
        raise Unavailable("package", f"flashinfer cannot be imported: {error}") from error
    provenance.note(provenance.NATIVE)
    rows = query.shape[0] // q_len_per_req
    library(
        query,
        (k_cache, v_cache),
        workspace,
        block_tables[:rows],
        seq_lens[:rows],
        max_seq_len,
        bmm1_scale=bmm1_scale,
        bmm2_scale=bmm2_scale,
        window_left=window_left,
        out=out,
        sinks=sinks,
        kv_layout=kv_layout,
        q_len_per_req=q_len_per_req,
    )


_op = _ops.define(
    "trtllm_batch_decode(Tensor query, Tensor k_cache, Tensor v_cache, Tensor(a!) workspace, Tensor block_tables, "
    "Tensor seq_lens, int max_seq_len, float bmm1_scale, float bmm2_scale, int window_left, Tensor(b!) out, "
    "Tensor? sinks, str kv_layout, int q_len_per_req) -> ()",
    cpu=_emulate,
    cuda=_native,
    fake=_ops.fake_none,
)

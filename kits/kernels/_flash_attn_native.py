"""FlashAttention's own kernels, for CUDA tensors: version 3 from sgl_kernel, version 4 from flash_attn.cute."""

from __future__ import annotations

from typing import Any

import torch

from kits.errors import Unavailable


def version_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    sinks: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``sgl_kernel.flash_attn.flash_attn_with_kvcache`` (FlashAttention 3, SM 9.0)."""
    _require_capability(q, {9}, "FlashAttention 3")
    try:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache
    except ImportError as error:
        raise Unavailable("package", f"sgl_kernel.flash_attn cannot be imported: {error}") from error
    if sinks is not None:
        options["sinks"] = sinks
    out, lse, *_ = flash_attn_with_kvcache(q, k_cache, v_cache, return_softmax_lse=True, **options)
    return out, lse


def version_4(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    sinks: torch.Tensor | None,
    k_descale: torch.Tensor | None,
    v_descale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``flash_attn.cute.flash_attn_varlen_func`` over a paged cache (flash-attn-4, SM 9.0 and 10.0)."""
    _require_capability(q, {9, 10}, "FlashAttention 4")
    if k_descale is not None or v_descale is not None:
        raise Unavailable("architecture", "FlashAttention 4 has no 8-bit path with descale factors")
    try:
        from flash_attn.cute import flash_attn_varlen_func
    except ImportError as error:
        raise Unavailable("package", f"flash_attn.cute cannot be imported: {error}") from error
    # This version says None where the older ones say -1, and wants sinks in bfloat16.
    left, right = (None if side < 0 else side for side in window_size)
    out, lse, *_ = flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        seqused_k=cache_seqlens,
        page_table=page_table,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(left, right),
        softcap=softcap,
        learnable_sink=None if sinks is None else sinks.to(torch.bfloat16),
        return_lse=True,
    )
    return out, lse


def _require_capability(q: torch.Tensor, majors: set[int], what: str) -> None:
    major, minor = torch.cuda.get_device_capability(q.device)
    if major not in majors:
        raise Unavailable("architecture", f"{what} has no kernel for SM {major}.{minor}")
